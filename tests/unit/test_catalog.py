"""Which pipeline a model name, a queue or a name means."""

from __future__ import annotations

from pathlib import Path

import pytest

from omniqueue import catalog, errors, settings


def config(*names: str, **changes: str) -> settings.Settings:
    return settings.Settings(stage_configs_path=":".join(names), **changes)  # type: ignore[arg-type]


def test_one_pipeline_has_the_plain_queue_names() -> None:
    known = catalog.load(config("fake_image.yaml"))
    assert known.queues() == ["stage0", "stage1"]
    assert known.model_names() == ["fake-image"]


def test_several_pipelines_have_queues_of_their_own() -> None:
    known = catalog.load(config("fake_image.yaml", "fake_text.yaml"))
    assert known.queues() == ["fake_image.stage0", "fake_image.stage1", "fake_text.stage0"]
    for pipe in known.pipelines:
        for stage in pipe.stages:
            assert known.for_queue(stage.queue) == (pipe, stage)
    assert known.for_queue("stage0") is None


def test_a_model_name_finds_its_pipeline_and_no_name_the_first() -> None:
    known = catalog.load(config("fake_image.yaml", "fake_text.yaml"))
    assert known.for_model("fake-text").name == "fake_text"
    assert known.for_model("fake-image").name == "fake_image"
    assert known.for_model(None).name == "fake_image"
    assert known.named("fake_text") is known.for_model("fake-text")


@pytest.mark.parametrize("model", ["nope", "", "Fake-Image", "fake-image ", "fake_image", "x" * 10_000])
def test_a_model_that_is_not_served_is_not_found_and_the_answer_lists_those_that_are(model: str) -> None:
    known = catalog.load(config("fake_image.yaml", "fake_text.yaml"))
    with pytest.raises(errors.ModelNotFound, match="there is fake-image, fake-text") as caught:
        known.for_model(model)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")
    assert len(caught.value.message) < 400


def test_an_unknown_pipeline_is_not_found() -> None:
    with pytest.raises(errors.NotFound, match="'nope'"):
        catalog.load(config("fake_image.yaml")).named("nope")


def test_the_environment_may_rename_the_models() -> None:
    known = catalog.load(config("fake_image.yaml", served_model_name="org/a, b,"))
    assert known.model_names() == ["org/a", "b"]


@pytest.mark.parametrize("path", [None, "", ":", "::"])
def test_without_a_config_the_variable_is_named(path: str | None) -> None:
    with pytest.raises(errors.ConfigError, match="OMNIQUEUE_STAGE_CONFIGS_PATH"):
        catalog.load(settings.Settings(stage_configs_path=path))


def test_a_config_that_is_missing_is_a_config_error() -> None:
    with pytest.raises(errors.ConfigError, match=r"fake_imag\.yaml"):
        catalog.load(config("fake_imag.yaml"))


def test_two_pipelines_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="same pipeline name: fake_image"):
        catalog.load(config("fake_image.yaml", "fake_image.yaml"))


def test_two_pipelines_with_one_model_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="same model name: m"):
        catalog.load(config("fake_image.yaml", "fake_text.yaml", served_model_name="m"))


def test_a_catalog_is_read_once_per_configuration() -> None:
    assert catalog.shared(config("fake_text.yaml")) is catalog.shared(config("fake_text.yaml"))
