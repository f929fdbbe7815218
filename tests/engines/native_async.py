"""vLLM-Omni's own ``AsyncOmni`` over speech requests, for a bench: python -m tests.engines.native_async MODEL DEPLOY.

A line of stdin such as {"prompts": [...], "seed": 1, "in_flight": 16} is answered by the seconds that all took, and the
digest of each one's file in order. The vocoder's noise is drawn from its process's generator, which is set to the seed
before each step, as omniqueue sets it: only then can waves be compared.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import yaml

from omniqueue import audio
from omniqueue.payloads import Tensor

EXTENSION = "tests.engines.native_async.SeededSteps"
_RATE_HZ = 24_000
#: How long a worker may take to be told its seed, in seconds.
_PATIENCE_S = 60


class SeededSteps:
    """A worker that sets its process's generator before each step; vLLM mixes the class into its own."""

    def seed_steps(self, seed: int) -> None:
        """From now on to ``seed``."""
        import torch

        runner = self.model_runner  # type: ignore[attr-defined]
        step = type(runner).execute_model

        def seeded(*args: Any, **named: Any) -> Any:
            torch.manual_seed(seed)
            return step(runner, *args, **named)

        runner.execute_model = seeded


class Native:
    """The pipeline, and who asks it."""

    def __init__(self, model: str, deploy: str) -> None:
        from vllm_omni.entrypoints.async_omni import AsyncOmni

        self.omni = AsyncOmni(model=model, deploy_config=deploy, parallel_stage_init=True)
        with open(deploy, encoding="utf-8") as file:
            entries = yaml.safe_load(file)["stages"]
        self._seeded = [entry["stage_id"] for entry in entries if entry.get("worker_extension_cls") == EXTENSION]

    async def answer(self, prompts: Sequence[str], seed: int, in_flight: int) -> dict[str, Any]:
        """All prompts, ``in_flight`` of them at a time."""
        await self.omni.collective_rpc("seed_steps", timeout=_PATIENCE_S, args=(seed,), stage_ids=self._seeded)
        free = asyncio.Semaphore(in_flight)
        start = time.monotonic()
        waves = await asyncio.gather(*[self._one(prompt, seed, free) for prompt in prompts])
        seconds = time.monotonic() - start
        return {"seconds": seconds, "digests": [digest(_file(wave)) for wave in waves]}

    async def _one(self, prompt: str, seed: int, free: asyncio.Semaphore) -> Any:
        params = [one.clone() for one in self.omni.default_sampling_params_list]
        for one in params:
            one.seed = seed
        async with free:
            waves = []
            async for output in self.omni.generate(
                {"prompt": prompt}, sampling_params_list=params, output_modalities=["audio"]
            ):
                if (made := (output.multimodal_output or {}).get("audio")) is not None:
                    waves.append(made)
            return waves[-1]

    async def serve(self, answers: Any) -> None:
        """Answer every line of stdin."""
        print(json.dumps({"ready": True}), file=answers)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await self.answer(**json.loads(line))), file=answers)


def _file(wave: Any) -> bytes:
    """What a client of omniqueue gets of it."""
    import numpy
    import torch

    parts = wave if isinstance(wave, list | tuple) else [wave]
    flat = torch.cat([torch.as_tensor(part).detach().float().cpu().reshape(-1) for part in parts]).numpy()
    samples = numpy.ascontiguousarray(flat)
    content, _, _ = audio.encode(Tensor("float32", samples.shape, memoryview(samples).cast("B")), _RATE_HZ, "wav")
    return content


def digest(content: bytes) -> str:
    """Tells one file from another."""
    return hashlib.sha256(content).hexdigest()


def main(model: str, deploy: str) -> None:
    """Engines print to stdout, so the answers get its descriptor to themselves."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    native = Native(model, deploy)
    try:
        asyncio.run(native.serve(answers))
    finally:
        native.omni.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
