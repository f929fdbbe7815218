"""What one stage's engine takes from earlier stages and leaves for later ones, beside tokens and text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omniqueue import errors
from omniqueue.engines import omni_connector, omni_edges, omni_payload
from omniqueue.engines.base import StageOutput, StageRequest
from omniqueue.engines.omni_edges import CACHE, Edge


class Handover:
    """The edges of one stage, and the payloads on them; one for each engine."""

    def __init__(self, edges: tuple[Edge, ...], stage_id: int, last_stage: int) -> None:
        self._incoming = [edge for edge in edges if edge.target == stage_id]
        self._outgoing = [edge for edge in edges if edge.source == stage_id]
        self._last_stage = last_stage
        self._packer: omni_payload.Packer | None = None
        #: The last stage that each running request asks for, by its id.
        self._ends: dict[str, int] = {}

    def attach(self, omni: Any) -> None:
        """Have the engine emit what later stages read, and collect what a hook packs for one of them."""
        if not self._outgoing:
            return
        from vllm_omni.engine import async_omni_engine

        mark = async_omni_engine.apply_omni_final_stage_metadata

        def marked(request: Any, final_stage_id: int, **named: Any) -> Any:
            # A one-stage engine believes that it is the last stage, and the last one keeps its tensors to itself.
            return self.submitted(mark(request, self._ends.get(request.external_req_id, final_stage_id), **named))

        async_omni_engine.apply_omni_final_stage_metadata = marked
        hooked = [edge for edge in self._outgoing if edge.hook and edge.connector is None]
        if hooked:
            [pool] = omni.engine.stage_pools
            self._packer = omni_payload.Packer(hooked[0], pool.stage_vllm_config.model_config)
            self._collect(pool, self._packer)

    @staticmethod
    def _collect(pool: Any, packer: omni_payload.Packer) -> None:
        process = pool.process_llm_raw_outputs

        async def collected(replica_id: int, raw: Any, *rest: Any, **named: Any) -> Any:
            packer.saw(raw.outputs)
            return await process(replica_id, raw, *rest, **named)

        pool.process_llm_raw_outputs = collected

    @contextmanager
    def running(self, request: StageRequest) -> Iterator[None]:
        """While a request is in the engine; nothing of it is kept afterwards."""
        self._ends[request.request_id] = int(request.job.get("last_stage", self._last_stage))
        try:
            yield
        finally:
            del self._ends[request.request_id]
            if self._packer is not None:
                self._packer.forget(request.request_id)

    def renamed(self, request: StageRequest) -> StageRequest:
        """The request under the id that the engine has to know it by. Raises EngineError that names the edge."""
        made = omni_connector.renamed(self._incoming, request)
        if made is not request and made.request_id in self._ends:
            raise errors.EngineError(f"{self._incoming[0]}: an earlier attempt is still reading the payload here.")
        return made

    def lost(self, exc: Exception) -> errors.EngineError | None:
        """The error of a payload that did not come from an earlier stage's worker, if that is what happened."""
        return omni_connector.lost(self._incoming, exc)

    def check_alone(self, request_id: str, prompt: Any, params: Any) -> None:
        """Raise EngineRejected for guidance that takes a companion request, whose output would not reach the reader."""
        if self._incoming:  # companions are of the first stage, whose prompt is the request's
            return
        negative = prompt.get("negative_prompt") if isinstance(prompt, Mapping) else None
        asked = {**(getattr(params, "extra_args", None) or {}), "negative_prompt": negative}
        for edge in self._readers(request_id):
            if edge.companions and omni_edges.makes_companions(edge.companions, prompt, asked):
                raise errors.EngineRejected(
                    "negative_prompt and guidance: this model runs a companion request for them, and what it makes "
                    f"does not travel ({edge}); leave them out.",
                    param="negative_prompt",
                )

    def submitted(self, request: Any) -> Any:
        """Called with each request as the engine gets it; returns it. One that was cancelled meanwhile is left out."""
        if self._packer is not None and request.external_req_id in self._ends:
            self._packer.submitted(request)
        return request

    def given(self, prompt: Mapping[str, Any], request: StageRequest, *, generation: bool) -> Mapping[str, Any]:
        """The prompt with the payloads of earlier stages. Raises EngineError that names the edge of a missing one."""
        for edge in self._incoming:
            if edge.hook and edge.connector is None:
                payload = omni_payload.unpack(edge, request.sources[edge.source])
                prompt = omni_payload.give(prompt, payload, generation=generation)
        return prompt

    def _readers(self, request_id: str) -> list[Edge]:
        return [edge for edge in self._outgoing if edge.target <= self._ends[request_id]]

    def emits(self, request_id: str) -> bool:
        """Whether a later stage's input processor reads the tensors of this request's output."""
        return any(edge.reads_output for edge in self._readers(request_id))

    def hands_cache(self, request_id: str) -> bool:
        """Whether a later stage of this request continues the key-value cache."""
        return any(edge.kind == CACHE for edge in self._readers(request_id))

    def left(self, request_id: str) -> StageOutput:
        """What has to be stored beside the output. Raises EngineError that names the edge when there is nothing."""
        readers, packer = self._readers(request_id), self._packer
        made = packer.pack(request_id) if packer and packer.edge in readers else StageOutput()
        sent = any(edge.connector is not None for edge in readers)
        return StageOutput({**made.data, omni_connector.KEY: request_id}, made.tensors) if sent else made
