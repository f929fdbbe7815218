"""Payloads that vLLM-Omni's workers hand to each other through its own connector, where a stage config says so.

The producer's worker packs and puts a payload when a request ends, the consumer's worker gets it by the request's id
and the producer's stage: both as in one program. What is left to do here is to tell workers and schedulers their real
stage id, and to run the consumer's request under the producer's id. A payload is read once; nobody keeps it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from omniqueue import errors
from omniqueue.engines.base import StageRequest
from omniqueue.engines.omni_edges import Edge

#: Where a stored output says under which id its payload went into the connector.
KEY = "connector"
#: What vLLM-Omni says of a request whose payload did not come.
_TIMED_OUT = "waiting for connector input"


@contextlib.contextmanager
def joined(connected: Iterable[Edge], stage_id: int) -> Iterator[None]:
    """While an engine is built: its worker and scheduler are of stage ``stage_id`` and have the edges' connector."""
    mine = [edge for edge in connected if stage_id in (edge.source, edge.target)]
    if not mine:
        yield
        return
    from vllm_omni.engine import stage_runtime

    build = stage_runtime.build_engine_args_dict_from_omni_stage_config

    def built(*args: Any, **named: Any) -> dict[str, Any]:
        return {**build(*args, **named), "stage_id": stage_id, "stage_connector_spec": dict(mine[0].connector or {})}

    stage_runtime.build_engine_args_dict_from_omni_stage_config = built
    try:
        yield
    finally:
        stage_runtime.build_engine_args_dict_from_omni_stage_config = build


def renamed(edges: Iterable[Edge], request: StageRequest) -> StageRequest:
    """The request under the id that its payload was sent by, where one comes by connector.

    Raises EngineError that names the edge when the earlier stage did not send it that way.
    """
    for edge in edges:
        source = request.sources.get(edge.source)
        if edge.connector is not None and source is not None:
            if KEY not in source.data:
                raise errors.EngineError(
                    f"{edge}: stage {edge.source} did not send its payload by connector; give both stages' workers the "
                    "same stage config."
                )
            return dataclasses.replace(request, request_id=str(source.data[KEY]))
    return request


def lost(edges: Iterable[Edge], exc: Exception) -> errors.EngineError | None:
    """What to say when the engine has given up waiting for a payload; None when that is not what happened."""
    if _TIMED_OUT not in str(exc):
        return None
    for edge in edges:
        if edge.connector is not None:
            return errors.EngineError(
                f"{edge}: the payload did not come through {edge.connector['name']}. What goes by connector can be "
                "read once and is gone with the worker that sent it; ask again, or have this edge go by reference."
            )
    return None
