"""Real engines: a tiny GLM-Image through the whole of omniqueue, and the same engines driven directly in this process.

Sixteen pictures are asked for at once over HTTP. The AR stage takes all sixteen into one batch. The DiT stage's worker
has left its queue meanwhile (``celery control cancel_consumer``) and takes it up when the last of them is through, so
that each stage has the machine to itself, as it would have its own GPU. The engines alone get the same requests in turn
with it, so that what else the machine does falls on both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import yaml

from omniqueue import celery_app, demo, engines, params, settings, store, up
from omniqueue.engines.base import Engine, StageOutput, StageRequest
from omniqueue.pipeline import Pipeline
from tests.process.cluster import eventually, publish_to

REQUESTS, SIZE = 16, "256x256"
PROMPT = "A red apple on a white table"
#: How often both are measured, after a first burst that warms caches up.
ROUNDS = 5
BURST_S = 300.0


@contextlib.contextmanager
def config() -> Iterator[str]:
    """The tiny GLM-Image with an AR stage as wide as the burst."""
    with tempfile.TemporaryDirectory(prefix="oqb-") as folder:
        path = Path(folder) / "glm_image_wide.yaml"
        wide = {"base_config": "glm_image_tiny.yaml", "stages": [{"stage_id": 0, "max_num_seqs": REQUESTS}]}
        path.write_text(yaml.safe_dump(wide))
        yield str(path)


class Alone:
    """The engines of all stages in this process, without a queue."""

    def __init__(self, pipe: Pipeline, model: str) -> None:
        self.pipe = pipe
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._engines: list[Engine] = []
        for stage in pipe.stages:
            engine = engines.create(stage)
            engine.start(pipe, stage, model, lambda phase: None)
            self._engines.append(engine)

    def burst(self, stage_id: int, sources: Sequence[Mapping[int, StageOutput]]) -> tuple[float, list[StageOutput]]:
        """Seconds for as many requests at once as there are ``sources``, and what came out."""
        start = time.monotonic()
        made = asyncio.run_coroutine_threadsafe(self._all(stage_id, sources), self._loop).result(BURST_S)
        return time.monotonic() - start, made

    async def _all(self, stage_id: int, sources: Sequence[Mapping[int, StageOutput]]) -> list[StageOutput]:
        return await asyncio.gather(*[self._one(stage_id, seed, given) for seed, given in enumerate(sources)])

    async def _one(self, stage_id: int, seed: int, given: Mapping[int, StageOutput]) -> StageOutput:
        job = params.image_job(self.pipe, prompt=PROMPT, size=SIZE, seed=seed)
        asked = params.stage_params(job, self.pipe.stage(stage_id), 0)
        request = StageRequest(store.new_id(), job, 0, asked, given)
        return await self._engines[stage_id].generate(request, lambda done, total: None)

    def close(self) -> None:
        """Free the engines."""
        for engine in self._engines:
            engine.close()


class Queue:
    """A stage's queue, which its workers leave and take up again by Celery's remote control."""

    def __init__(self, name: str) -> None:
        self._name = name
        publish_to(settings.load())
        self._control: Any = celery_app.app.control
        self._workers = self._consuming()

    def _consuming(self) -> list[str]:
        told = self._control.inspect(timeout=1.0).active_queues() or {}
        return [worker for worker, queues in told.items() if self._name in [queue["name"] for queue in queues]]

    def leave(self) -> None:
        """Returns when no worker takes from it any more. Raises AssertionError after BURST_S."""
        self._control.cancel_consumer(self._name, destination=self._workers)
        eventually(lambda: not self._consuming(), BURST_S)

    def take_up(self) -> None:
        """Have its workers take from it again."""
        self._control.add_consumer(self._name, destination=self._workers)


def through(machine: up.Machine, count: int, later: Queue | None = None) -> tuple[float, float]:
    """Seconds that ``count`` pictures at once took in the AR stage, and from then on to the last one's answer.

    ``later`` is the DiT stage's queue, if it is to be left until the AR stage has done with all of them.
    """
    body = {"prompt": PROMPT, "size": SIZE}
    if later:
        later.leave()
    start = time.time()

    def written() -> list[float]:
        """When the AR stage ended those that it has done with."""
        jobs = machine.records.jobs(machine.pipe.name, count)
        return [
            job.stages[0].ended_at or 0.0 for job in jobs if job.created_at > start and job.stages[0].state == "done"
        ]

    with ThreadPoolExecutor(count) as clients:
        asked = [
            clients.submit(demo.post, machine.options.port, "/v1/images/generations", {**body, "seed": seed})
            for seed in range(count)
        ]
        eventually(lambda: len(written()) == count, BURST_S, every_s=0.1)
        begun = time.time() if later else max(written())
        if later:
            later.take_up()
        for one in asked:
            one.result(BURST_S)
    return max(written()) - start, time.time() - begun


def memory_bytes() -> int:
    """What all processes below this one hold, shared pages counted once (PSS)."""
    return sum(process.memory_full_info().pss for process in psutil.Process().children(recursive=True))


def throughput() -> dict[str, Any]:
    """Tokens and pictures a second of both, by the medians of the rounds; start-up, memory, one picture at a time."""
    model = str(demo.tiny_model())
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    with config() as path, contextlib.ExitStack() as stack:
        began = time.monotonic()
        machine = stack.enter_context(up.running(up.Options(path, demo.free_port(), model=model), print))
        machine.interruptible = True
        start_s = time.monotonic() - began
        through(machine, REQUESTS)
        single = [through(machine, 1) for _ in range(3)]
        held = memory_bytes()
        later = Queue(machine.pipe.stages[1].queue)
        alone = Alone(machine.pipe, model)
        stack.callback(alone.close)
        rounds: dict[str, list[tuple[float, float]]] = {"omniqueue": [], "engine alone": []}
        tokens = 0
        for number in range(ROUNDS + 1):
            ar_s, made = alone.burst(0, [{}] * REQUESTS)
            dit_s, _ = alone.burst(1, [{0: output} for output in made])
            tokens = sum(len(output.data["token_ids"]) for output in made)
            if number:
                rounds["engine alone"].append((ar_s, dit_s))
                rounds["omniqueue"].append(through(machine, REQUESTS, later))
                told = ", ".join(f"{name} {times[-1][0]:.2f} + {times[-1][1]:.2f} s" for name, times in rounds.items())
                print(f"round {number}: {told}", flush=True)
    ours = rounds["omniqueue"]
    together_s, single_s = (statistics.median(ar_s for ar_s, _ in times) for times in (ours, single))
    return {
        **{path: _rates(times, tokens) for path, times in rounds.items()},
        "tokens": tokens,
        "start_s": start_s,
        "memory_gb": held / 1e9,
        "per_minute_one_by_one": 60 / statistics.median(sum(one) for one in single),
        "per_minute_at_once": 60 * REQUESTS / statistics.median(sum(one) for one in ours),
        "batched": together_s / (REQUESTS * single_s),
    }


def _rates(times: Sequence[tuple[float, float]], tokens: int) -> dict[str, float]:
    ar_s, dit_s = (statistics.median(one) for one in zip(*times, strict=True))
    return {"tokens_per_s": tokens / ar_s, "pictures_per_s": REQUESTS / dit_s}
