"""base_config chains and platform overlays, merged by vLLM-Omni's rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from omniqueue import configfile, deployfile, errors
from omniqueue.pipeline import Pipeline

BASE = """
pipeline: glm_image
dtype: bfloat16
max_n: 5
connectors:
  shm: {name: SharedMemoryConnector, extra: {a: 1, b: 2}}
stages:
  - stage_id: 0
    max_num_seqs: 4
    devices: "0"
    env: {A: "1", B: "2"}
    default_sampling_params: {temperature: 0.5, top_p: 0.9}
    compilation_config: {mode: 3}
  - {stage_id: 1, devices: "1"}
platforms:
  cuda: {model_runner: v1, stages: [{stage_id: 0, max_model_len: 100, enforce_eager: true}]}
"""


def load(folder: Path, **files: str) -> Pipeline:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return configfile.load(folder / f"{next(iter(files))}.yaml")


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIQUEUE_PLATFORM", "cpu")


def test_an_overlay_wins_key_by_key_and_adds_to_sampling_params(tmp_path: Path) -> None:
    top = """
base_config: base.yaml
dtype: float16
connectors: {shm: {extra: {b: 3}}}
stages:
  - {stage_id: 0, max_num_seqs: 8, default_sampling_params: {top_p: 0.1}, compilation_config: {level: 1}, env: {C: "3"}}
"""
    pipeline = load(tmp_path, top=top, base=BASE)
    stage = pipeline.stages[0]
    assert (stage.max_num_seqs, stage.devices) == (8, "0")
    assert stage.default_sampling_params == {"temperature": 0.5, "top_p": 0.1}
    assert stage.deploy["compilation_config"] == {"level": 1}
    assert stage.env == {"C": "3"}
    assert pipeline.deploy["dtype"] == "float16"
    assert pipeline.deploy["connectors"] == {"shm": {"name": "SharedMemoryConnector", "extra": {"a": 1, "b": 3}}}
    assert (pipeline.stages[1].devices, pipeline.max_n) == ("1", 5)


def test_a_chain_of_three_and_a_stage_that_only_the_overlay_has(tmp_path: Path) -> None:
    third = "pipeline: p\nstages: [{stage_id: 0, engine: fake, max_num_seqs: 2}]\n"
    second = "base_config: third.yaml\nmax_n: 3\n"
    first = "base_config: second.yaml\nstages: [{stage_id: 1, engine: fake}]\n"
    pipeline = load(tmp_path, first=first, second=second, third=third)
    assert [stage.max_num_seqs for stage in pipeline.stages] == [2, 16]
    assert (pipeline.name, pipeline.max_n) == ("p", 3)


def test_a_value_can_be_taken_back(tmp_path: Path) -> None:
    top = "base_config: base.yaml\nstages: [{stage_id: 0, devices: null}]\n"
    assert load(tmp_path, top=top, base=BASE).stages[0].devices is None


def test_a_base_is_found_relative_to_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "base.yaml").write_text("base_config: deeper.yaml\n", encoding="utf-8")
    (tmp_path / "sub" / "deeper.yaml").write_text("stages: [{stage_id: 0, engine: fake}]\n", encoding="utf-8")
    assert load(tmp_path, top="base_config: sub/base.yaml\n").name == "top"


def test_a_shipped_config_can_be_a_base_by_its_bare_name(tmp_path: Path) -> None:
    assert load(tmp_path, top="base_config: fake_image.yaml\nmax_n: 1\n").max_n == 1


def test_a_problem_in_a_base_names_the_base(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        load(tmp_path, top="base_config: base.yaml\n", base="stages: [{stage_id: 0, engin: fake}]\n")
    assert str(caught.value).startswith(f"{tmp_path}/base.yaml:1: stages[0].engin: ")


def test_a_problem_after_merging_names_the_file_that_said_it(tmp_path: Path) -> None:
    top = "base_config: base.yaml\nstages:\n- {stage_id: 0, max_num_batched_tokens: 2}\n"
    with pytest.raises(errors.ConfigError) as caught:
        load(tmp_path, top=top, base=BASE)
    assert str(caught.value).startswith(
        f"{tmp_path}/top.yaml:3: stages[0].max_num_batched_tokens: is 2, less than the 4"
    )


def test_two_files_that_build_on_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match=r"b\.yaml:1: base_config: goes round in a circle"):
        load(tmp_path, a="base_config: b.yaml\n", b="base_config: a.yaml\n")


def test_the_platform_in_effect_changes_the_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "max_model_len" not in load(tmp_path, base=BASE).stages[0].deploy
    monkeypatch.setenv("OMNIQUEUE_PLATFORM", "CUDA")
    pipeline = load(tmp_path, base=BASE)
    assert pipeline.platform == "cuda"
    assert pipeline.stages[0].deploy["max_model_len"] == 100
    assert "platforms" not in pipeline.deploy


def test_an_overlay_adds_to_mappings_it_may_add_to_and_replaces_the_rest(tmp_path: Path) -> None:
    overlay = """
platforms:
  cpu:
    stages:
      - stage_id: 0
        runtime: {devices: "5", env: {B: "9"}}
        default_sampling_params: {top_p: 0.2}
        engine_args: {compilation_config: {level: 1}}
"""
    stage = load(tmp_path, top=f"base_config: base.yaml\n{overlay}", base=BASE).stages[0]
    assert (stage.devices, stage.env) == ("5", {"A": "1", "B": "9"})
    assert stage.default_sampling_params == {"temperature": 0.5, "top_p": 0.2}
    assert stage.deploy["compilation_config"] == {"level": 1}


def test_overlays_of_base_and_overlay_are_merged_by_platform_and_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNIQUEUE_PLATFORM", "cuda")
    top = """
base_config: base.yaml
platforms:
  cuda: {stages: [{stage_id: 0, max_model_len: 200}, {stage_id: 1, enforce_eager: true}]}
  rocm: {stages: [{stage_id: 0, max_model_len: 300}]}
"""
    first, second = load(tmp_path, top=top, base=BASE).stages
    assert (first.deploy["max_model_len"], first.deploy["enforce_eager"]) == (200, True)
    assert second.deploy["enforce_eager"] is True


def test_a_fake_stages_engine_args_take_an_overlay_too(tmp_path: Path) -> None:
    text = """
stages: [{stage_id: 0, engine: fake, engine_args: {steps: 2, delay_s: 0.5}}]
platforms: {cpu: {stages: [{stage_id: 0, engine_args: {delay_s: 0}}]}}
"""
    assert load(tmp_path, top=text).stages[0].engine_args == {"steps": 2, "delay_s": 0}


@pytest.mark.parametrize(("driver", "expected"), [(True, "cuda"), (False, "cpu")])
def test_without_a_word_the_platform_is_what_the_machine_has(
    monkeypatch: pytest.MonkeyPatch, driver: bool, expected: str
) -> None:
    monkeypatch.delenv("OMNIQUEUE_PLATFORM")
    monkeypatch.setattr(Path, "exists", lambda self: driver)
    assert deployfile.platform() == expected
