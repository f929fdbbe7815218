"""The stage_args format of vLLM-Omni before 0.30 means the same as its deploy format."""

from __future__ import annotations

from pathlib import Path

import pytest

from omniqueue import configfile
from omniqueue.pipeline import Pipeline

OLD = """
stage_args:
  - stage_id: 0
    stage_type: llm
    runtime: {process: true, devices: "0", max_batch_size: 4}
    engine_args:
      model_stage: thinker
      model_arch: Qwen2_5OmniForConditionalGeneration
      worker_type: ar
      scheduler_cls: vllm_omni.core.sched.omni_ar_scheduler.OmniARScheduler
      gpu_memory_utilization: 0.8
      engine_output_type: latent
      enforce_eager: true
    is_comprehension: true
    final_output: true
    final_output_type: text
    default_sampling_params: {temperature: 0.0, max_tokens: 2048}
  - stage_id: 1
    stage_type: llm
    runtime: {devices: "1"}
    engine_args: {model_stage: talker, worker_cls: vllm_omni.worker.gpu_ar_worker.GPUARWorker, max_num_seqs: 3}
    engine_input_source: [0]
    custom_process_input_func: vllm_omni.model_executor.stage_input_processors.qwen2_5_omni.thinker2talker
  - stage_id: 2
    runtime: {devices: "0"}
    engine_args: {model_stage: code2wav, worker_type: generation, gpu_memory_utilization: 0.15}
    engine_input_source: [1]
    final_output: true
    final_output_type: audio
runtime:
  enabled: true
  defaults: {window_size: -1, max_inflight: 1}
  connectors: {shm: {name: SharedMemoryConnector, extra: {}}}
  edges: [{from: 0, to: 1, window_size: -1}]
max_n: 3
"""

NEW = """
pipeline: qwen2_5_omni
max_n: 3
connectors: {shm: {name: SharedMemoryConnector, extra: {}}}
edges: [{from: 0, to: 1, window_size: -1}]
stages:
  - stage_id: 0
    devices: "0"
    max_num_seqs: 4
    gpu_memory_utilization: 0.8
    enforce_eager: true
    model_arch: Qwen2_5OmniForConditionalGeneration
    default_sampling_params: {temperature: 0.0, max_tokens: 2048}
  - {stage_id: 1, devices: "1", max_num_seqs: 3, worker_cls: vllm_omni.worker.gpu_ar_worker.GPUARWorker}
  - {stage_id: 2, devices: "0", gpu_memory_utilization: 0.15}
"""


def load(folder: Path, text: str, name: str) -> Pipeline:
    (folder / name).write_text(text, encoding="utf-8")
    return configfile.load(folder / name)


def test_the_old_format_becomes_what_the_new_one_says(tmp_path: Path) -> None:
    old, new = load(tmp_path, OLD, "qwen2_5_omni.yaml"), load(tmp_path, NEW, "new.yaml")
    assert old.stages == new.stages
    assert (old.name, old.fingerprint, old.deploy, old.max_n) == (new.name, new.fingerprint, new.deploy, new.max_n)


def test_what_was_changed_or_left_out_is_noted(tmp_path: Path) -> None:
    notes = "\n".join(load(tmp_path, OLD, "qwen2_5_omni.yaml").notes)
    for phrase in (
        "stage_args[0].runtime.max_batch_size: is read as max_num_seqs",
        "stage_args[0].engine_args.scheduler_cls: is left out",
        "stage_args[0].engine_args.engine_output_type: is left out",
        "stage_args[1].custom_process_input_func: is left out",
        "stage_args: is the format of vLLM-Omni before 0.30; it was converted",
    ):
        assert phrase in notes


@pytest.mark.parametrize(
    ("stage", "execution_type"),
    [
        ("stage_type: diffusion", "diffusion"),
        ("stage_type: llm, engine_args: {worker_type: ar}", "llm_ar"),
        ("engine_args: {worker_type: generation}", "llm_generation"),
        ("engine_args: {worker_cls: a.gpu_generation_worker.GPUGenerationWorker}", "llm_generation"),
    ],
)
def test_a_stage_of_ones_own_keeps_its_kind(tmp_path: Path, stage: str, execution_type: str) -> None:
    text = f"stage_args: [{{stage_id: 0, {stage}, final_output: true, final_output_type: audio}}]\n"
    assert load(tmp_path, text, "own.yaml").stages[0].execution_type == execution_type


def test_max_num_seqs_wins_over_the_older_name(tmp_path: Path) -> None:
    text = "stage_args: [{stage_id: 0, runtime: {max_batch_size: 2}, engine_args: {max_num_seqs: 5}}]\n"
    assert load(tmp_path, text, "glm_image.yaml").stages[0].max_num_seqs == 5


def test_the_lines_in_messages_are_those_of_the_old_file(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"f\.yaml:1: stage_args\[0\]\.engine_args\.enforce_egar: .* enforce_eager\?"):
        load(
            tmp_path, "stage_args: [{stage_id: 0, engine_args: {enforce_egar: true}}]\npipeline: glm_image\n", "f.yaml"
        )
