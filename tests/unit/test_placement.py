"""Devices against parallel sizes and replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omniqueue import configfile, placement


@pytest.mark.parametrize(
    ("kind", "entry", "size"),
    [
        ("llm_ar", {}, 1),
        ("llm_ar", {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, 6),
        ("llm_ar", {"tensor_parallel_size": 2, "data_parallel_size": 4}, 8),
        ("llm_ar", {"data_parallel_size": 8, "data_parallel_size_local": 2}, 2),
        ("llm_generation", {"parallel_config": {"tensor_parallel_size": 4}}, 4),
        ("llm_ar", {"ulysses_degree": 4}, 1),
        ("diffusion", {"ulysses_degree": 2, "ring_degree": 2, "cfg_parallel_size": 2}, 8),
        ("diffusion", {"allgather_degree": 4}, 4),
        ("diffusion", {"ulysses_degree": 2, "parallel_config": {"ulysses_degree": 4}}, 4),
        ("diffusion", {"vae_patch_parallel_size": 4, "text_encoder_tp_size": 2}, 1),
        ("diffusion", {"use_hsdp": True, "hsdp_shard_size": 4, "hsdp_replicate_size": 2}, 8),
        ("diffusion", {"use_hsdp": True, "hsdp_shard_size": -1, "ulysses_degree": 2}, 2),
        ("diffusion", {"tensor_parallel_size": 2, "num_gpus": 4}, 4),
    ],
)
def test_how_many_devices_one_replica_needs(kind: str, entry: dict[str, Any], size: int) -> None:
    assert placement.world_size(kind, entry, {}) == size


def test_pipeline_wide_sizes_count_unless_the_stage_says_otherwise() -> None:
    top = {"pipeline_parallel_size": 2}
    assert placement.world_size("llm_ar", {}, top) == 2
    assert placement.world_size("llm_ar", {"pipeline_parallel_size": 1}, top) == 1


@pytest.mark.parametrize(
    ("devices", "replicas", "world", "shares"),
    [
        (None, 2, 1, (None, None)),
        ("0,1", 1, 2, ("0,1",)),
        ("1,2,3,4", 2, 2, ("1,2", "3,4")),
        ("0,1", 2, 2, ("0,1", "2,3")),
        ("0", 3, 1, ("0", "1", "2")),
        ("GPU-a, GPU-b", 2, 1, ("GPU-a", "GPU-b")),
    ],
)
def test_replicas_share_devices_as_in_vllm_omni(
    devices: str | None, replicas: int, world: int, shares: tuple[str | None, ...]
) -> None:
    assert placement.split(devices, replicas, world) == shares


GOOD = [
    "tensor_parallel_size: 2, devices: '0,1'",
    "tensor_parallel_size: 2, num_replicas: 2, devices: '0,1'",
    "tensor_parallel_size: 2, num_replicas: 2, devices: '4,5,6,7'",
    "devices: 3",
    "devices: ' 3 '",
    "devices: GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "num_replicas: 3",
    "gpu_memory_utilization: 1",
]


@pytest.mark.parametrize("keys", GOOD)
def test_lists_that_fit_are_taken(tmp_path: Path, keys: str) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(f"pipeline: glm_image\nstages: [{{stage_id: 0, {keys}}}]\n", encoding="utf-8")
    pipeline = configfile.load(file)
    stage = pipeline.stages[0]
    assert len(placement.replicas(stage, pipeline.deploy)) == stage.num_replicas


def test_two_stages_may_share_a_device_up_to_its_whole_memory(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    share = "devices: '0', gpu_memory_utilization"
    file.write_text(
        f"pipeline: glm_image\nstages: [{{stage_id: 0, {share}: 0.7}}, {{stage_id: 1, {share}: 0.3}}]\n",
        encoding="utf-8",
    )
    assert [stage.devices for stage in configfile.load(file).stages] == ["0", "0"]
