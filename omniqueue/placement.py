"""Which devices a stage's replicas get, and whether the devices a file names are enough, before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omniqueue.pipeline import Stage
from omniqueue.yamlfile import Map, Problems

_LLM_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
_DIFFUSION_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "cfg_parallel_size")


def _product(sizes: Mapping[str, Any], names: tuple[str, ...]) -> int:
    result = 1
    for name in names:
        result *= int(sizes.get(name) or 1)
    return result


def _sizes(entry: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Parallel sizes of a stage: pipeline-wide, its own, and those in parallel_config, the last one winning."""
    nested = entry.get("parallel_config")
    wide = {key: top.get(key) for key in ("data_parallel_size", "pipeline_parallel_size")}
    merged = {**wide, **entry, **(nested if isinstance(nested, dict) else {})}
    return {key: value for key, value in merged.items() if value is not None}


def _sequence(sizes: Mapping[str, Any]) -> int:
    gathered = int(sizes.get("allgather_degree") or 1)
    return gathered if gathered > 1 else _product(sizes, ("ulysses_degree", "ring_degree"))


def world_size(execution_type: str, entry: Mapping[str, Any], top: Mapping[str, Any]) -> int:
    """Devices that one replica of a stage needs."""
    sizes = _sizes(entry, top)
    if execution_type != "diffusion":
        ranks = sizes.get("data_parallel_size_local", sizes.get("data_parallel_size")) or 1
        return _product(sizes, _LLM_SIZES) * int(ranks)
    sequence = int(sizes.get("sequence_parallel_size") or _sequence(sizes))
    size = _product(sizes, (*_DIFFUSION_SIZES, "data_parallel_size")) * sequence
    shards, all_of_them = int(sizes.get("hsdp_shard_size") or -1), int(sizes.get("num_gpus") or 0)
    if "data_parallel_size" not in sizes and all_of_them and all_of_them % size == 0:
        return all_of_them
    if sizes.get("use_hsdp") and size == 1 and shards > 0:
        return shards * int(sizes.get("hsdp_replicate_size") or 1)
    return size


def _ids(devices: str) -> list[str]:
    return [part.strip() for part in devices.split(",")]


def split(devices: str | None, replicas: int, world: int) -> tuple[str | None, ...]:
    """Each replica's devices, as vLLM-Omni shares them out: a pool in order, or a template moved by its width."""
    if devices is None or replicas == 1:
        return (devices,) * replicas
    ids = _ids(devices)
    if len(ids) == replicas * world:
        return tuple(",".join(ids[i * world : (i + 1) * world]) for i in range(replicas))
    return tuple(",".join(str(int(one) + i * world) for one in ids) for i in range(replicas))


def replicas(stage: Stage, top: Mapping[str, Any]) -> tuple[str | None, ...]:
    """The devices of each of a checked stage's replicas; ``top`` is the pipeline's deploy section."""
    return split(stage.devices, stage.num_replicas, world_size(stage.execution_type, stage.deploy, top))


def check_devices(stage: Stage, entry: Map, top: Mapping[str, Any], problems: Problems) -> None:
    """Report a device list that does not fit the stage's parallel sizes and replicas."""
    world = world_size(stage.execution_type, stage.deploy, top)
    _check_sequence(stage, entry, top, problems)
    if stage.devices is None:
        return
    ids, count = _ids(stage.devices), stage.num_replicas
    wanted = sorted({world, world * count})
    if len(ids) not in wanted:
        numbers = " or ".join(map(str, wanted))
        text = f"names {_devices(len(ids))}, but the stage's parallel sizes multiply to {world}"
        text += f" and num_replicas is {count}" if count > 1 else ""
        problems.add(entry.at("devices"), f"{text}; name {numbers}, or change the sizes")
    elif count > 1 and len(ids) == world and not all(one.isdigit() and int(one) < world for one in ids):
        problems.add(
            entry.at("devices"),
            f"is a template for {count} replicas of {_devices(world)} each, so its ids must be below {world}; "
            f"or name all {world * count}",
        )


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _check_sequence(stage: Stage, entry: Map, top: Mapping[str, Any], problems: Problems) -> None:
    sizes = _sizes(stage.deploy, top)
    said = sizes.get("sequence_parallel_size")
    if stage.execution_type != "diffusion" or said is None or said == _sequence(sizes):
        return
    nested = entry.get("parallel_config")
    holder = nested if isinstance(nested, Map) and "sequence_parallel_size" in nested else entry
    problems.add(
        holder.at("sequence_parallel_size"),
        f"is {said}, but ulysses_degree times ring_degree (or allgather_degree) is {_sequence(sizes)}; make them equal",
    )


def shared_memory(stages: list[tuple[Stage, Map]], top: Mapping[str, Any]) -> list[tuple[Map, str]]:
    """Stages whose gpu_memory_utilization sums to more than a device has: vLLM would refuse to start the last one."""
    used: dict[str, float] = {}
    found = []
    for stage, entry in stages:
        share = float(stage.deploy.get("gpu_memory_utilization") or 0)
        for device in {d for part in replicas(stage, top) if part for d in _ids(part)} if share else ():
            used[device] = used.get(device, 0.0) + share
            if used[device] > 1.0 + 1e-9 and used[device] - share > 0:
                found.append(
                    (entry, f"brings device {device} to {used[device]:.2f} of its memory; keep the sum at most 1")
                )
    return found
