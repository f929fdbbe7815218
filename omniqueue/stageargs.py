"""vLLM-Omni's older stage_args format, turned into the deploy format before anything else looks at it."""

from __future__ import annotations

from typing import Any

from omniqueue import checks, schema
from omniqueue.yamlfile import Map, Problems

_text, _bool, _map, _list = (checks.one_of_kinds(kind) for kind in (str, bool, dict, list))

_RUNTIME: dict[str, checks.Check] = {
    **schema.RUNTIME,
    "process": _bool,
    "max_batch_size": checks.number(int, 1, 1_000_000),
    "requires_multimodal_data": _bool,
}

_STAGE: dict[str, checks.Check] = {
    "stage_id": checks.number(int, 0, 1000),
    "stage_type": checks.choice("llm", "diffusion"),
    "runtime": _map,
    "engine_args": _map,
    "engine_input_source": checks.stage_ids,
    "custom_process_input_func": _text,
    "is_comprehension": _bool,
    "final_output": _bool,
    "final_output_type": checks.choice(*checks.OUTPUT_TYPES),
    "default_sampling_params": _map,
    "input_connectors": _map,
    "output_connectors": _map,
}

_GLOBAL: dict[str, checks.Check] = {"enabled": _bool, "defaults": _map, "connectors": _map, "edges": _list}

#: What vLLM-Omni 0.30 takes from its pipeline registry and no longer from a file.
_IN_REGISTRY = (
    "engine_output_type",
    "hf_config_name",
    "scheduler_cls",
    "custom_process_next_stage_input_func",
    "worker_type",
    "model_stage",
)


def _engine_args(old: Map, new: Map, notes: list[str]) -> None:
    """Copy engine arguments; what the registry decides today is left out, and said."""
    args = old.get("engine_args")
    if not isinstance(args, Map):
        return
    for key, value in args.items():
        if key not in _IN_REGISTRY:
            new.put(key, value, args.at(key))
        elif key not in ("model_stage", "worker_type"):
            notes.append(f"{args.at(key)}: is left out; vLLM-Omni takes it from its pipeline registry now")


def _execution_type(old: Map, args: Any) -> str | None:
    """What stage_type and worker_type, or worker_cls, together say; None when the file does not say."""
    if old.get("stage_type") == "diffusion":
        return "diffusion"
    args = args if isinstance(args, Map) else {}
    worker = str(args.get("worker_type") or args.get("worker_cls") or "").lower()
    if "generation" in worker:
        return "llm_generation"
    return "llm_ar" if worker == "ar" or "ar_worker" in worker else None


def _runtime(old: Map, new: Map, problems: Problems, notes: list[str]) -> None:
    runtime = old.get("runtime")
    if not isinstance(runtime, Map):
        return
    schema.check_keys(runtime, _RUNTIME, problems)
    for key in ("devices", "num_replicas", "env"):
        if key in runtime:
            new.put(key, runtime[key], runtime.at(key))
    if runtime.get("max_batch_size") is not None:
        if new.get("max_num_seqs") is None:
            new.put("max_num_seqs", runtime["max_batch_size"], runtime.at("max_batch_size"))
        notes.append(f"{runtime.at('max_batch_size')}: is read as max_num_seqs, its name since vLLM-Omni 0.30")


def _stage(old: Map, problems: Problems, notes: list[str]) -> Map:
    schema.check_keys(old, _STAGE, problems)
    new, args = Map(old.mark), old.get("engine_args")
    for key in _STAGE:
        if key in old and key not in ("stage_type", "runtime", "engine_args", "custom_process_input_func"):
            new.put(key, old[key], old.at(key))
    if isinstance(args, Map) and args.get("model_stage") is not None:
        new.put("name", args["model_stage"], args.at("model_stage"))
    execution_type = _execution_type(old, args)
    if execution_type:
        new.put("execution_type", execution_type, old.at("stage_type"))
    if old.get("custom_process_input_func"):
        place = old.at("custom_process_input_func")
        notes.append(f"{place}: is left out; vLLM-Omni takes it from its pipeline registry now")
    _engine_args(old, new, notes)
    _runtime(old, new, problems, notes)
    return new


def _wiring(data: Map, result: Map, problems: Problems) -> None:
    """The global runtime section: its connectors and edges moved to the top level."""
    runtime = data.get("runtime")
    if not isinstance(runtime, Map):
        return
    schema.check_keys(runtime, _GLOBAL, problems)
    for key in ("connectors", "edges"):
        if key in runtime:
            result.put(key, runtime[key], runtime.at(key))


def convert(data: Map, problems: Problems, notes: list[str]) -> Map:
    """A stage_args file as a deploy file; the marks still point into the old one."""
    result = Map(data.mark)
    for key, value in data.items():
        if key not in ("stage_args", "runtime"):
            result.put(key, value, data.at(key))
    if "stages" in data:
        problems.add(data.at("stages"), "cannot be used together with stage_args; keep stages, the newer format")
    for key, check in (("stage_args", _list), ("runtime", _map)):
        complaint = check(data[key]) if data.get(key) is not None else None
        if complaint:
            problems.add(data.at(key), complaint)
    stages = [_stage(old, problems, notes) for old, _ in schema.check_list(data, "stage_args", problems)]
    result.put("stages", stages, data.at("stage_args"))
    _wiring(data, result, problems)
    notes.append(f"{data.at('stage_args')}: is the format of vLLM-Omni before 0.30; it was converted")
    return result
