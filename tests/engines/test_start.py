"""What stops an engine before anything heavy is imported."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from omniqueue import errors
from omniqueue.engines import environment, omni_inputs
from omniqueue.engines.base import Engine, StageRequest
from omniqueue.engines.vllm_omni import VllmOmniEngine
from omniqueue.pipeline import Pipeline, Stage

STAGE = Stage(0, "ar", "stage0")
PIPELINE = Pipeline("glm_image", (STAGE,))


def start(model: str) -> None:
    VllmOmniEngine().start(PIPELINE, STAGE, model, lambda phase: None)


@pytest.fixture(autouse=True)
def versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "check_versions", dict)


def test_it_keeps_to_the_protocol() -> None:
    assert isinstance(VllmOmniEngine(), Engine)


def test_no_model_is_an_error_that_says_how_to_set_one() -> None:
    with pytest.raises(errors.ConfigError, match="OMNIQUEUE_MODEL"):
        start("")


@pytest.mark.parametrize("model", ["/no/such/folder", "./models/glm", "glm-image", "a/b/c", "~no one/models"])
def test_a_path_that_is_not_there_is_an_error(model: str) -> None:
    with pytest.raises(errors.ConfigError, match="neither a folder nor a model id"):
        start(model)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(errors.ConfigError, match="neither a folder"):
        start(str(file))


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="not a checkpoint"):
        start(str(tmp_path))


def test_an_engine_that_was_not_started_takes_no_requests() -> None:
    engine = VllmOmniEngine()
    with pytest.raises(errors.EngineDead):
        asyncio.run(engine.generate(StageRequest("r", {}, 0, {}, {}), lambda done, total: None))
    with pytest.raises(errors.EngineDead):
        asyncio.run(engine.check_health())


def test_closing_twice_or_before_the_start_is_fine() -> None:
    engine = VllmOmniEngine()
    engine.close()
    engine.close()


def test_a_voice_is_refused_since_no_model_is_told_of_it() -> None:
    with pytest.raises(errors.EngineRejected, match="voice"):
        omni_inputs.check_voice(StageRequest("r", {"voice": "nova"}, 0, {}, {}))
