"""What an engine is: the short protocol every stage runs behind, and what goes in and comes out.

A user's own engine is a class with these five methods, named in the stage config as ``engine: package.module:Class``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from omniqueue.payloads import Tensor
from omniqueue.pipeline import Pipeline, Stage

#: Called while an engine loads: a short phase name ("importing vllm_omni", "loading weights").
Report = Callable[[str], None]
#: Called while a request runs: steps done, steps in all (0 when unknown).
Progress = Callable[[int, int], None]
#: Called while a text stage runs, with each new piece: ``text``, ``tokens`` (their number) and perhaps ``logprobs``.
Say = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class StageOutput:
    """One item's output of one stage: JSON facts and raw tensors.

    ``data`` is JSON-able (``token_ids``, ``cumulative_token_ids``, ``cumulative_text``, ``text``, ``prompt_token_ids``,
    ``finish_reason``, ``usage`` ...). ``tensors`` are named buffers. A final image is the tensor ``image``, uint8,
    shape (height, width, 3); final audio is ``audio``, float32, shape (samples,) or (channels, samples) with
    ``data["sample_rate"]`` in Hz; final video is ``video``, uint8, shape (frames, height, width, 3), with
    ``data["fps"]``; final text is ``data["text"]``, with ``data["logprobs"]`` where they were asked for: one entry a
    token with ``token``, ``logprob`` and ``top``, a list of the same.
    """

    data: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StageRequest:
    """One item of one attempt at one stage.

    ``request_id`` is unique for job, stage, attempt and item. ``job`` is the accepted request (prompt, seed, width in
    pixels, ...; see :mod:`omniqueue.params`), ``index`` the item's number, ``params`` the overrides resolved for this
    stage (request over config), ``sources`` the outputs of every stage named in ``input_sources``, by stage id. ``say``
    is there when somebody reads the text while it is written; an engine that cannot say it in pieces need not.
    ``inputs`` are the request's own media, for every stage: ``image.0``, ``image.1`` ..., ``mask`` and
    ``reference_image``, uint8 of shape (height, width, channels) with 1, 3 or 4 channels.
    """

    request_id: str
    job: Mapping[str, Any]
    index: int
    params: Mapping[str, Any]
    sources: Mapping[int, StageOutput]
    say: Say | None = None
    inputs: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """What an engine tells after it has started: the topology it resolved, for the router to compare."""

    topology: tuple[Mapping[str, Any], ...] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Engine(Protocol):
    """One stage of one pipeline, loaded once, running many requests at once on the host's event loop."""

    def start(self, pipeline: Pipeline, stage: Stage, model: str, report: Report) -> Loaded:
        """Load; blocks until requests can be taken. Raises ConfigError or EngineError."""

    async def generate(self, request: StageRequest, progress: Progress) -> StageOutput:
        """Run one item. Cancelling the task aborts it in the engine. Raises EngineRejected, EngineError, EngineDead."""

    async def abort(self, request_id: str) -> None:
        """Stop a running item within one step; unknown ids are ignored."""

    async def check_health(self) -> None:
        """Raise EngineDead when the engine can take no more requests."""

    def close(self) -> None:
        """Free everything, leaving no child process; may be called twice."""
