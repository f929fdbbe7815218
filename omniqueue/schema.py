"""Every key a stage config may have and what its value must be; stage_configs/README.md says the same in prose."""

from __future__ import annotations

from collections.abc import Mapping

from omniqueue import checks, topology
from omniqueue.yamlfile import Map, Mark, Problems, nearest

PLATFORMS = ("cuda", "rocm", "npu", "xpu", "musa", "cpu")

_count = checks.number(int, 1, 1_000_000)
_degree = checks.number(int, 1, 4096)
_seconds = checks.number(float, 0, 30 * 86_400, open_low=True)
_bool, _map, _text, _list = (
    checks.one_of_kinds(bool),
    checks.one_of_kinds(dict),
    checks.one_of_kinds(str),
    checks.one_of_kinds(list),
)

#: Top level, ours.
OWN: dict[str, checks.Check] = {
    "model": checks.name,
    "served_model_name": checks.names,
    "unused_fields": checks.names,
    "extra_fields": checks.names,
    "max_images": checks.number(int, 0, 64),
    "size": _map,
    "video": _map,
    "voices": checks.names,
    "max_audio_s": _seconds,
    "max_n": checks.number(int, 1, 1000),
    "max_steps": checks.number(int, 1, 100_000),
    "max_prompt_chars": checks.number(int, 1, 10_000_000),
    "request_timeout_s": _seconds,
    "max_queue": _count,
    "max_attempts": checks.number(int, 1, 100),
    "lease_s": checks.number(float, 0.1, 3600),
    "result_ttl_s": _seconds,
    "init_timeout_s": _seconds,
    "hang_timeout_s": _seconds,
}

#: Top level, vLLM-Omni's.
DEPLOY: dict[str, checks.Check] = {
    "base_config": checks.name,
    "pipeline": checks.name,
    "async_chunk": _bool,
    "session_mode": checks.choice("turn", "duplex"),
    "model_runner": checks.choice("v1", "v2"),
    "active_stream_window": checks.number(int, 0, 1_000_000),
    "duplex_session": _map,
    "connectors": _map,
    "edges": _list,
    "stages": _list,
    "platforms": _map,
    "trust_remote_code": _bool,
    "distributed_executor_backend": _text,
    "dtype": _text,
    "quantization": _text,
    "enable_prefix_caching": _bool,
    "enable_chunked_prefill": _bool,
    "data_parallel_size": _degree,
    "pipeline_parallel_size": _degree,
    "custom_voice_dir": _text,
}

SIZE: dict[str, checks.Check] = {
    "multiple": checks.number(int, 1, 4096),
    "min_side": checks.number(int, 1, 100_000),
    "max_side": checks.number(int, 1, 100_000),
    "max_area": checks.number(int, 1, 10_000_000_000),
    "default": _text,
}
VIDEO: dict[str, checks.Check] = {
    "frame_step": checks.number(int, 1, 1024),
    "max_frames": checks.number(int, 1, 100_000),
    "default_frames": checks.number(int, 1, 100_000),
    "fps": checks.number(float, 1, 240),
}
CONNECTOR: dict[str, checks.Check] = {"name": checks.name, "extra": _map}
EDGE: dict[str, checks.Check] = {
    "from": checks.number(int, 0, 1000),
    "to": checks.number(int, 0, 1000),
    "window_size": checks.one_of_kinds(int),
    "max_inflight": checks.one_of_kinds(int),
    "route": checks.choice("reference", "connector"),
}
DUPLEX: dict[str, checks.Check] = dict.fromkeys(
    (
        "disconnect_grace_s",
        "reaper_interval_s",
        "resume_replay_ttl_s",
        "resume_replay_max_bytes_per_session",
        "max_pending_input_bytes_per_session",
        "max_pending_turns_per_session",
        "max_sessions",
        "completed_append_cache_size",
        "idle_ttl_s",
    ),
    checks.number(float, 0, 1 << 50, open_low=True),
) | {"server_vad_model_path": _text, "warmup_frames": checks.one_of_kinds(int)}
PLATFORM: dict[str, checks.Check] = {"model_runner": checks.choice("v1", "v2"), "stages": _list}
RUNTIME: dict[str, checks.Check] = {
    "devices": checks.devices,
    "num_replicas": checks.number(int, 1, 1000),
    "env": checks.environment,
}

#: Per stage, ours; they say what vLLM-Omni keeps in Python.
STAGE_OWN: dict[str, checks.Check] = {
    "engine": checks.engine,
    "name": checks.name,
    "model_stage": checks.name,
    "execution_type": checks.choice(*checks.EXECUTION_TYPES),
    "input_sources": checks.stage_ids,
    "engine_input_source": checks.stage_ids,
    "final_output": _bool,
    "final_output_type": checks.choice(*checks.OUTPUT_TYPES),
    "is_comprehension": _bool,
}

#: Per stage, vLLM-Omni's wrapper around the engine's arguments.
STAGE_WRAPPER: dict[str, checks.Check] = {
    "stage_id": checks.number(int, 0, 1000),
    **RUNTIME,
    "async_chunk": _bool,
    "input_connectors": _map,
    "output_connectors": _map,
    "default_sampling_params": _map,
    "default_pooling_params": _map,
    "engine_extras": _map,
    "engine_args": _map,
    "runtime": _map,
}

#: Engine arguments whose range is known; the types of all others come with the topology table.
RANGES: dict[str, checks.Check] = {
    "max_num_seqs": _count,
    "max_num_batched_tokens": checks.number(int, 1, 100_000_000),
    "max_model_len": checks.number(int, 1, 100_000_000),
    "gpu_memory_utilization": checks.number(float, 0, 1, open_low=True),
    "kv_cache_memory_bytes": checks.number(int, 1, 1 << 50),
    "hsdp_shard_size": checks.number(int, -1, 4096),
    **dict.fromkeys(
        (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "prefill_context_parallel_size",
            "sequence_parallel_size",
            "ulysses_degree",
            "ring_degree",
            "allgather_degree",
            "cfg_parallel_size",
            "vae_patch_parallel_size",
            "text_encoder_tp_size",
            "hsdp_replicate_size",
        ),
        _degree,
    ),
}

#: The fake engine's arguments.
FAKE: dict[str, checks.Check] = {
    "delay_s": checks.number(float, 0, 86_400),
    "steps": checks.number(int, 1, 100_000),
    "payload_bytes": checks.number(int, 0, 1 << 36),
    "load_delay_s": checks.number(float, 0, 86_400),
    **dict.fromkeys(("raise_on", "exit_on", "hang_on"), checks.name),
}


def engine_keys(owner: str | None = None) -> dict[str, checks.Check | None]:
    """Engine arguments of ``llm`` or ``diffusion`` stages, or of both, with their checks."""
    table = topology.table()["stage_keys"]
    owners = ("llm", "diffusion", "any") if owner is None else (owner, "any")
    return {key: RANGES.get(key) or checks.of_spec(spec) for part in owners for key, spec in table[part].items()}


def check_keys(data: Map, allowed: Mapping[str, checks.Check | None], problems: Problems) -> None:
    """Report unknown keys and wrong values of one mapping; a key without a value counts as absent."""
    for key, value in data.items():
        if key not in allowed:
            problems.add(data.at(key), f"there is no such key here; {nearest(key, allowed)}")
            continue
        check = allowed[key]
        complaint = None if value is None or check is None else check(value)
        if complaint:
            problems.add(data.at(key), complaint)


def check_list(data: Map, key: str, problems: Problems) -> list[tuple[Map, Mark]]:
    """The mappings of a list under a key; entries that are none are reported."""
    found = []
    entries = data.get(key)
    for index, entry in enumerate(entries if isinstance(entries, list) else []):
        if isinstance(entry, Map):
            found.append((entry, entry.mark))
        else:
            problems.add(data.at(key).child(index), f"must be a mapping, not {checks.shown(entry)}")
    return found
