"""What a request costs with many jobs waiting and many finished: it should not grow with either."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor

from bench import deployment, floor
from bench.closed_loop import Cpu
from bench.in_hand import InHand, rate
from omniqueue import catalog, celery_app, chain, settings, store
from tests.process.cluster import Cluster, running

WAITING = (10, 1_000, 100_000)
#: Few that sleep a little, in seconds, so that the client which keeps so many waiting is never behind.
SLOTS, DELAY_S = 4, 0.02
_FILLERS = 2
#: How often what a router asks is asked, for its median.
_ASKED = 50


@dataclasses.dataclass(frozen=True)
class Row:
    """What a request cost with so many jobs waiting, and so many finished, when its measurement began."""

    waiting: int
    finished: int
    #: Milliseconds of CPU by role: the submitting client, the stage's worker, the broker.
    cpu_ms: Mapping[str, float]
    per_s: float
    #: What accepting a job takes, and what /metrics reads, in milliseconds: the medians.
    submit_ms: float
    overview_ms: float

    @property
    def total_ms(self) -> float:
        """CPU of all roles together."""
        return sum(self.cpu_ms.values())


def rows(seconds: float, waiting: tuple[int, ...] = WAITING) -> Iterator[Row]:
    """A row for each number of waiting jobs; then those end, and the first row is measured again beside them."""
    config = deployment.stages({"delay_s": DELAY_S}, slots=(SLOTS,), max_queue=10**6, request_timeout_s=3600)
    with running(config) as cluster:
        cluster.loglevel = "WARNING"
        jobs = InHand(cluster)
        for count in waiting:
            _fill(jobs, count + SLOTS - cluster.store.live(cluster.pipe.name))
            yield _row(jobs, seconds)
        _in_parts(cluster, _cancel, jobs.job_ids)
        subprocess.run(
            [sys.executable, "-m", "celery", "-A", "omniqueue", "purge", "-f", "-Q", cluster.pipe.stages[0].queue],
            env=cluster.env, check=True, capture_output=True, timeout=60,
        )  # fmt: skip
        jobs = InHand(cluster)
        _fill(jobs, waiting[0] + SLOTS)
        yield _row(jobs, seconds)


def _row(jobs: InHand, seconds: float) -> Row:
    """With a worker for the time of the measurement only, so that nothing ends while jobs are made."""
    cluster = jobs.cluster
    [[worker]] = cluster.workers(1)
    jobs.ends(2.0)  # also what ended before the worker was seen ready is made up for
    counts = cluster.store.counts(cluster.pipe.name)
    finished = sum(count for state, count in counts.items() if state in ("succeeded", "cancelled"))
    waits, _ = cluster.store.waiting(cluster.pipe.stages[0].queue)
    cpu = Cpu({"client": [os.getpid()], "worker": [worker.pid], "broker": [floor.pid(cluster.valkey)]})
    times = jobs.ends(seconds)
    cpu_ms = {role: 1000 * cpu_s / len(times) for role, cpu_s in cpu.taken_s().items()}
    submit_ms, overview_ms = _ms(lambda: jobs.more(1)), _ms(lambda: cluster.store.overview(cluster.pipe))
    cluster.workers(0)
    return Row(waits, finished, cpu_ms, rate(times), submit_ms, overview_ms)


def _ms(what: Callable[[], object]) -> float:
    times = []
    for _ in range(_ASKED):
        start = time.perf_counter()
        what()
        times.append(time.perf_counter() - start)
    return 1000 * sorted(times)[_ASKED // 2]


# -- many jobs, made and ended by several processes ---------------------------


def _fill(jobs: InHand, count: int) -> None:
    """Accept so many jobs, whose ends the client of ``jobs`` is told."""
    if count > 0:
        ids = [store.new_id() for _ in range(count)]
        _in_parts(jobs.cluster, _accept, ids, jobs.reply_to)
        jobs.job_ids += ids


def _in_parts(cluster: Cluster, work: Callable[..., None], job_ids: list[str], *more: str) -> None:
    environment = {name: value for name, value in cluster.env.items() if name.startswith("OMNIQUEUE_")}
    parts = [job_ids[k::_FILLERS] for k in range(_FILLERS)]
    with ProcessPoolExecutor(_FILLERS, multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(work, environment, part, *more) for part in parts if part]:
            future.result(timeout=600)


def _accept(environment: dict[str, str], job_ids: list[str], reply_to: str) -> None:
    config = settings.load(environment)
    celery_app.publish_only(config)
    records, pipe = store.Store.from_settings(config, 5.0), catalog.load(config).pipelines[0]
    for job_id in job_ids:
        message = chain.message(pipe, records, store.Owed(job_id, 0), 0)
        records.submit(pipe, deployment.JOB, job_id=job_id, reply_to=reply_to, message=message)


def _cancel(environment: dict[str, str], job_ids: list[str]) -> None:
    records = store.Store.from_settings(settings.load(environment), 5.0)
    for job_id in job_ids:
        records.cancel(job_id)
