"""The payload that one stage packs for the next: what vLLM-Omni's own worker would have sent, taken from its answers.

In one program the producer's worker collects what the model emits at each step, has the pipeline's hook pack it when
the request ends, and writes it where the consumer's worker waits. Here collecting and packing happen outside the
engine, on the same values and by the same code, so that the payload is ours: it is stored, and can be read again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from omniqueue import errors
from omniqueue.engines import omni_edges, tensors
from omniqueue.engines.base import StageOutput
from omniqueue.engines.omni_edges import Edge
from omniqueue.payloads import Tensor

#: Names of tensors that belong to a payload begin with this; its other values are under ``data["payload"]``.
PREFIX = "payload" + tensors.SEPARATOR


class Packer:
    """Collects what a producer's requests emit and packs it at their end; one for each engine.

    ``saw`` is called from the thread that reads the engine's answers, all else from that of the requests.
    """

    def __init__(self, edge: Edge, model_config: Any) -> None:
        self.edge = edge
        self._collector = _collector_class()(omni_edges.load(edge.hook or ""), model_config)
        #: By the engine's own id, which may have a suffix; ``_inner`` has that one for ours.
        self._requests: dict[str, Any] = {}
        self._inner: dict[str, str] = {}

    def submitted(self, request: Any) -> None:
        """Remember a request as the engine gets it, in the shape in which hooks see it in a worker."""
        from vllm_omni.engine.serialization import deserialize_additional_information

        self._inner[request.external_req_id] = request.request_id
        self._requests[request.request_id] = SimpleNamespace(
            request_id=request.request_id,
            req_id=request.request_id,
            external_req_id=request.external_req_id,
            prompt_token_ids=list(request.prompt_token_ids or ()),
            output_token_ids=[],
            sampling_params=request.sampling_params,
            additional_information_cpu=deserialize_additional_information(request.additional_information),
        )

    def saw(self, outputs: Iterable[Any]) -> None:
        """Take in one step's raw outputs of the engine."""
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            request.output_token_ids.extend(int(one) for one in output.new_token_ids or ())
            emitted = getattr(output, "multimodal_output", None) or getattr(output, "pooling_output", None)
            if isinstance(emitted, Mapping) and emitted:
                self._collector.accumulate_full_payload_output(output.request_id, dict(emitted), request)

    def pack(self, request_id: str) -> StageOutput:
        """The payload of a finished request. Raises EngineError that names the edge when there is none."""
        from vllm_omni.data_entry_keys import to_dict

        request = self._requests[self._inner[request_id]]
        made = self._collector.packed(request.request_id, request)
        made = made if made is None or isinstance(made, Mapping) else to_dict(made)  # some hooks make structs
        if not _has_content(made):
            raise errors.EngineError(
                f"{self.edge}: nothing to hand over; {self._collector.name} made nothing of the "
                f"{len(request.output_token_ids)} tokens of stage {self.edge.source}."
            )
        arrays, facts = tensors.split(made or {})
        return StageOutput({"payload": facts}, {PREFIX + name: tensor for name, tensor in arrays.items()})

    def forget(self, request_id: str) -> None:
        """Drop what was collected; unknown ids are ignored."""
        inner = self._inner.pop(request_id, request_id)
        self._requests.pop(inner, None)
        self._collector.drop(inner)


@functools.cache
def _collector_class() -> Any:
    from vllm_omni.distributed.omni_connectors.model_runner.omni_connector_payload_transport import (
        _OmniConnectorPayloadTransportMixin,
    )

    class Collector(_OmniConnectorPayloadTransportMixin):  # type: ignore[misc]
        """The collecting and packing half of vLLM-Omni's worker, without a connector."""

        def __init__(self, hook: Any, model_config: Any) -> None:
            self.name = hook.__name__
            self.model_config = model_config
            self._custom_process_func = hook
            self._pending_full_payload_send: dict[str, Any] = {}

        def packed(self, request_id: str, request: Any) -> Any:
            entry = self._pending_full_payload_send.pop(request_id, None)
            collected = self._materialize_full_payload_entry(entry)[0] if entry is not None else {}
            return self._build_custom_process_payload(request_id, request, collected)

        def drop(self, request_id: str) -> None:
            self._pending_full_payload_send.pop(request_id, None)

    return Collector


def _has_content(payload: Any) -> bool:
    """Whether there is more in it than marks such as the one of the end."""
    return bool(_collector_class()._payload_is_consumable(payload))


def unpack(edge: Edge, source: StageOutput) -> dict[str, Any]:
    """The payload as the hook made it. Raises EngineError that names the edge when there is none."""
    arrays: dict[str, Tensor] = {
        name.removeprefix(PREFIX): tensor for name, tensor in source.tensors.items() if name.startswith(PREFIX)
    }
    payload = tensors.join(arrays, source.data.get("payload") or {})
    if not _has_content(payload):
        raise errors.EngineError(f"{edge}: the stored output has no payload, or an empty one.")
    return payload


def give(prompt: Mapping[str, Any], payload: Mapping[str, Any], *, generation: bool) -> dict[str, Any]:
    """A prompt that carries a payload, as the consumer's scheduler and worker would have joined the two.

    The payload wins over what the input processor says of the same thing. A generation stage's prompt is the codec
    tokens themselves, and some payloads say how long a prompt they need.
    """
    from vllm_omni.core.sched.omni_scheduling_coordinator import OmniSchedulingCoordinator

    said = prompt.get("additional_information") or {}
    joined = {**said, **{key: _over(said.get(key), value) for key, value in payload.items()}}
    made = {**prompt, "additional_information": joined}
    length = (payload.get("meta") or {}).get("next_stage_prompt_len")
    if isinstance(length, int) and length > 0:
        made["prompt_token_ids"] = [0] * length
    if generation:
        codes = OmniSchedulingCoordinator._flatten_prompt_token_ids((payload.get("codes") or {}).get("audio"))
        made["prompt_token_ids"] = codes or made["prompt_token_ids"]
    return made


def _over(said: Any, value: Any) -> Any:
    return {**said, **value} if isinstance(said, Mapping) and isinstance(value, Mapping) else value
