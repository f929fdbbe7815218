"""Every key a stage config may have and what its value must be; stage_configs/README.md says the same in prose."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from omniqueue import topology
from omniqueue.yamlfile import Map, Mark, Problems, nearest

#: Says what is wrong with a value ("must be ..., not ..."), or None.
Check = Callable[[Any], str | None]

OUTPUT_TYPES = ("text", "image", "audio", "video")
EXECUTION_TYPES = ("llm_ar", "llm_generation", "diffusion")
ENGINES = ("vllm_omni", "vllm", "fake")
PLATFORMS = ("cuda", "rocm", "npu", "xpu", "musa", "cpu")

_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list", dict: "a mapping"}
_KINDS = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "map": dict}
_USER_ENGINE = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")


def shown(value: Any) -> str:
    """A value as the file would write it, cut to a readable length."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_a(value: Any, kind: type) -> bool:
    """Whether a YAML value is of a kind; true is no number, and a whole number is a number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def one_of_kinds(*kinds: type) -> Check:
    """The value is of one of these kinds."""
    wanted = " or ".join(_NAMES[kind] for kind in kinds)

    def check(value: Any) -> str | None:
        return None if any(is_a(value, kind) for kind in kinds) else f"must be {wanted}, not {shown(value)}"

    return check


def number(kind: type, low: float, high: float, *, open_low: bool = False) -> Check:
    """A number of that kind within limits; ``open_low`` excludes the lower one."""
    limits = f"{'more than' if open_low else 'from'} {low:g} {'and at most' if open_low else 'to'} {high:g}"

    def check(value: Any) -> str | None:
        if is_a(value, kind) and low <= value <= high and not (open_low and value == low):
            return None
        return f"must be {_NAMES[kind]} {limits}, not {shown(value)}"

    return check


def choice(*options: str) -> Check:
    """One of these words."""

    def check(value: Any) -> str | None:
        if value in options:
            return None
        return f"must be one of {', '.join(options)}, not {shown(value)}; {nearest(value, options)}"

    return check


def name(value: Any) -> str | None:
    """Text that says something and has no control characters."""
    if isinstance(value, str) and value.strip() and value.isprintable():
        return None
    return f"must be a name, not {shown(value)}"


def names(value: Any) -> str | None:
    """A name or a list of different names."""
    entries = value if isinstance(value, list) else [value]
    if not entries or any(name(entry) for entry in entries):
        return f"must be a name or a list of names, not {shown(value)}"
    return None if len(set(entries)) == len(entries) else f"names one thing twice: {shown(value)}"


def stage_ids(value: Any) -> str | None:
    """A list of stage ids."""
    if isinstance(value, list) and all(is_a(entry, int) and entry >= 0 for entry in value):
        return None if len(set(value)) == len(value) else f"names one stage twice: {shown(value)}"
    return f"must be a list of stage ids such as [0], not {shown(value)}"


def engine(value: Any) -> str | None:
    """A known engine or ``package.module:Class``."""
    if value in ENGINES or (isinstance(value, str) and _USER_ENGINE.match(value)):
        return None
    return (
        f"must be one of {', '.join(ENGINES)} or package.module:Class, not {shown(value)}; {nearest(value, ENGINES)}"
    )


def devices(value: Any) -> str | None:
    """Device ids separated by commas; a single number need not be quoted."""
    text = str(value) if is_a(value, int) else value
    if isinstance(text, str) and re.fullmatch(r"\s*(\d+|(GPU|MIG)-[\w-]+)(\s*,\s*(\d+|(GPU|MIG)-[\w-]+))*\s*", text):
        ids = [part.strip() for part in text.split(",")]
        return None if len(set(ids)) == len(ids) else f"names one device twice: {text!r}"
    if isinstance(value, list):
        return f'must be text such as "0,1", not a list; write "{",".join(map(str, value))[:40]}"'
    return f'must be device ids such as "0" or "0,1", not {shown(value)}'


def environment(value: Any) -> str | None:
    """Environment variables: text, or a number that stands for its text."""
    if not isinstance(value, dict):
        return f"must be a mapping of environment variables, not {shown(value)}"
    for key, entry in value.items():
        if not isinstance(key, str) or not key or "=" in key or "\0" in key:
            return f"has {shown(key)}, which is no name for an environment variable"
        if entry is not None and (isinstance(entry, (bool, dict, list)) or "\0" in str(entry)):
            return f"must have text for {key}, not {shown(entry)}; put it in quotes"
    return None


def of_spec(spec: str) -> Check | None:
    """The check for a generated type such as ``int|str``; None when anything goes."""
    return None if spec == "any" else one_of_kinds(*(_KINDS[part] for part in spec.split("|")))


_count = number(int, 1, 1_000_000)
_degree = number(int, 1, 4096)
_seconds = number(float, 0, 30 * 86_400, open_low=True)
_bool, _map, _text, _list = one_of_kinds(bool), one_of_kinds(dict), one_of_kinds(str), one_of_kinds(list)

#: Top level, ours.
OWN: dict[str, Check] = {
    "model": name,
    "served_model_name": names,
    "size": _map,
    "max_n": number(int, 1, 1000),
    "max_steps": number(int, 1, 100_000),
    "max_prompt_chars": number(int, 1, 10_000_000),
    "request_timeout_s": _seconds,
    "max_queue": _count,
    "max_attempts": number(int, 1, 100),
    "lease_s": number(float, 0.1, 3600),
    "result_ttl_s": _seconds,
    "init_timeout_s": _seconds,
    "hang_timeout_s": _seconds,
}

#: Top level, vLLM-Omni's.
DEPLOY: dict[str, Check] = {
    "base_config": name,
    "pipeline": name,
    "async_chunk": _bool,
    "session_mode": choice("turn", "duplex"),
    "model_runner": choice("v1", "v2"),
    "active_stream_window": number(int, 0, 1_000_000),
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

SIZE: dict[str, Check] = {
    "multiple": number(int, 1, 4096),
    "min_side": number(int, 1, 100_000),
    "max_side": number(int, 1, 100_000),
    "max_area": number(int, 1, 10_000_000_000),
    "default": _text,
}
CONNECTOR: dict[str, Check] = {"name": name, "extra": _map}
EDGE: dict[str, Check] = {
    "from": number(int, 0, 1000),
    "to": number(int, 0, 1000),
    "window_size": one_of_kinds(int),
    "max_inflight": one_of_kinds(int),
}
DUPLEX: dict[str, Check] = dict.fromkeys(
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
    number(float, 0, 1 << 50, open_low=True),
) | {"server_vad_model_path": _text, "warmup_frames": one_of_kinds(int)}
PLATFORM: dict[str, Check] = {"model_runner": choice("v1", "v2"), "stages": _list}
RUNTIME: dict[str, Check] = {"devices": devices, "num_replicas": number(int, 1, 1000), "env": environment}

#: Per stage, ours; they say what vLLM-Omni keeps in Python.
STAGE_OWN: dict[str, Check] = {
    "engine": engine,
    "name": name,
    "model_stage": name,
    "execution_type": choice(*EXECUTION_TYPES),
    "input_sources": stage_ids,
    "engine_input_source": stage_ids,
    "final_output": _bool,
    "final_output_type": choice(*OUTPUT_TYPES),
    "is_comprehension": _bool,
}

#: Per stage, vLLM-Omni's wrapper around the engine's arguments.
STAGE_WRAPPER: dict[str, Check] = {
    "stage_id": number(int, 0, 1000),
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
RANGES: dict[str, Check] = {
    "max_num_seqs": _count,
    "max_num_batched_tokens": number(int, 1, 100_000_000),
    "max_model_len": number(int, 1, 100_000_000),
    "gpu_memory_utilization": number(float, 0, 1, open_low=True),
    "kv_cache_memory_bytes": number(int, 1, 1 << 50),
    "hsdp_shard_size": number(int, -1, 4096),
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
FAKE: dict[str, Check] = {
    "delay_s": number(float, 0, 86_400),
    "steps": number(int, 1, 100_000),
    "payload_bytes": number(int, 0, 1 << 36),
    "load_delay_s": number(float, 0, 86_400),
    **dict.fromkeys(("raise_on", "exit_on", "hang_on"), name),
}


def engine_keys(owner: str | None = None) -> dict[str, Check | None]:
    """Engine arguments of ``llm`` or ``diffusion`` stages, or of both, with their checks."""
    table = topology.table()["stage_keys"]
    owners = ("llm", "diffusion", "any") if owner is None else (owner, "any")
    return {key: RANGES.get(key) or of_spec(spec) for part in owners for key, spec in table[part].items()}


def check_keys(data: Map, checks: Mapping[str, Check | None], problems: Problems) -> None:
    """Report unknown keys and wrong values of one mapping; a key without a value counts as absent."""
    for key, value in data.items():
        if key not in checks:
            problems.add(data.at(key), f"there is no such key here; {nearest(key, checks)}")
            continue
        check = checks[key]
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
            problems.add(data.at(key).child(index), f"must be a mapping, not {shown(entry)}")
    return found
