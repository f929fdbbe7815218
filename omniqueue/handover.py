"""Whether queues can carry what a config's stages hand to each other, told before anything is loaded.

What a registry pipeline hands over is in stage_configs/topologies.yaml; a file can ask for more, key-value pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omniqueue import stages
from omniqueue.topology import Topology
from omniqueue.yamlfile import Map, Problems

_PAGES = (
    "has vLLM's own connector move key-value pages from worker to worker, which queues do not carry; leave it out, or "
    "have omni_kv_config (need_send_cache, need_recv_cache) instead"
)
#: An edge whose payload vLLM-Omni's own workers hand to each other, in place of our store.
CONNECTOR = "connector"
#: Connectors whose reader finds a payload by its key alone; the first is meant where a file names none.
CONNECTORS = ("SharedMemoryConnector", "MooncakeStoreConnector", "YuanrongConnector")
#: Of an edge without a payload that vLLM-Omni's own workers could send and wait for.
NOT_BY_CONNECTOR = "has nothing that vLLM-Omni's own workers could hand to each other; queues carry it by reference"


def connectors(
    top: Mapping[str, Any], entries: Mapping[int, Mapping[str, Any]]
) -> dict[tuple[int, int], dict[str, Any]]:
    """The connectors (``name``, ``extra``) of the edges that go by connector, by source and target.

    ``top`` is the deploy file's top level, ``entries`` its stages by id; both have been checked.
    """
    return {ends: _named(top, entries, *ends)[0] for ends in _routed(top)}


def notes(top: Mapping[str, Any], entries: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """What edges by connector give up, for ``omniqueue validate``; arguments as of :func:`connectors`."""
    return [
        f"stage {source} -> stage {target} goes by {spec['name']}: a job fails whose worker dies with what it has read"
        for (source, target), spec in connectors(top, entries).items()
    ]


def _routed(top: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The edges that go by connector."""
    return [(edge["from"], edge["to"]) for edge in top.get("edges") or () if edge.get("route") == CONNECTOR]


def _named(
    top: Mapping[str, Any], entries: Mapping[int, Mapping[str, Any]], source: int, target: int
) -> list[dict[str, Any]]:
    """The connectors that two stages name for the edge between them, shared memory if neither does."""
    usual = {"name": CONNECTORS[0], "extra": {}}
    sides = (source, "output_connectors", f"to_stage_{target}"), (target, "input_connectors", f"from_stage_{source}")
    said = [entries[stage_id][key].get(name) for stage_id, key, name in sides if entries[stage_id].get(key)]
    found = [(top.get("connectors") or {}).get(one) if isinstance(one, str) else one for one in said if one]
    return [{**usual, **spec} for spec in found if spec] or [usual]


def refusal(edge: Mapping[str, Any]) -> str | None:
    """Why an edge of the table is not served, in one sentence that names it; None when it is."""
    return f"stage {edge['from']} -> stage {edge['to']}: {because(edge)}" if "refused" in edge else None


def because(edge: Mapping[str, Any]) -> str:
    """Why a refused edge is not served, and what change would help."""
    return f"{edge['refused']}; {edge['instead']}" if "instead" in edge else str(edge["refused"])


def check(data: Map, entries: list[Map], known: Topology | None, problems: Problems) -> None:
    """Report hand-overs between stages on vLLM-Omni that cannot be served, with what can be served instead."""
    omni = {i for i, entry in enumerate(entries) if stages.engine_of(entry) == "vllm_omni"}
    if known is not None:
        reasons = [refusal(edge) for edge in known.edges if {edge["from"], edge["to"]} <= omni]
        for reason in filter(None, reasons):
            problems.add(data.at("pipeline"), f"is {known.key}, which queues cannot carry: {reason}. {offer(known)}")
    for stage_id in omni if len(entries) > 1 else ():
        _check_pages(entries[stage_id], problems)
    for edge in () if problems.found else data.get("edges") or ():
        complaint = _unroutable(edge, data, entries, known) if edge.get("route") == CONNECTOR else None
        if complaint:
            problems.add(edge.at("route"), complaint)


def offer(known: Topology) -> str:
    """What to serve instead, as a sentence without its full stop."""
    if known.alternatives:
        return f"Of the same model there can be served: {', '.join(known.alternatives)}"
    return "vLLM-Omni itself serves it, in one program"


def _check_pages(entry: Map, problems: Problems) -> None:
    """Report what has vLLM itself hand over key-value pages."""
    extras = entry.get("engine_extras")
    for holder in (entry, extras if isinstance(extras, Map) else Map(entry.mark)):
        if holder.get("kv_transfer_config"):
            problems.add(holder.at("kv_transfer_config"), _PAGES)


def _unroutable(edge: Map, data: Map, entries: list[Map], known: Topology | None) -> str | None:
    """Why an edge cannot go by connector, None when it can."""
    source, target = edge["from"], edge["to"]
    if any(stages.engine_of(entries[end]) != "vllm_omni" for end in (source, target)):
        return "is for two stages on vllm_omni, whose workers have the connector; leave it out"
    row = next((row for row in known.edges if (row["from"], row["to"]) == (source, target)), {}) if known else None
    if row is not None and not row.get("connects"):
        return f"cannot be connector: stage {source} -> stage {target} {NOT_BY_CONNECTOR}"
    if data.get("model_runner") == "v2":
        return "cannot be connector with model_runner: v2, with which it has not been tried; set it to v1"
    # A stage in the middle has one connector, for what it gets and for what it sends.
    near = [ends for ends in _routed(data) if {source, target} & set(ends)]
    specs = [spec for ends in near for spec in _named(data, dict(enumerate(entries)), *ends)]
    odd = next((spec["name"] for spec in specs if spec["name"] not in CONNECTORS), None)
    if odd is not None:
        return f"cannot use {odd}: its reader has to know the sender's address; use {', '.join(CONNECTORS)}"
    if any(spec != specs[0] for spec in specs):
        return "needs one connector, and the stages of this edge name several that differ; name one for all of them"
    return None
