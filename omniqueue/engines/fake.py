"""The fake engine: no model, for transport tests, benchmarks and users' own tests. It says so wherever it shows.

``engine_args``: ``delay_s`` (per step), ``steps``, ``payload_bytes`` (size of the stage's output), ``raise_on``,
``exit_on``, ``hang_on`` (substrings of the prompt that make the stage raise, kill its process with status 9, or never
return), ``load_delay_s``.
"""

from __future__ import annotations

import array
import asyncio
import functools
import hashlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

from omniqueue import errors
from omniqueue.engines.base import Loaded, Progress, Report, Say, StageOutput, StageRequest
from omniqueue.payloads import Tensor
from omniqueue.pipeline import Pipeline, Stage

SAMPLE_RATE_HZ = 24_000
#: Pixels at the start of a picture whose red channel carries the prompt's SHA-256.
HASH_PIXELS = 32


class FakeEngine:
    """Sleeps and answers with something of the right shape, a pure function of prompt, seed and parameters."""

    def __init__(self) -> None:
        self._args: Mapping[str, Any] = {}
        self._stage: Stage | None = None
        self._running: dict[str, asyncio.Task[Any]] = {}
        self.loads = 0

    def start(self, pipeline: Pipeline, stage: Stage, model: str, report: Report) -> Loaded:
        """Wait ``load_delay_s`` and be ready."""
        report("loading the fake engine (no model)")
        self._args, self._stage = stage.engine_args, stage
        time.sleep(float(self._args.get("load_delay_s", 0)))
        self.loads += 1
        return Loaded(topology=pipeline.topology, facts={"engine": "fake"})

    async def generate(self, request: StageRequest, progress: Progress) -> StageOutput:
        """Take ``steps`` steps of ``delay_s`` each, then answer."""
        task = asyncio.current_task()
        if task is not None:
            self._running[request.request_id] = task
        try:
            await self._misbehave(str(request.job.get("prompt", "")))
            self._check_sources(request)
            answer = self._answer(request)
            await self._steps(progress, _pieces(answer) if request.say else [], request.say)
            return answer
        finally:
            self._running.pop(request.request_id, None)

    async def _misbehave(self, prompt: str) -> None:
        if _matches(self._args.get("raise_on"), prompt):
            raise errors.EngineError("The fake engine was asked to raise (raise_on).")
        if _matches(self._args.get("exit_on"), prompt):
            sys.stderr.write("fake engine: exiting as asked (exit_on)\n")
            sys.stderr.flush()
            os._exit(9)
        if _matches(self._args.get("hang_on"), prompt):
            await asyncio.Event().wait()

    async def _steps(self, progress: Progress, pieces: list[Mapping[str, Any]], say: Say | None) -> None:
        """Wait step by step; a text is said on the way, one word at a time."""
        steps, delay_s = int(self._args.get("steps", 1)), float(self._args.get("delay_s", 0))
        for step in range(steps):
            if delay_s:
                await asyncio.sleep(delay_s)
            if say is not None:
                for piece in pieces[len(pieces) * step // steps : len(pieces) * (step + 1) // steps]:
                    say(piece)
            progress(step + 1, steps)

    def _check_sources(self, request: StageRequest) -> None:
        """A wrong or torn payload shows here, not in the picture."""
        for stage_id, source in request.sources.items():
            tensor = source.tensors.get("mark")
            expected = _mark(request.job, request.index, stage_id)
            if tensor is not None and tensor.nbytes:
                view = memoryview(tensor.buffer).cast("B")
                size = min(len(expected), len(view))
                if bytes(view[:size]) != expected[:size]:
                    raise errors.EngineError(f"Stage {stage_id}'s payload is not the one of this request.")

    def _answer(self, request: StageRequest) -> StageOutput:
        stage = self._stage
        if stage is None:
            raise errors.EngineDead("The fake engine was not started.")
        data: dict[str, Any] = {"fake": True, "resolved": {**stage.default_sampling_params, **request.params}}
        if request.inputs:
            data["resolved"]["inputs"] = {name: list(tensor.shape) for name, tensor in request.inputs.items()}
        tensors: dict[str, Tensor] = {}
        kind = (stage.final_output_type or "image") if stage.final_output else None
        if kind:
            data |= _FINAL[kind](request, tensors)
        size = int(self._args.get("payload_bytes", 0))
        if size and kind in (None, "text"):
            mark = _mark(request.job, request.index, stage.stage_id)
            tensors["mark"] = Tensor("uint8", (len(mark),), mark)
            tensors["payload"] = Tensor("uint8", (size,), _filler(size))
        return StageOutput(data, tensors)

    async def abort(self, request_id: str) -> None:
        """Cancel the request's task."""
        task = self._running.get(request_id)
        if task is not None:
            task.cancel()

    async def check_health(self) -> None:
        """Always well."""

    def close(self) -> None:
        """Nothing to free."""


def _matches(needle: str | None, prompt: str) -> bool:
    return bool(needle) and str(needle) in prompt


@functools.lru_cache(maxsize=1)
def _filler(size: int) -> bytes:
    """As a real engine's output lies in memory when it is handed over: making it is no part of handing it over."""
    return bytes(range(256)) * (size // 256) + bytes(size % 256)


def _mark(job: Mapping[str, Any], index: int, stage_id: int) -> bytes:
    """64 bytes that tell one request's payload of one stage from every other."""
    return hashlib.sha512(repr((job, index, stage_id)).encode()).digest()


def _noise(request: StageRequest, size: int) -> bytes:
    """``size`` bytes that depend on prompt, seed and parameters, and on nothing else."""
    keys = ("prompt", "negative_prompt", "width", "height", "num_inference_steps", "guidance_scale")
    facts = {key: request.job.get(key) for key in keys}
    facts |= {"params": request.params}
    # What came in goes into the picture: its pixels, not only that there were some.
    facts |= {name: hashlib.sha256(tensor.buffer).hexdigest() for name, tensor in request.inputs.items()}
    return hashlib.shake_128(json.dumps(facts, sort_keys=True).encode()).digest(size)


def _image(request: StageRequest, tensors: dict[str, Tensor], frames: int = 0) -> dict[str, Any]:
    width, height = int(request.job.get("width", 256)), int(request.job.get("height", 256))
    row = _noise(request, width * 3)
    pixels = bytearray(row * height)
    prompt_hash = hashlib.sha256(str(request.job.get("prompt", "")).encode()).digest()
    for pixel in range(min(HASH_PIXELS, width * height)):
        pixels[pixel * 3] = prompt_hash[pixel]
    if frames:
        tensors["video"] = Tensor("uint8", (frames, height, width, 3), bytes(pixels) * frames)
        return {"fps": int(request.job.get("fps", 8))}
    tensors["image"] = Tensor("uint8", (height, width, 3), bytes(pixels))
    return {}


def _video(request: StageRequest, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return _image(request, tensors, frames=int(request.job.get("num_frames", 4)))


def _audio(request: StageRequest, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A sine of the requested length, with a pitch for each voice."""
    samples = max(1, round(float(request.job.get("seconds", 1.0)) * SAMPLE_RATE_HZ))
    voice = hashlib.sha256(str(request.job.get("voice", "")).encode()).digest()[0] if request.job.get("voice") else 0
    step = 2 * math.pi * 440 * 2 ** (voice % 12 / 12) / SAMPLE_RATE_HZ
    wave = array.array("f", (0.5 * math.sin(step * i) for i in range(samples)))
    tensors["audio"] = Tensor("float32", (samples,), wave.tobytes())
    return {"sample_rate": SAMPLE_RATE_HZ}


def _text(request: StageRequest, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The prompt's words, each a token, as far as ``max_tokens`` and ``stop`` let them."""
    words = str(request.job.get("prompt", "")).split()
    text, reason = " ".join(words), "stop"
    stops, most = request.params.get("stop") or (), request.params.get("max_tokens", request.job.get("max_tokens"))
    for stop in (stops,) if isinstance(stops, str) else stops:
        text = text.partition(stop)[0]
    kept = text.split()
    if most is not None and len(kept) > int(most):
        kept = kept[: int(most)]
        text, reason = " ".join(kept), "length"
    facts = {"text": text, "token_ids": list(range(len(kept))), "prompt_tokens": len(words), "finish_reason": reason}
    if request.params.get("logprobs") is not None:  # it is always sure of itself
        facts["logprobs"] = [{"token": word, "logprob": 0.0, "top": []} for word in kept]
    return facts


def _pieces(answer: StageOutput) -> list[Mapping[str, Any]]:
    """A text word by word, spaces included, as an engine says it."""
    text, entries = str(answer.data.get("text", "")), answer.data.get("logprobs")
    pieces: list[Mapping[str, Any]] = []
    for number, word in enumerate(re.findall(r"\s*\S+|\s+$", text)):
        logprobs = {"logprobs": entries[number : number + 1]} if entries is not None else {}
        pieces.append({"text": word, "tokens": 1 if word.strip() else 0, **logprobs})
    return pieces


_FINAL = {"image": _image, "video": _video, "audio": _audio, "text": _text}
