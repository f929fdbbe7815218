"""From a file's stage entries and a topology to checked stages: who reads whom, what comes out, how many at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from omniqueue import checks, schema, topology
from omniqueue.pipeline import QUEUE, Stage
from omniqueue.topology import Topology
from omniqueue.yamlfile import Map, Problems, nearest, plain

#: Requests in the engine at once when the file does not say. A diffusion pipeline refuses more than it was written for
#: and a user's engine may too; language models batch, and the fake engine only sleeps.
MAX_NUM_SEQS = {"diffusion": 1, "llm": 16, "fake": 16, "user": 1}

#: Two spellings of one thing, ours first.
_ALIASES = (("name", "model_stage"), ("input_sources", "engine_input_source"))
#: Keys that are ours or are handled here, and so are no part of vLLM-Omni's entry.
_OURS = (*schema.STAGE_OWN, "async_chunk")
_TYPES_OF = {"diffusion": "image", "llm_generation": "audio", "llm_ar": "text"}


def engine_of(entry: Mapping[str, Any]) -> str:
    """The engine an entry names; vLLM-Omni unless it says otherwise."""
    return entry.get("engine") or "vllm_omni"


def family(engine: str, execution_type: str) -> str:
    """Which default and which key set applies: fake, user, diffusion or llm."""
    if engine == "fake" or ":" in engine:
        return "fake" if engine == "fake" else "user"
    return "diffusion" if execution_type == "diffusion" and engine == "vllm_omni" else "llm"


def _unalias(entry: Map, problems: Problems) -> Map:
    result = entry.copy()
    for ours, other in _ALIASES:
        value = result.pop(other, None)
        if value is None:
            continue
        if result.get(ours) not in (None, value):
            problems.add(entry.at(other), f"is another name for {ours}, which says something else; keep one")
        result.put(ours, value, entry.at(other))
    return result


def ordered(entries: list[Map], known: Topology | None, top: Map, problems: Problems) -> list[Map]:
    """One entry per stage, by id; those that a registry pipeline has and the file leaves out are empty."""
    by_id = {entry["stage_id"]: _unalias(entry, problems) for entry in entries}
    if known is not None:
        for stage_id, entry in by_id.items():
            if stage_id >= len(known.stages):
                names = ", ".join(f"{s['stage_id']} ({s['name']})" for s in known.stages)
                problems.add(entry.at("stage_id"), f"is {stage_id}; {known.key or 'this pipeline'} has stages {names}")
        return [by_id.get(i) or Map(top.at("stages").child(i)) for i in range(len(known.stages))]
    missing = sorted(set(range(len(by_id))) - by_id.keys())
    if missing:
        problems.add(
            max(by_id.values(), key=lambda entry: int(entry["stage_id"])).at("stage_id"),
            f"stages are numbered from 0 without gaps; there is no stage {missing[0]}",
        )
    return [by_id[stage_id] for stage_id in sorted(by_id)]


def _from_registry(entry: Map, row: Mapping[str, Any], key: str | None, problems: Problems) -> dict[str, Any]:
    """The registry's facts; what a vLLM-Omni stage's entry repeats has to agree, other engines may differ."""
    facts = {name: row[name] for name in row if name != "stage_id"}
    for name in facts:
        said = entry.get(name)
        if said is None or said == facts[name]:
            continue
        if engine_of(entry) != "vllm_omni":
            facts[name] = said
            continue
        problems.add(
            entry.at(name),
            f"is {checks.shown(said)}, but vLLM-Omni's {key or 'pipeline'} has {checks.shown(facts[name])} here "
            "and takes nothing else; leave the key out",
        )
    return facts


def _from_file(entry: Map, stage_id: int, last: bool) -> dict[str, Any]:
    """A stage that no registry knows: what the entry says, and plain defaults for the rest."""
    final = entry.get("final_output")
    final = last if final is None else final
    guess = "text" if engine_of(entry) == "vllm" else "image"
    output_type = entry.get("final_output_type") or _TYPES_OF.get(str(entry.get("execution_type")), guess)
    paints = final and output_type in ("image", "video") and engine_of(entry) != "vllm"
    sources = entry.get("input_sources")
    return {
        "name": entry.get("name") or f"stage{stage_id}",
        "execution_type": entry.get("execution_type") or ("diffusion" if paints else "llm_ar"),
        "input_sources": list(range(stage_id))[-1:] if sources is None else sources,
        "final_output": final,
        "final_output_type": output_type if final else None,
    }


def _max_num_seqs(entry: Map, kind: str, problems: Problems) -> int:
    seqs = int(entry.get("max_num_seqs") or MAX_NUM_SEQS[kind])
    tokens = entry.get("max_num_batched_tokens")
    if tokens is not None and tokens < seqs:
        said = "max_num_seqs" if entry.get("max_num_seqs") else "max_num_seqs by default"
        problems.add(
            entry.at("max_num_batched_tokens"),
            f"is {tokens}, less than the {seqs} of {said}; every running request needs at least one token a step",
        )
    return seqs


def _deploy(entry: Map, stage_id: int, seqs: int) -> dict[str, Any]:
    """The entry as vLLM-Omni reads it, with the width that engine and worker share spelled out."""
    kept = {key: value for key, value in entry.items() if key not in _OURS and key != "engine_args"}
    if kept.get("devices") is not None:
        kept["devices"] = str(kept["devices"])
    return {**plain(kept), "stage_id": stage_id, "max_num_seqs": seqs}


def build(entry: Map, stage_id: int, facts: Mapping[str, Any], problems: Problems) -> Stage:
    """One stage from an entry that check_engine has passed."""
    engine = engine_of(entry)
    kind = family(engine, facts["execution_type"])
    seqs = _max_num_seqs(entry, kind, problems)
    deploy = _deploy(entry, stage_id, seqs)
    args = entry.get("engine_args") if kind in ("fake", "user") else None
    return Stage(
        stage_id=stage_id,
        name=facts["name"],
        queue=QUEUE.format(stage_id=stage_id),
        engine=engine,
        execution_type=facts["execution_type"],
        input_sources=tuple(facts["input_sources"]),
        final_output=bool(facts["final_output"]),
        final_output_type=facts["final_output_type"],
        max_num_seqs=seqs,
        devices=deploy.get("devices"),
        num_replicas=int(entry.get("num_replicas") or 1),
        env={str(key): str(value) for key, value in (deploy.get("env") or {}).items()},
        engine_args=plain(args or {}),
        default_sampling_params=deploy.get("default_sampling_params") or {},
        deploy=deploy,
    )


def check_engine(entry: Map, facts: Mapping[str, Any], stage_id: int, problems: Problems) -> None:
    """Report keys that the stage's engine does not take, at any depth that is known."""
    kind = family(engine_of(entry), facts["execution_type"])
    if kind in ("fake", "user"):
        args = entry.get("engine_args")
        if kind == "fake" and isinstance(args, Map):
            schema.check_keys(args, schema.FAKE, problems)
        return
    allowed, everywhere = schema.engine_keys(kind), schema.engine_keys()
    for key, value in entry.items():
        if key in everywhere and key not in allowed:
            wanted = "diffusion" if kind == "llm" else "language-model"
            problems.add(entry.at(key), f"is for {wanted} stages, and stage {stage_id} is none; take it out")
        elif value is not None:
            schema.check_keys(_single(entry, key), {**allowed, **schema.STAGE_OWN, **schema.STAGE_WRAPPER}, problems)
    _check_nested(entry, kind, allowed, problems)


def _single(entry: Map, key: Any) -> Map:
    single = Map(entry.mark)
    single.put(key, entry[key], entry.at(key))
    return single


def _check_nested(entry: Map, kind: str, own: Mapping[str, Any], problems: Problems) -> None:
    table = topology.table()
    nested = {
        "engine_extras": own,
        "parallel_config": _specs(table["stage_keys"][f"{kind}_parallel_config"]),
        "default_sampling_params": _specs(table["sampling"][kind]),
    }
    for key, allowed in nested.items():
        if isinstance(entry.get(key), Map):
            schema.check_keys(entry[key], allowed, problems)


def _specs(specs: Mapping[str, str]) -> dict[str, Any]:
    return {name: schema.RANGES.get(name) or checks.of_spec(spec) for name, spec in specs.items()}


def facts_of(entries: list[Map], known: Topology | None, problems: Problems) -> list[dict[str, Any]]:
    """Name, kind, inputs and outputs of every stage."""
    if known is not None:
        rows = zip(entries, known.stages, strict=True)
        return [_from_registry(entry, row, known.key, problems) for entry, row in rows]
    return [_from_file(entry, i, i == len(entries) - 1) for i, entry in enumerate(entries)]


def check_graph(entries: list[Map], facts: list[dict[str, Any]], problems: Problems) -> None:
    """Report inputs that do not come from an earlier stage, stages nobody reads, and a pipeline without an output."""
    read = {source for fact in facts for source in fact["input_sources"]}
    for stage_id, (entry, fact) in enumerate(zip(entries, facts, strict=True)):
        for source in fact["input_sources"]:
            complaint = _bad_source(source, stage_id, len(facts))
            if complaint:
                problems.add(entry.at("input_sources"), f"{complaint}; name earlier stages only")
        if not fact["final_output"] and stage_id not in read:
            problems.add(
                entry.mark, f"stage {stage_id} is read by no stage and is no final_output, so it would run for nothing"
            )
        _check_output(entry, fact, problems)
    if not any(fact["final_output"] for fact in facts):
        problems.add(
            entries[-1].at("final_output"), "no stage has final_output, so no answer would ever come; set it on one"
        )


def _bad_source(source: int, stage_id: int, count: int) -> str | None:
    if source == stage_id:
        return f"makes stage {stage_id} read itself"
    if source >= count:
        return f"names stage {source}, and there is none"
    return f"names stage {source}, which comes after stage {stage_id}" if source > stage_id else None


def _check_output(entry: Map, fact: Mapping[str, Any], problems: Problems) -> None:
    if fact["final_output"] and fact["final_output_type"] not in checks.OUTPUT_TYPES:
        problems.add(
            entry.at("final_output_type"),
            f"is {fact['final_output_type']}, which has no endpoint here; served are {', '.join(checks.OUTPUT_TYPES)}",
        )
    if not fact["final_output"] and entry.get("final_output_type") and fact["final_output_type"] is None:
        problems.add(
            entry.at("final_output_type"), "says nothing without final_output: true; add that or take this out"
        )
    if engine_of(entry) == "vllm" and fact["execution_type"] != "llm_ar":
        problems.add(entry.at("execution_type"), "must be llm_ar with engine vllm; use vllm_omni for other stages")


def check_wiring(top: Map, entries: list[Map], problems: Problems) -> None:
    """Report connectors and edges that point nowhere, and modes that one process per stage cannot have."""
    aliases = [str(alias) for alias in top.get("connectors") or ()]
    for entry in entries:
        for key, word in (("input_connectors", "from"), ("output_connectors", "to")):
            _check_connectors(entry.get(key), rf"{word}_stage_\d+", f"{word}_stage_<id>", aliases, problems)
        _check_async(entry, len(entries), problems)
    for edge in top.get("edges") or []:
        for key in ("from", "to"):
            if edge.get(key) is None or edge[key] >= len(entries):
                problems.add(edge.at(key), f"must be a stage id below {len(entries)}, not {edge.get(key)}")
    _check_async(top, len(entries), problems)
    if top.get("session_mode") == "duplex":
        problems.add(top.at("session_mode"), "duplex sessions need all stages in one process; set it to turn")


def _check_async(data: Map, count: int, problems: Problems) -> None:
    if data.get("async_chunk") and count > 1:
        problems.add(
            data.at("async_chunk"),
            "streams chunks between stages of one process, and here every stage has its own; set async_chunk: false",
        )


def _check_connectors(section: Any, pattern: str, shown: str, aliases: list[str], problems: Problems) -> None:
    for key, alias in section.items() if isinstance(section, Map) else ():
        if not re.fullmatch(pattern, str(key)):
            problems.add(section.at(key), f"must be named {shown}")
        if isinstance(alias, Map):
            schema.check_keys(alias, schema.CONNECTOR, problems)
        elif alias not in aliases:
            problems.add(
                section.at(key), f"names no connector of this file: {checks.shown(alias)}; {nearest(alias, aliases)}"
            )
