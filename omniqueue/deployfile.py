"""Reads a deploy YAML with everything it builds on: base_config chains, the older stage_args format, platform overlays.

The rules of merging are vLLM-Omni's, so that one file means the same to both.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from omniqueue import checks, schema, stageargs, topology
from omniqueue.yamlfile import Map, Mark, Problems, fail, nearest, read

#: Mappings that an overlay adds to; any other value it replaces.
_DEEP = (
    "default_sampling_params",
    "default_pooling_params",
    "subtalker_sampling_params",
    "engine_extras",
    "engine_args",
)


def locate(path: Path, folder: Path | None = None) -> Path:
    """The file itself, or, for a bare name that is not there, the shipped stage config of that name."""
    here = path if folder is None else folder / path
    shipped = topology.shipped() / path.name
    bare = len(path.parts) == 1
    return shipped if bare and not here.exists() and shipped.is_file() else here


def find(path: str | Path) -> Path:
    """The file that a user means; a ConfigError that offers the nearest shipped one if there is none."""
    file = locate(Path(path))
    if not file.exists():
        names = (each.name for each in topology.shipped().glob("*.yaml"))
        raise fail(Mark(str(path)), f"there is no such file; {nearest(file.name, names)}")
    return file


def _overlay(base: Map, top: Map) -> Map:
    result = base.copy()
    for key, value in top.items():
        result.put(key, value, top.at(key))
    return result


def _deep(base: Any, top: Any) -> Any:
    """Merge mappings all the way down; anything else is replaced."""
    if not (isinstance(base, Map) and isinstance(top, Map)):
        return top
    result = base.copy()
    for key, value in top.items():
        result.put(key, _deep(base.get(key), value), top.at(key))
    return result


def _stage(base: Map, top: Map) -> Map:
    result = _overlay(base, top)
    for key in _DEEP:
        if key in base and key in top:
            result.put(key, _deep(base[key], top[key]), top.at(key))
    return result


def _stages(base: list[Map], top: list[Map]) -> list[Map]:
    by_id = {stage["stage_id"]: stage for stage in base}
    for stage in top:
        known = by_id.get(stage["stage_id"])
        by_id[stage["stage_id"]] = stage if known is None else _stage(known, stage)
    return list(by_id.values())


def _platforms(base: Map, top: Map) -> Map:
    result = base.copy()
    for name, section in top.items():
        known = base.get(name)
        if isinstance(known, Map) and isinstance(section, Map):
            merged = _overlay(known, section)
            merged.put("stages", _stages(known.get("stages") or [], section.get("stages") or []), section.at("stages"))
            section = merged
        result.put(name, section, top.at(name))
    return result


def merge(base: Map, top: Map) -> Map:
    """A base file under an overlay."""
    result = _overlay(base, top)
    for key, rule in (("stages", _stages), ("platforms", _platforms), ("connectors", _deep)):
        if base.get(key) is not None:
            both = top.get(key) is not None
            result.put(key, rule(base[key], top[key]) if both else base[key], (top if both else base).at(key))
    return result


def _check_stage(stage: Map, allowed: dict[str, Any], problems: Problems) -> None:
    schema.check_keys(stage, allowed, problems)
    if stage.get("stage_id") is None:
        problems.add(stage.mark, "has no stage_id; say which stage this is")
    runtime = stage.get("runtime")
    if isinstance(runtime, Map):
        schema.check_keys(runtime, schema.RUNTIME, problems)


def _check_stages(data: Map, allowed: dict[str, Any], problems: Problems) -> None:
    seen: dict[int, Mark] = {}
    for stage, mark in schema.check_list(data, "stages", problems):
        _check_stage(stage, allowed, problems)
        stage_id = stage.get("stage_id")
        if not isinstance(stage_id, int):
            continue
        if stage_id in seen:
            problems.add(stage.at("stage_id"), f"stage {stage_id} is there twice, first at {seen[stage_id].path}")
        seen.setdefault(stage_id, mark)


def _sections(data: Map, key: str, problems: Problems) -> list[Map]:
    """The mappings under a mapping's names."""
    section = data.get(key)
    if not isinstance(section, Map):
        return []
    for name, entry in section.items():
        if entry is not None and not isinstance(entry, Map):
            problems.add(section.at(name), f"must be a mapping, not {checks.shown(entry)}")
    return [entry for entry in section.values() if isinstance(entry, Map)]


def _check_platforms(data: Map, problems: Problems) -> None:
    section = data.get("platforms")
    allowed = {**schema.STAGE_WRAPPER, **schema.engine_keys()}
    if isinstance(section, Map):
        for name in section.keys() - set(schema.PLATFORMS):
            problems.add(section.at(name), f"is no platform; {nearest(name, schema.PLATFORMS)}")
    for platform in _sections(data, "platforms", problems):
        schema.check_keys(platform, schema.PLATFORM, problems)
        _check_stages(platform, allowed, problems)


def check_file(data: Map, problems: Problems) -> None:
    """Report every unknown key and wrong type of one file, whatever it builds on."""
    schema.check_keys(data, {**schema.OWN, **schema.DEPLOY}, problems)
    _check_stages(data, {**schema.engine_keys(), **schema.STAGE_OWN, **schema.STAGE_WRAPPER}, problems)
    _check_platforms(data, problems)
    for key, allowed in (("size", schema.SIZE), ("video", schema.VIDEO), ("duplex_session", schema.DUPLEX)):
        if isinstance(data.get(key), Map):
            schema.check_keys(data[key], allowed, problems)
    for connector in _sections(data, "connectors", problems):
        schema.check_keys(connector, schema.CONNECTOR, problems)
    for edge, _ in schema.check_list(data, "edges", problems):
        schema.check_keys(edge, schema.EDGE, problems)


def _read_one(path: Path, notes: list[str]) -> Map:
    data, problems = read(path), Problems()
    if "stage_args" in data:
        data = stageargs.convert(data, problems, notes)
    check_file(data, problems)
    problems.check()
    return data


def load(path: Path, notes: list[str], above: tuple[Path, ...] = ()) -> tuple[Map, list[str]]:
    """A file merged over everything it builds on, checked key by key, and the names of the files, nearest first."""
    data = _read_one(path, notes)
    base, mark = data.get("base_config"), data.at("base_config")
    data.pop("base_config", None)
    if base is None:
        return data, [str(path)]
    parent = locate(Path(base), path.parent)
    chain = (*above, path.resolve())
    if parent.resolve() in chain:
        raise fail(mark, f"goes round in a circle: {base} builds on this file")
    if not parent.is_file():
        raise fail(mark, f"names {base}, which is neither beside this file nor among the shipped stage configs")
    under, files = load(parent, notes, chain)
    return merge(under, data), [str(path), *files]


def platform() -> str:
    """The platform whose overlay applies: OMNIQUEUE_PLATFORM, else cuda where there is an NVIDIA driver, else cpu."""
    named = os.environ.get("OMNIQUEUE_PLATFORM", "").strip().lower()
    if named:
        complaint = checks.choice(*schema.PLATFORMS)(named)
        if complaint:
            raise fail(Mark("OMNIQUEUE_PLATFORM"), complaint)
        return named
    return "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu"


def _flat(stage: Map, parts: tuple[str, ...], problems: Problems) -> Map:
    """A stage's runtime and engine_args raised to its own level, as vLLM-Omni does when it reads one."""
    result = stage.copy()
    for part in parts:
        nested = result.pop(part, None)
        if not isinstance(nested, Map):
            continue
        for key, value in nested.items():
            if part == "engine_args" and key in (*schema.STAGE_WRAPPER, *schema.STAGE_OWN):
                problems.add(nested.at(key), "belongs beside engine_args, not into it")
            else:
                result.put(key, _deep(result.get(key), value), nested.at(key))
    return result


def _apply(stage: Map, top: Map) -> Map:
    """One platform's entry over a stage."""
    result = _overlay(stage, top)
    for key in (*_DEEP, "env"):
        if isinstance(stage.get(key), Map) and isinstance(top.get(key), Map):
            result.put(key, _overlay(stage[key], top[key]), top.at(key))
    return result


def resolve_stages(data: Map, name: str, problems: Problems) -> list[Map]:
    """The stages, nested forms flattened, under a platform's overlay; a fake or user engine keeps its engine_args."""
    section = (data.get("platforms") or {}).get(name)
    overlays = {entry["stage_id"]: entry for entry in (section or {}).get("stages") or []}
    stages = []
    known = {stage["stage_id"] for stage in data.get("stages") or []}
    for stage_id in overlays.keys() - known:
        problems.add(overlays[stage_id].at("stage_id"), f"there is no stage {stage_id} under stages to change; add it")
    for stage in data.get("stages") or []:
        keep = stage.get("engine") not in (None, "vllm_omni", "vllm")
        parts = ("runtime",) if keep else ("engine_args", "runtime")
        overlay, flat = overlays.get(stage["stage_id"]), _flat(stage, parts, problems)
        stages.append(flat if overlay is None else _apply(flat, _flat(overlay, parts, problems)))
    return stages
