"""Loads a stage config into a :class:`~omniqueue.pipeline.Pipeline`, or says everything that is wrong with it.

Nothing here imports torch or vllm: what has to be known of vLLM-Omni is in stage_configs/topologies.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

from omniqueue import checks, deployfile, errors, handover, params, placement, schema, stages, topology
from omniqueue.pipeline import FrameRule, Pipeline, SizeRule, Stage
from omniqueue.topology import Topology
from omniqueue.yamlfile import Map, Problems, fail, nearest, plain

#: Where the names of all pipelines stand.
_LISTED = "stage_configs/topologies.yaml"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PLAIN = ("max_n", "max_steps", "max_prompt_chars", "max_images", "max_queue", "max_attempts")
_SECONDS = ("request_timeout_s", "lease_s", "result_ttl_s", "init_timeout_s", "hang_timeout_s", "max_audio_s")


def load(path: str | Path, *, model: str | None = None) -> Pipeline:
    """Read and check a stage config; ``model`` wins over the file's.

    A bare file name is also looked for among the shipped stage configs. Raises ConfigError with one line per problem:
    file, line, path within the file, what is wrong and what would be right.
    """
    notes: list[str] = []
    data, files = deployfile.load(deployfile.find(path), notes)
    platform = deployfile.platform()
    problems = Problems()
    data.put("stages", deployfile.resolve_stages(data, platform, problems), data.at("stages"))
    problems.check()
    model = model or _model(data)
    known = _topology(data, model, files, notes)
    built = _stages(data, known, problems)
    size = _size(data, known, built, problems)
    frames = _frames(data, built, problems)
    name = _name(data, known, files[0], problems)
    problems.check()
    deploy = _deploy(data, known)
    notes += handover.notes(deploy, {stage.stage_id: stage.deploy for stage in built})
    return Pipeline(
        name=name,
        stages=tuple(built),
        path=files[0],
        model=model,
        served_model_names=_served(data, model, name),
        unused_fields=_names(data.get("unused_fields")),
        extra_fields=_extra_fields(data, problems),
        size=size,
        frames=frames,
        voices=_names(data.get("voices")),
        platform=platform,
        notes=tuple(notes),
        deploy=deploy,
        **_limits(data),
    )


def _model(data: Map) -> str | None:
    """The file's model; one that begins with a dot is relative to the file."""
    model = data.get("model")
    if model and model.startswith(("./", "../")):
        return str((Path(data.at("model").file).parent / model).resolve())
    return str(Path(model).expanduser()) if model and model.startswith("~") else model


def _names(value: Any) -> tuple[str, ...]:
    """One name or a list of names."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def _spelled_out(entries: list[Map]) -> bool:
    return all(e.get("execution_type") for e in entries) and any(e.get("final_output") for e in entries)


def _topology(data: Map, model: str | None, files: list[str], notes: list[str]) -> Topology | None:
    """What is known of the pipeline beforehand; None when the file itself says it all."""
    name, entries = data.get("pipeline"), data["stages"]
    if isinstance(name, str) and name in topology.table()["pipelines"]:
        return topology.named(name)
    if entries and not any(stages.engine_of(entry) == "vllm_omni" for entry in entries):
        return None
    if name is not None:
        if _spelled_out(entries):
            return None
        text = f"is {checks.shown(name)}, which vLLM-Omni does not have; {nearest(name, topology.keys(), _LISTED)}"
        raise fail(data.at("pipeline"), f"{text}; to describe one of your own, give every stage its execution_type")
    found = _detected(entries, model, files)
    if found is None and not _spelled_out(entries):
        text = f"cannot be told from the model {model} or the file's name" if model else "is not said, nor is a model"
        close = nearest(Path(model or files[0]).name, topology.keys(), _LISTED)
        raise fail(data.mark.child("pipeline", 0), f"{text}; set it to one of vLLM-Omni's names; {close}")
    if found is not None:
        notes.append(f"{files[0]}: pipeline {found.key or 'of one diffusion stage'} is taken from {found.found_by}")
    return found


def _detected(entries: list[Map], model: str | None, files: list[str]) -> Topology | None:
    found = topology.by_model(model) if model else None
    if found is None and len(entries) == 1:
        found = topology.by_class(entries[0].get("model_class_name"))
    key = topology.by_architecture(entry.get("model_arch") for entry in entries) if found is None else None
    if key:
        return topology.named(key, "the stages' model_arch")
    return found or topology.by_file(files)


def _stages(data: Map, known: Topology | None, problems: Problems) -> list[Stage]:
    if not data["stages"] and known is None:
        raise fail(data.at("stages"), "is missing or empty; a pipeline needs at least one stage")
    entries = stages.ordered(data["stages"], known, data, problems)
    problems.check()
    facts = stages.facts_of(entries, known, problems)
    stages.check_graph(entries, facts, problems)
    stages.check_wiring(data, entries, problems)
    handover.check(data, entries, known, problems)
    for i, entry in enumerate(entries):
        stages.check_engine(entry, facts[i], i, problems)
    problems.check()
    built = [stages.build(entry, i, facts[i], problems) for i, entry in enumerate(entries)]
    top = plain(data)
    for stage, entry in zip(built, entries, strict=True):
        if stage.engine in ("vllm_omni", "vllm"):
            placement.check_devices(stage, entry, top, problems)
    if not problems.found:
        for entry, text in placement.shared_memory(list(zip(built, entries, strict=True)), top):
            problems.add(entry.at("gpu_memory_utilization"), text)
    return built


def _default_size(built: list[Stage]) -> str | None:
    """The size that the last diffusion stage's own defaults say."""
    for stage in reversed(built):
        width, height = (stage.default_sampling_params.get(side) for side in ("width", "height"))
        if stage.execution_type == "diffusion" and width and height:
            return f"{width}x{height}"
    return None


def _size(data: Map, known: Topology | None, built: list[Stage], problems: Problems) -> SizeRule:
    section = data.get("size") or Map(data.at("size"))
    base, said = SizeRule(), plain(section)
    needed = known.size_multiple if known else 1
    multiple = said.get("multiple", needed)
    if multiple % needed:
        problems.add(
            section.at("multiple"), f"is {multiple}, but {known.key if known else ''} needs multiples of {needed}"
        )
    low, high = said.get("min_side", multiple), said.get("max_side", base.max_side)
    rule = SizeRule(multiple, low, high, said.get("max_area", high * high), base.default)
    if low > high:
        problems.add(section.at("min_side"), f"is {low}, more than max_side, {high}")
    text = said.get("default") or _default_size(built) or "{}x{}".format(*base.default)
    pictures = any(stage.final_output_type in ("image", "video") for stage in built)
    try:
        return SizeRule(rule.multiple, low, high, rule.max_area, params.parse_size(text, rule, "it"))
    except errors.InvalidRequest as error:
        if pictures or "default" in said:
            problems.add(section.at("default"), f"is {text}, which the other limits do not allow: {error.message}")
        return rule


def _frames(data: Map, built: list[Stage], problems: Problems) -> FrameRule:
    """How many frames a video can have; the default is the last diffusion stage's own."""
    section, base = data.get("video") or Map(data.at("video")), FrameRule()
    said = plain(section)
    step, most = said.get("frame_step", base.step), said.get("max_frames", base.max_frames)
    own = [stage.default_sampling_params.get("num_frames") for stage in built if stage.execution_type == "diffusion"]
    usual = said.get("default_frames") or (own[-1] if own else None) or min(most, base.default) // step * step
    rule = FrameRule(step, most, max(1, int(usual)), float(said.get("fps", base.fps)))
    if "default_frames" in said:
        try:
            params.check_frames(rule.default, rule, "it")
        except errors.InvalidRequest as error:
            problems.add(section.at("default_frames"), f"is {rule.default}: {error.message}")
    return rule


def _name(data: Map, known: Topology | None, file: str, problems: Problems) -> str:
    name = str((known.key if known else None) or data.get("pipeline") or Path(file).stem)
    if not _NAME.fullmatch(name):
        problems.add(
            data.at("pipeline"),
            f"is {checks.shown(name)}; use letters, digits, dots, dashes and underscores, at most 64 (it names queues)",
        )
    return name


def _served(data: Map, model: str | None, name: str) -> tuple[str, ...]:
    """What clients may call the model: what the file says, or the folder's or hub's name, or the pipeline's."""
    said = _names(data.get("served_model_name"))
    if said:
        return said
    if not model:
        return (name,)
    return (Path(model).name if Path(model).is_absolute() or Path(model).is_dir() else model,)


def _extra_fields(data: Map, problems: Problems) -> tuple[str, ...]:
    """What the model honours beyond what every request may say."""
    names, known = _names(data.get("extra_fields")), (*params.EXTRA_FIELDS, *params.SPEECH_FIELDS)
    for name in names:
        if name not in known:
            problems.add(
                data.at("extra_fields"), f"has {checks.shown(name)}, which no request has; {nearest(name, known)}"
            )
    problems.check()
    return names


def _limits(data: Map) -> dict[str, Any]:
    whole = {key: data[key] for key in _PLAIN if data.get(key) is not None}
    return whole | {key: float(data[key]) for key in _SECONDS if data.get(key) is not None}


def _deploy(data: Map, known: Topology | None) -> dict[str, Any]:
    """vLLM-Omni's top level: the overlay is applied already, and chunks never stream between processes."""
    dropped = (*schema.OWN, "stages", "platforms", "base_config")
    deploy = {key: value for key, value in plain(data).items() if key not in dropped}
    if known is not None and known.key:
        deploy["pipeline"] = known.key
    return {**deploy, "async_chunk": False}


def as_json(pipeline: Pipeline) -> dict[str, Any]:
    """The resolved plan as data, for ``omniqueue validate --json``."""
    size = pipeline.size
    limits = {key: getattr(pipeline, key) for key in (*_PLAIN, *_SECONDS)}
    return {
        "pipeline": pipeline.name,
        "file": pipeline.path,
        "model": pipeline.model,
        "served_model_names": list(pipeline.served_model_names),
        "platform": pipeline.platform,
        "fingerprint": pipeline.fingerprint,
        "size": {
            "multiple": size.multiple,
            "min_side": size.min_side,
            "max_side": size.max_side,
            "max_area": size.max_area,
            "default": "{}x{}".format(*size.default),
        },
        "video": {
            "frame_step": pipeline.frames.step,
            "max_frames": pipeline.frames.max_frames,
            "default_frames": pipeline.frames.default,
            "fps": pipeline.frames.fps,
        },
        "voices": list(pipeline.voices),
        "limits": limits,
        "stages": plan(pipeline),
        "notes": list(pipeline.notes),
    }


def plan(pipeline: Pipeline) -> list[dict[str, Any]]:
    """One row per stage: everything that was resolved, defaults included."""
    return [_row(stage, row, pipeline.deploy) for stage, row in zip(pipeline.stages, pipeline.topology, strict=True)]


def _row(stage: Stage, row: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **row,
        "queue": stage.queue,
        "max_num_seqs": stage.max_num_seqs,
        "devices": stage.devices,
        "replicas": list(placement.replicas(stage, top)),
        "env": dict(stage.env),
        "engine_args": dict(stage.engine_args),
        "default_sampling_params": dict(stage.default_sampling_params),
    }


_COLUMNS = ("stage", "name", "queue", "engine", "kind", "reads", "makes", "at once", "devices")


def as_text(pipeline: Pipeline) -> str:
    """The resolved plan as a table, for ``omniqueue validate``."""
    rows = [_COLUMNS, *(_cells(stage, pipeline.deploy) for stage in pipeline.stages)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    head = f"{pipeline.name} ({pipeline.path}), model {pipeline.model or 'none'}, on {pipeline.platform}"
    served = f"served as {', '.join(pipeline.served_model_names)}; fingerprint {pipeline.fingerprint}"
    limits = ", ".join(f"{key} {getattr(pipeline, key):g}" for key in (*_PLAIN, *_SECONDS))
    return "\n".join([head, served, "", *lines, "", f"limits: {limits}", *(f"note: {note}" for note in pipeline.notes)])


def _cells(stage: Stage, top: Mapping[str, Any]) -> tuple[str, ...]:
    reads = ", ".join(map(str, stage.input_sources)) or "request"
    devices = " | ".join(part or "any" for part in placement.replicas(stage, top))
    return (
        str(stage.stage_id),
        stage.name,
        stage.queue,
        stage.engine,
        stage.execution_type,
        reads,
        stage.final_output_type or "-" if stage.final_output else "-",
        str(stage.max_num_seqs),
        devices,
    )


def check_engines(pipeline: Pipeline) -> None:
    """Import every engine written as package.module:Class. Raises ConfigError; ``load`` does not look."""
    for stage in pipeline.stages:
        module, colon, name = stage.engine.partition(":")
        if not colon:
            continue
        where = f"{pipeline.path}: stages[{stage.stage_id}].engine: {stage.engine}"
        try:
            attrgetter(name)(import_module(module))
        except ImportError as error:
            raise errors.ConfigError(f"{where} cannot be imported: {error}") from error
        except AttributeError:
            raise errors.ConfigError(f"{where}: {module} has no {name}") from None
