"""What a good stage config becomes: upstream's format unchanged, our keys, and the defaults of both."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from omniqueue import configfile, errors, topology
from omniqueue.pipeline import FrameRule, Pipeline, SizeRule

SHIPPED = sorted(path.name for path in topology.shipped().glob("*.yaml") if path.name != "topologies.yaml")


def load(folder: Path, text: str, name: str = "config.yaml", **kwargs: Any) -> Pipeline:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return configfile.load(file, **kwargs)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_loads_by_its_bare_name(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    pipeline = configfile.load(name)
    assert pipeline.stages
    assert pipeline.final_stages
    assert pipeline.served_model_names
    assert pipeline.size.default[0] % pipeline.size.multiple == 0
    assert json.loads(json.dumps(configfile.as_json(pipeline)))["fingerprint"] == pipeline.fingerprint


def test_a_file_beside_us_wins_over_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    load(tmp_path, "stages: [{stage_id: 0, engine: fake}]\npipeline: mine\n", "fake_image.yaml")
    assert configfile.load("fake_image.yaml").name == "mine"


def test_a_file_that_is_not_there_is_told_with_the_nearest_shipped_one() -> None:
    with pytest.raises(
        errors.ConfigError, match=r"^fake_imag\.yaml: there is no such file; did you mean fake_image\.yaml\?"
    ):
        configfile.load("fake_imag.yaml")


def test_the_real_glm_image_is_two_stages_on_two_gpus() -> None:
    pipeline = configfile.load("glm_image.yaml")
    assert (pipeline.name, pipeline.model) == ("glm_image", "zai-org/GLM-Image")
    assert pipeline.served_model_names == ("zai-org/GLM-Image",)
    assert pipeline.size == SizeRule(32, 32, 2048, 2048 * 2048, (1024, 1024))
    ar, dit = pipeline.stages
    assert (ar.name, ar.execution_type, ar.devices, ar.queue) == ("ar", "llm_ar", "0", "stage0")
    assert (dit.name, dit.execution_type, dit.devices, dit.queue) == ("dit", "diffusion", "1", "stage1")
    assert dit.input_sources == (0,)
    assert (ar.final_output, dit.final_output, dit.final_output_type) == (False, True, "image")
    assert ar.default_sampling_params["stop_token_ids"] == [16385]
    assert ar.deploy["gpu_memory_utilization"] == 0.6
    assert pipeline.deploy == {"pipeline": "glm_image", "async_chunk": False}


def test_the_tiny_and_the_real_glm_image_are_the_same_pipeline() -> None:
    assert configfile.load("glm_image.yaml").fingerprint == configfile.load("glm_image_tiny.yaml").fingerprint


def test_three_stages_where_the_last_reads_both_others() -> None:
    pipeline = configfile.load("fake_three_stages.yaml")
    assert [stage.input_sources for stage in pipeline.stages] == [(), (0,), (0, 1)]
    assert [stage.final_output for stage in pipeline.stages] == [False, False, True]


def test_the_least_a_fake_pipeline_needs(tmp_path: Path) -> None:
    pipeline = load(tmp_path, "stages: [{stage_id: 1, engine: fake}, {stage_id: 0, engine: fake}]\n", "mine.yaml")
    assert pipeline.name == "mine"
    assert pipeline.served_model_names == ("mine",)
    first, last = pipeline.stages
    assert (first.stage_id, first.name, first.execution_type, first.input_sources) == (0, "stage0", "llm_ar", ())
    assert (last.stage_id, last.name, last.execution_type, last.input_sources) == (1, "stage1", "diffusion", (0,))
    assert (first.final_output, last.final_output, last.final_output_type) == (False, True, "image")
    assert (first.max_num_seqs, first.num_replicas, first.devices) == (16, 1, None)


@pytest.mark.parametrize(
    ("keys", "execution_type", "output_type", "at_once"),
    [
        ("engine: fake, final_output_type: text", "llm_ar", "text", 16),
        ("engine: fake, final_output_type: video", "diffusion", "video", 16),
        ("engine: fake, final_output_type: audio, execution_type: llm_generation", "llm_generation", "audio", 16),
        ("engine: fake, execution_type: llm_ar", "llm_ar", "text", 16),
        ("engine: fake, execution_type: llm_generation", "llm_generation", "audio", 16),
        ("engine: vllm", "llm_ar", "text", 16),
        ("engine: vllm, max_num_seqs: 64", "llm_ar", "text", 64),
        ('engine: "my.engine:Engine"', "diffusion", "image", 1),
        ('engine: "my.engine:Engine", max_num_seqs: 4', "diffusion", "image", 4),
    ],
)
def test_defaults_follow_engine_and_output(
    tmp_path: Path, keys: str, execution_type: str, output_type: str, at_once: int
) -> None:
    (stage,) = load(tmp_path, f"stages: [{{stage_id: 0, {keys}}}]\n").stages
    assert (stage.execution_type, stage.final_output_type, stage.max_num_seqs) == (execution_type, output_type, at_once)
    assert stage.deploy["max_num_seqs"] == at_once


def test_vllm_omni_stages_have_a_width_and_the_entry_says_it(tmp_path: Path) -> None:
    pipeline = load(tmp_path, "pipeline: glm_image\n")
    assert [stage.max_num_seqs for stage in pipeline.stages] == [16, 1]
    assert [dict(stage.deploy) for stage in pipeline.stages] == [
        {"stage_id": 0, "max_num_seqs": 16},
        {"stage_id": 1, "max_num_seqs": 1},
    ]
    assert pipeline.size.multiple == 32


def test_engine_args_and_runtime_are_flattened_for_vllm_omni(tmp_path: Path) -> None:
    text = """
pipeline: glm_image
stages:
  - stage_id: 0
    max_num_seqs: 2
    compilation_config: {mode: 3, level: 1}
    engine_args: {max_num_seqs: 8, compilation_config: {mode: 0}}
    runtime: {devices: "1", env: {A: 5}}
    devices: "0"
"""
    stage = load(tmp_path, text).stages[0]
    assert (stage.max_num_seqs, stage.devices, stage.env, stage.engine_args) == (8, "1", {"A": "5"}, {})
    assert stage.deploy == {
        "stage_id": 0,
        "max_num_seqs": 8,
        "compilation_config": {"mode": 0, "level": 1},
        "devices": "1",
        "env": {"A": 5},
    }


def test_a_user_engine_keeps_its_engine_args_whatever_they_are(tmp_path: Path) -> None:
    text = (
        'stages: [{stage_id: 0, engine: "a.b:C", engine_args: {devices: x, name: {y: [1]}}, runtime: {devices: 3}}]\n'
    )
    (stage,) = load(tmp_path, text).stages
    assert stage.engine_args == {"devices": "x", "name": {"y": [1]}}
    assert stage.devices == "3"


def test_a_registry_pipeline_may_be_tried_out_with_fake_stages(tmp_path: Path) -> None:
    text = "base_config: glm_image.yaml\nstages: [{stage_id: 0, engine: fake}, {stage_id: 1, engine: fake}]\n"
    pipeline = load(tmp_path, text)
    assert pipeline.name == "glm_image"
    assert [(s.engine, s.name, s.input_sources) for s in pipeline.stages] == [("fake", "ar", ()), ("fake", "dit", (0,))]
    assert pipeline.size.multiple == 32


def test_our_own_limits_are_read(tmp_path: Path) -> None:
    text = """
stages: [{stage_id: 0, engine: fake}]
served_model_name: [a, b/c]
max_n: 4
max_steps: 99
max_prompt_chars: 1000
request_timeout_s: 12
max_queue: 7
max_attempts: 2
lease_s: 1.5
result_ttl_s: 60
init_timeout_s: 61
hang_timeout_s: 62
size: {multiple: 16, min_side: 64, max_side: 512, max_area: 100000, default: 256x128}
"""
    pipeline = load(tmp_path, text)
    assert pipeline.served_model_names == ("a", "b/c")
    assert (pipeline.max_n, pipeline.max_steps, pipeline.max_prompt_chars, pipeline.max_queue) == (4, 99, 1000, 7)
    assert (pipeline.max_attempts, pipeline.lease_s, pipeline.request_timeout_s) == (2, 1.5, 12.0)
    assert (pipeline.result_ttl_s, pipeline.init_timeout_s, pipeline.hang_timeout_s) == (60.0, 61.0, 62.0)
    assert pipeline.size == SizeRule(16, 64, 512, 100_000, (256, 128))


def test_a_key_without_a_value_is_a_key_left_out(tmp_path: Path) -> None:
    text = (
        "max_n:\nsize:\nplatforms:\nstages:\n- {stage_id: 0, engine: fake, devices: , engine_args: , max_num_seqs: }\n"
    )
    pipeline = load(tmp_path, text)
    assert pipeline.max_n == 10
    assert pipeline.stages[0].max_num_seqs == 16


def test_the_default_size_is_the_diffusion_stages_own(tmp_path: Path) -> None:
    stage = "{stage_id: 1, default_sampling_params: {width: 512, height: 256}}"
    assert load(tmp_path, f"pipeline: glm_image\nstages: [{stage}]\n").size.default == (512, 256)


def test_the_frames_of_a_video_are_the_files_or_the_diffusion_stages_own(tmp_path: Path) -> None:
    stage = "{stage_id: 0, engine: fake, final_output_type: video}"
    assert load(tmp_path, f"stages: [{stage}]\n").frames == FrameRule()
    said = "video: {frame_step: 4, max_frames: 81, default_frames: 33, fps: 24}\n"
    assert load(tmp_path, f"{said}stages: [{stage}]\n").frames == FrameRule(4, 81, 33, 24.0)
    wan = load(tmp_path, "base_config: wan.yaml\n")
    assert wan.frames == FrameRule(4, 129, 81, 16.0)
    assert (wan.name, wan.stages[0].final_output_type) == ("wan2_2_ti2v", "video")


def test_sizes_do_not_matter_where_there_are_no_pictures(tmp_path: Path) -> None:
    text = "size: {max_side: 64}\nstages: [{stage_id: 0, engine: fake, final_output_type: text}]\n"
    assert load(tmp_path, text).final_stages[0].final_output_type == "text"


@pytest.mark.parametrize(
    ("model", "served"),
    [("zai-org/GLM-Image", "zai-org/GLM-Image"), ("/data/models/glm-image-tiny", "glm-image-tiny")],
)
def test_the_model_is_served_under_its_own_name(tmp_path: Path, model: str, served: str) -> None:
    pipeline = load(tmp_path, "model: other\nstages: [{stage_id: 0, engine: fake}]\n", model=model)
    assert (pipeline.model, pipeline.served_model_names) == (model, (served,))


def test_a_model_that_begins_with_a_dot_is_relative_to_the_file(tmp_path: Path) -> None:
    pipeline = load(tmp_path, "model: ./weights\nstages: [{stage_id: 0, engine: fake}]\n")
    assert pipeline.model == str(tmp_path / "weights")
    assert pipeline.served_model_names == ("weights",)


def test_async_chunk_on_one_stage_is_nothing_to_refuse(tmp_path: Path) -> None:
    pipeline = load(tmp_path, "pipeline: bagel_single_stage\nasync_chunk: true\n")
    assert pipeline.deploy["async_chunk"] is False


def test_vllm_omnis_top_level_is_kept_and_ours_is_not(tmp_path: Path) -> None:
    text = """
pipeline: glm_image
model: m
max_n: 2
dtype: bfloat16
trust_remote_code: true
connectors: {shm: {name: SharedMemoryConnector, extra: {a: 1}}}
edges: [{from: 0, to: 1, window_size: -1, max_inflight: 1}]
stages:
  - {stage_id: 0, output_connectors: {to_stage_1: shm}}
  - {stage_id: 1, input_connectors: {from_stage_0: {name: Other}}}
platforms: {npu: {stages: [{stage_id: 0, devices: "7"}]}}
"""
    assert load(tmp_path, text).deploy == {
        "pipeline": "glm_image",
        "async_chunk": False,
        "dtype": "bfloat16",
        "trust_remote_code": True,
        "connectors": {"shm": {"name": "SharedMemoryConnector", "extra": {"a": 1}}},
        "edges": [{"from": 0, "to": 1, "window_size": -1, "max_inflight": 1}],
    }


def test_the_fingerprint_changes_with_the_topology_only(tmp_path: Path) -> None:
    text = "pipeline: p\nstages: [{stage_id: 0, engine: fake}, {stage_id: 1, engine: fake%s}]\n"
    plain = load(tmp_path, text % "").fingerprint
    assert load(tmp_path, text % ", max_num_seqs: 3, devices: 4").fingerprint == plain
    assert load(tmp_path, text % ", name: other").fingerprint != plain


def test_the_plan_tells_everything_as_text_and_as_data() -> None:
    pipeline = configfile.load("glm_image.yaml")
    text = configfile.as_text(pipeline)
    assert "glm_image" in text
    assert "stage1  vllm_omni  diffusion  0" in text
    data = configfile.as_json(pipeline)
    assert data["size"]["default"] == "1024x1024"
    assert data["stages"][1]["replicas"] == ["1"]
    assert data["stages"] == configfile.plan(pipeline)
    assert data["limits"]["max_attempts"] == 3


def test_user_engines_are_imported_only_when_asked(tmp_path: Path) -> None:
    good = load(tmp_path, 'stages: [{stage_id: 0, engine: "omniqueue.engines.fake:FakeEngine"}]\n')
    configfile.check_engines(good)
    for engine, phrase in (("no.such:Engine", "cannot be imported"), ("omniqueue.errors:Engine", "has no Engine")):
        bad = load(tmp_path, f'stages: [{{stage_id: 0, engine: "{engine}"}}]\n')
        with pytest.raises(errors.ConfigError, match=phrase):
            configfile.check_engines(bad)


def test_nothing_heavy_is_imported_and_it_takes_well_under_a_second() -> None:
    code = (
        "import sys, time; from omniqueue import configfile; t = time.monotonic();"
        "[configfile.load(n) for n in ('glm_image.yaml', 'fake_image.yaml')]; print(time.monotonic() - t);"
        "print([m for m in ('torch', 'vllm', 'vllm_omni', 'transformers') if m in sys.modules])"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    took, heavy = done.stdout.splitlines()
    assert heavy == "[]"
    assert float(took) < 0.5
    assert time.monotonic() - started < 10
