"""What a worker asks of an engine: many at once, aborts, errors of one request only, an end without leftovers."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from omniqueue import errors
from omniqueue.engines.base import StageOutput
from tests.engines.cases import CASES, Case
from tests.engines.stage_process import StageProcess

pytestmark = pytest.mark.engine

#: 513 image tokens: long enough to be stopped on the way.
LONG = Case("long", "a very detailed map", width=512, height=512)
#: An abort takes effect within one step of the engine; this allows for a slow machine.
SOON_S = 10.0


def ids(output: StageOutput) -> list[int]:
    found: list[int] = output.data["cumulative_token_ids"]
    return found


def test_an_engine_tells_the_topology_that_the_stage_config_has(ar: StageProcess, dit: StageProcess) -> None:
    for stage in (ar, dit):
        assert tuple(stage.started()["topology"]) == stage.pipe.topology
        assert stage.started()["facts"]["pipeline"] == "glm_image"


def test_an_engine_reports_what_it_does_while_it_loads(ar: StageProcess) -> None:
    assert ar.started()["phases"][0] == "importing vllm_omni"
    assert "building the engine" in ar.started()["phases"]


def test_eight_requests_at_once_get_the_tokens_each_has_alone(ar: StageProcess) -> None:
    alone = [ids(ar.generate(case.job()).result()) for case in CASES]
    together = [ar.generate(case.job()) for case in CASES]
    assert [ids(answer.result()) for answer in together] == alone


@pytest.mark.parametrize("how", ["cancel", "abort"])
def test_a_stopped_request_ends_soon_and_leaves_its_neighbours_alone(ar: StageProcess, how: str) -> None:
    alone = ids(ar.generate(CASES[0].job()).result())
    stopped = ar.generate(LONG.job(), key=f"{how}ed")
    neighbour = ar.generate(CASES[0].job())
    time.sleep(1.0)
    began = time.monotonic()
    ar.tell(how, request=stopped.key)
    with pytest.raises(errors.OmniqueueError, match="Cancelled"):
        stopped.result()
    assert time.monotonic() - began < SOON_S
    assert ids(neighbour.result()) == alone


@pytest.mark.parametrize("how", ["cancel", "abort"])
def test_a_stopped_picture_frees_the_device_before_its_last_step(ar: StageProcess, dit: StageProcess, how: str) -> None:
    tokens = {0: ar.generate(LONG.job()).result()}
    whole = dit.generate({**LONG.job(), "num_inference_steps": 3}, tokens)
    began = time.monotonic()
    whole.result()
    step_s = (time.monotonic() - began) / 3
    stopped = dit.generate({**LONG.job(), "num_inference_steps": 200}, tokens, key=f"picture {how}")
    time.sleep(2 * step_s)
    began = time.monotonic()
    dit.tell(how, request=stopped.key)
    with pytest.raises(errors.OmniqueueError, match="Cancelled"):
        stopped.result()
    dit.generate({**LONG.job(), "num_inference_steps": 1}, tokens).result()
    assert time.monotonic() - began < 20 * step_s
    assert 0 < len(stopped.steps()) < 100


def test_progress_counts_the_denoising_steps(ar: StageProcess, dit: StageProcess) -> None:
    assert dit.started()["facts"]["steps"] is True
    tokens = {0: ar.generate(CASES[3].job()).result()}
    answer = dit.generate(CASES[3].job(), tokens)
    answer.result()
    assert answer.steps() == [[0, 0], *([step, CASES[3].steps] for step in range(1, CASES[3].steps + 1))]


def test_aborting_an_unknown_request_does_nothing(ar: StageProcess) -> None:
    assert "error" not in ar.tell("abort", request="never heard of").result(timeout=SOON_S)


def test_a_running_engine_is_healthy(ar: StageProcess, dit: StageProcess) -> None:
    for stage in (ar, dit):
        assert "error" not in stage.tell("health").result(timeout=SOON_S)


def test_a_prompt_that_is_too_long_is_refused_and_the_next_one_served(ar: StageProcess) -> None:
    with pytest.raises(errors.EngineRejected):
        ar.generate({**CASES[0].job(), "prompt": "x" * 20_000}).result()
    assert ids(ar.generate(CASES[0].job()).result())


def test_a_prompt_that_leaves_no_room_for_the_picture_is_refused(ar: StageProcess) -> None:
    with pytest.raises(errors.EngineRejected, match="leaves room for"):
        ar.generate({**CASES[0].job(), "prompt": "x" * 3_950}).result()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"temprature": 1.0}, "did you mean temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"n": 2}, "no parameter 'n'"),
        ({"max_tokens": 20}, "max_tokens is 20, and a picture of this size has 260 tokens"),
    ],
)
def test_a_parameter_that_the_first_stage_does_not_take_is_refused(
    ar: StageProcess, overrides: dict[str, object], said: str
) -> None:
    with pytest.raises(errors.EngineRejected, match=said):
        ar.generate(CASES[0].job(), overrides=overrides).result()


def test_a_parameter_that_the_second_stage_does_not_take_is_refused(ar: StageProcess, dit: StageProcess) -> None:
    tokens = ar.generate(CASES[0].job()).result()
    with pytest.raises(errors.EngineRejected, match="guidance_scale"):
        dit.generate(CASES[0].job(), {0: tokens}, overrides={"guidance_scal": 2.0}).result()
    assert dit.generate(CASES[0].job(), {0: tokens}).result().tensors["image"].shape == (64, 64, 3)


def test_the_second_stage_names_the_edge_when_the_first_gave_too_little(dit: StageProcess) -> None:
    with pytest.raises(errors.EngineError, match="stage 0 -> stage 1"):
        dit.generate(CASES[0].job(), {0: StageOutput({"token_ids": [1, 2, 3]})}).result()


def test_the_second_stage_names_the_edge_when_the_first_output_is_not_there(dit: StageProcess) -> None:
    with pytest.raises(errors.EngineError, match="stage 0 is not there"):
        dit.generate(CASES[0].job()).result()


@pytest.fixture
def doomed(checkpoint: Path, tmp_path: Path) -> Iterator[StageProcess]:
    """An engine to kill, from the file that vLLM-Omni ships for GPUs, unchanged."""
    spec = importlib.util.find_spec("vllm_omni")
    assert spec is not None
    assert spec.origin is not None
    stage = StageProcess(0, checkpoint, tmp_path, str(Path(spec.origin).parent / "deploy" / "glm_image.yaml"))
    yield stage
    stage.close()


def test_an_engine_whose_process_is_killed_says_so_and_leaves_nothing(ar: StageProcess, doomed: StageProcess) -> None:
    pids = doomed.started()["facts"]["pids"]
    assert pids
    assert doomed.stage.deploy["enforce_eager"] is False
    # Compiled code rounds otherwise than the uncompiled engine, so a drawn token may differ and all after it.
    plain, compiled, again = (ids(stage.generate(CASES[0].job()).result()) for stage in (ar, doomed, doomed))
    assert len(compiled) == len(plain)
    assert again == compiled
    running = doomed.generate(LONG.job())
    time.sleep(1.0)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(errors.EngineDead):
        running.result()
    with pytest.raises(errors.EngineDead):
        doomed.generate(CASES[0].job()).result()
    assert doomed.tell("health").result(timeout=SOON_S)["error"]["type"] == "EngineDead"
    assert doomed.close() == []
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_broken_checkpoint_is_an_error_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for part in checkpoint.iterdir():
        if part.name != "transformer":
            (broken / part.name).symlink_to(part)
    (broken / "transformer").mkdir()
    (broken / "transformer" / "config.json").write_bytes((checkpoint / "transformer" / "config.json").read_bytes())
    stage = StageProcess(1, broken, tmp_path)
    try:
        with pytest.raises(errors.EngineError, match="could not load stage 1"):
            stage.started()
        assert stage._start.result()["children"] == []
    finally:
        stage.close()
    assert stage.process.returncode == 0
