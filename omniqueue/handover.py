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
