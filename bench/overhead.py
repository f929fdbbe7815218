"""What a worker with many running requests spends on us: its CPU beside that of the same engine driven directly."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench import deployment
from bench.closed_loop import Cpu
from bench.in_hand import InHand
from omniqueue.engines.base import StageRequest
from omniqueue.engines.fake import FakeEngine
from omniqueue.pipeline import Pipeline
from tests.process.cluster import eventually, running

REQUESTS = 64
#: A step of each request takes so long, in seconds; none ends while it is measured.
STEP_S, STEPS = 0.1, 100_000


def core_shares(seconds: float) -> dict[str, float]:
    """Shares of one core: of the worker, and of the engine alone with the same requests."""
    config = deployment.stages({"delay_s": STEP_S, "steps": STEPS}, slots=(REQUESTS,), hang_timeout_s=600)
    with running(config) as cluster:
        (worker,) = deployment.start_workers(cluster)
        jobs = InHand(cluster)
        jobs.more(REQUESTS)
        eventually(lambda: cluster.facts(worker).get("running") == REQUESTS)
        cpu, start = Cpu({"worker": [worker.pid]}), time.monotonic()
        time.sleep(seconds)
        share = cpu.taken_s()["worker"] / (time.monotonic() - start)
        for job_id in jobs.job_ids:
            cluster.store.cancel(job_id)
        cluster.all_ended(jobs.job_ids)
        return {"worker": share, "engine alone": asyncio.run(_engine_alone(cluster.pipe, seconds))}


async def _engine_alone(pipe: Pipeline, seconds: float) -> float:
    engine, stage = FakeEngine(), pipe.stages[0]
    engine.start(pipe, stage, "fake", lambda phase: None)
    moved: dict[int, Any] = {}

    async def one(number: int) -> None:
        request = StageRequest(f"r{number}", deployment.JOB, 0, {}, {})
        await engine.generate(request, lambda done, total: moved.update({number: (done, total)}))

    tasks = [asyncio.create_task(one(number)) for number in range(REQUESTS)]
    await asyncio.sleep(2 * STEP_S)
    cpu_s, start = time.thread_time(), time.monotonic()
    await asyncio.sleep(seconds)
    share = (time.thread_time() - cpu_s) / (time.monotonic() - start)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return share
