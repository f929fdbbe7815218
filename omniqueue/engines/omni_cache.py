"""Key-value caches that one stage computes for another, through our own store.

In one program the producer's worker puts a request's cache into a connector and the consumer's worker gets it there.
Here each stage's process is the other end of its own worker: it gets what the worker puts, so that the cache is stored
like any output, and puts it again for the consumer's worker, which receives it as always (on its device, its shard).
Nothing stays in shared memory but our own payloads, and a stage can be run again from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

from omniqueue import errors
from omniqueue.engines import omni_edges, tensors
from omniqueue.engines.base import StageOutput, StageRequest
from omniqueue.engines.omni_edges import Edge
from omniqueue.payloads import Tensor

#: Runs a request of an id with a prompt and parameters.
Ask = Callable[[str, Any, Any], Awaitable[Any]]
#: Is held while a request is in the engine.
Running = Callable[[StageRequest], contextlib.AbstractContextManager[None]]

#: Names of tensors that belong to a cache begin with this; its other values are under ``data["cache"]``.
PREFIX = "cache" + tensors.SEPARATOR
#: The request's own cache; others have the role that the pipeline gives a companion request.
OWN = "own"
#: How long a worker may take to hand over a cache after its request has ended, in seconds.
_PATIENCE_S = 30.0
#: A worker's end of the connector and ours; each stage runs alone, so all of them may have the same names.
_FROM, _TO = "0", "1"
_CONNECTOR = {"type": "SharedMemoryConnector"}
#: What of a cache is kept; the rest is about the producer's memory.
_KEPT = ("layer_blocks", "metadata")


class CacheEnd:
    """The other end of one stage's worker, which hands caches over (``sends``) or receives them."""

    def __init__(self, edge: Edge, stage: Any, deploy: Mapping[str, Any]) -> None:
        self.edge = edge
        self.sends = edge.source == stage.stage_id
        self.config = config(omni_edges.cache_config(stage, deploy), sends=self.sends, shards=_shards(deploy))
        self._expand = omni_edges.load(stage.prompt_expand_func) if self.sends and stage.prompt_expand_func else None
        self._manager: Any = None
        #: When requests were given up, on the monotonic clock in seconds.
        self._dropped: dict[str, float] = {}

    def attach(self) -> None:
        """Open our end, once the worker has its own."""
        mine = {"need_send_cache": not self.sends, "need_recv_cache": self.sends}
        ends = {"stage_id": int(_TO), "engine_input_source": [int(_FROM)], "recv_timeout": _PATIENCE_S}
        self._manager = _manager_class()._create({**self.config, **mine, **ends})

    def companions(self, prompt: Any, params: Any) -> dict[str, tuple[str, Any, Any]]:
        """The requests that are to run beside one for their caches: id suffix, prompt and parameters by role."""
        made = self._expand(prompt, params) if self._expand else []
        return {one.role: (one.request_id_suffix, one.prompt, one.apply_overrides(params, [params])[0]) for one in made}

    async def take(self, request_id: str, role: str = OWN) -> StageOutput:
        """What the worker put for a request. Raises EngineError when there is none within half a minute."""
        data, _size = await asyncio.to_thread(self._manager.receive_kv_cache_for_request, request_id)
        if data is None:
            raise errors.EngineError(f"{self.edge}: the model handed over no key-value cache in {_PATIENCE_S:.0f} s.")
        arrays, facts = tensors.split({role: {name: data[name] for name in _KEPT}})
        return StageOutput(facts, {PREFIX + name: tensor for name, tensor in arrays.items()})

    async def answered(
        self, request: StageRequest, prompt: Any, params: Any, ask: Ask, running: Running
    ) -> tuple[Any, list[StageOutput]]:
        """The engine's answer, its cache, and the caches of what the pipeline runs beside it: all of them or none."""
        ours = request.request_id
        asked = {OWN: ("", prompt, params), **self.companions(prompt, params)}

        async def one(role: str, suffix: str, *question: Any) -> tuple[Any, StageOutput]:
            beside = dataclasses.replace(request, request_id=ours + suffix)
            with running(beside) if suffix else contextlib.nullcontext():
                answer = await ask(beside.request_id, *question)
            return answer, await self.take(beside.request_id, role)

        tasks = [asyncio.ensure_future(one(role, *parts)) for role, parts in asked.items()]
        try:
            answers = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for suffix, *_ in asked.values():
                self.drop(ours + suffix)
            raise
        return answers[0][0], [kept for _, kept in answers]

    def drop(self, request_id: str) -> None:
        """Take away what the worker has put for a request that failed, or puts a step after its end."""
        now = time.monotonic()
        self._dropped[request_id] = now
        for one, since in list(self._dropped.items()):
            self._manager.clean(one)
            if now - since > _PATIENCE_S:
                del self._dropped[one]

    @contextlib.contextmanager
    def given(self, request_id: str, source: StageOutput) -> Iterator[dict[str, str]]:
        """Put a stored output's caches where the worker looks for them; yields the companions' ids by their role.

        Raises EngineError that names the edge when the output has none: without it a model paints something else.
        """
        caches = self._stored(source)
        ids = {role: request_id if role == OWN else f"{request_id}.{role}" for role in caches}
        try:
            for role, cache in caches.items():
                self._manager.put(ids[role], cache)
            yield {role: one for role, one in ids.items() if role != OWN}
        finally:
            for one in ids.values():  # of a request that ended before its turn nobody has read it
                self._manager.clean(one)

    def _stored(self, source: StageOutput) -> dict[str, Any]:
        arrays: dict[str, Tensor] = {
            name.removeprefix(PREFIX): tensor for name, tensor in source.tensors.items() if name.startswith(PREFIX)
        }
        caches = tensors.join(arrays, source.data.get("cache") or {})
        if OWN not in caches:
            raise errors.EngineError(f"{self.edge}: the stored output has no key-value cache.")
        return caches


def end_of(edges: Iterable[Edge], stage: Any, deploy: Mapping[str, Any]) -> CacheEnd | None:
    """Our end for a stage, a ``StagePipelineConfig``, None when no edge of it carries a cache."""
    ours = [one for one in edges if one.kind == omni_edges.CACHE and stage.stage_id in (one.source, one.target)]
    return CacheEnd(ours[0], stage, deploy) if ours else None


def stored(caches: Iterable[StageOutput]) -> StageOutput:
    """What is kept of a request's own cache and its companions', beside the stage's output."""
    facts: dict[str, Any] = {}
    arrays: dict[str, Tensor] = {}
    for cache in caches:
        facts |= cache.data
        arrays |= cache.tensors
    return StageOutput({"cache": facts} if arrays else {}, arrays)


def config(wanted: Mapping[str, Any], *, sends: bool, shards: int) -> dict[str, Any]:
    """A stage's ``omni_kv_config`` with this process as its other end; ``shards`` is its tensor parallel size."""
    return {
        **wanted,
        "need_send_cache": sends,
        "need_recv_cache": not sends,
        "connector_config": _CONNECTOR,
        "omni_from_stage": _FROM,
        "omni_to_stage": _TO,
        "stage_id": int(_FROM if sends else _TO),
        "engine_input_source": [] if sends else [int(_FROM)],
        "rank_mapping": {"from_tp": shards, "to_tp": 1} if sends else {"from_tp": 1, "to_tp": shards},
        # It reads ahead while another request runs; a request's cache is there only once that request is submitted.
        "enable_kv_async_prefetch": False,
    }


def _shards(deploy: Mapping[str, Any]) -> int:
    inner = deploy.get("parallel_config") or {}
    return int(deploy.get("tensor_parallel_size") or inner.get("tensor_parallel_size") or 1)


@functools.cache
def _manager_class() -> Any:
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import KVCacheTransferData, OmniKVTransferManager
    from vllm_omni.distributed.omni_connectors.utils.kv_utils import build_rank_aware_recv_keys

    class Manager(OmniKVTransferManager):  # type: ignore[misc]
        """vLLM-Omni's own, at the end where it has a process of its own; what cannot be put is an error here."""

        def put(self, request_id: str, cache: Mapping[str, Any]) -> None:
            blocks, facts = cache["layer_blocks"], cache["metadata"]
            self._transfer_kv_cache(KVCacheTransferData(request_id, blocks, [], facts), request_id)

        def _transfer_with_retry(self, *args: Any) -> Any:
            done = super()._transfer_with_retry(*args)
            if not done[0]:
                raise errors.EngineError("Shared memory takes no key-value cache; is /dev/shm full?")
            return done

        def clean(self, request_id: str) -> None:
            for key, _rank in build_rank_aware_recv_keys(request_id, _FROM, _TO, self.tp_topology):
                self.connector.cleanup(key)

    return Manager
