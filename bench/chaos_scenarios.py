"""The scenarios of :mod:`bench.chaos`: what is done to the processes while clients wait, and what must hold."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

from omniqueue import errors
from tests.process.cluster import Cluster, Process, config, eventually, running
from tests.process.load import Load, WebLoad

CLIENTS = 16
#: The default of stage configs; a worker's death may cost a request this and a little.
LEASE_S = 5.0
TIMEOUT_S = 60.0
#: Longer than the broker's socket time-out (30 s), in steps.
LONG_STEPS, LONG_STEP_S = 70, 0.5


@dataclass
class Row:
    """One scenario's outcome and what was missed."""

    scenario: str
    stages: int
    requests: int = 0
    ok: int = 0
    failed: int = 0
    lost: int = 0
    twice: int = 0
    slowest_s: float = 0.0
    leftovers: int = 0
    notes: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def require(self, holds: bool, otherwise: str) -> None:
        """Note a missed target."""
        if not holds:
            self.missed.append(otherwise)

    def add(self, load: Load, slowest_s: float) -> None:
        """Count a load's requests; each must have succeeded, once, within ``slowest_s``."""
        states = load.states()
        self.requests += len(load.outcomes)
        self.ok += states["succeeded"]
        self.lost += states["lost"]
        self.failed += len(load.outcomes) - states["succeeded"] - states["lost"]
        self.twice += load.answered_twice()
        self.slowest_s = max(self.slowest_s, load.slowest_s())
        self.require(self.failed == 0, f"failed: {load.not_succeeded()[:3]}")
        self.require(self.lost == 0, "lost requests")
        self.require(self.twice == 0, "answered twice")
        self.require(self.slowest_s < slowest_s, f"the slowest took {self.slowest_s:.1f} s, not {slowest_s:.0f}")


@dataclass
class Bench:
    """A deployment of so many stages, and how long each scenario takes."""

    cluster: Cluster
    stages: int
    seconds: float
    jobs: int
    dice: random.Random = field(default_factory=lambda: random.Random(20))

    def whole(self, replicas: int = 1) -> list[list[Process]]:
        """So many live workers of every stage."""
        return self.cluster.workers(*[replicas] * self.stages)

    @contextmanager
    def load(self, row: Row, within_s: float) -> Iterator[Load]:
        """Clients for the block, which at least ``seconds`` pass in; their requests are counted in ``row``."""
        start = time.monotonic()
        with Load(self.cluster, CLIENTS, TIMEOUT_S) as load:
            yield load
            time.sleep(max(0.0, self.seconds - (time.monotonic() - start)))
        row.add(load, within_s)

    def pids(self) -> set[int]:
        """Router and workers alive now, the router's own children included."""
        alive = [process.pid for process in self.cluster.processes if process.alive()]
        return {*alive, *(child.pid for pid in alive for child in psutil.Process(pid).children())}


def quiet(bench: Bench, row: Row) -> None:
    """Nothing happens."""
    bench.whole()
    with bench.load(row, LEASE_S):
        pass
    row.notes.append(f"{row.requests / bench.seconds:.0f} requests/s")


def kill_one_of_two(bench: Bench, row: Row) -> None:
    """SIGKILL of one of two replicas, ten times in a row."""
    replicas = bench.whole(2)
    with bench.load(row, LEASE_S + 3.0) as load:
        for _ in range(10):
            load.wait_for(CLIENTS)
            stage_id = bench.dice.randrange(bench.stages)
            replicas[stage_id].pop(bench.dice.randrange(2)).kill()
            time.sleep(bench.dice.uniform(0.0, bench.seconds / 15))
            replicas[stage_id].append(bench.cluster.worker(stage_id))


def kill_the_only_one(bench: Bench, row: Row) -> None:
    """SIGKILL of the last stage's only replica, back after 4 s; no earlier stage runs again."""
    last = bench.whole()[-1][0]
    with bench.load(row, LEASE_S + 3.0 + 4.0) as load:
        load.wait_for(CLIENTS)
        last.kill()
        time.sleep(4.0)
        bench.cluster.worker(bench.stages - 1)
    for stage_id in range(bench.stages - 1):
        row.require(set(load.attempts(stage_id)) <= {1}, f"stage {stage_id} ran again: {load.attempts(stage_id)}")


def freeze_one_of_two(bench: Bench, row: Row) -> None:
    """SIGSTOP of one of two replicas for 20 s: the other keeps its pace, the woken one changes nothing."""
    frozen, other = bench.cluster.workers(*[1] * (bench.stages - 1), 2)[-1]
    frozen_s = min(20.0, bench.seconds)
    with bench.load(row, LEASE_S + 3.0) as load:
        start = time.time()
        time.sleep(max(3.0, bench.seconds / 6))
        frozen.signal(signal.SIGSTOP)
        stopped = time.time()
        time.sleep(frozen_s)
        frozen.signal(signal.SIGCONT)
        woken = time.time()
        time.sleep(3.0)
    ended = [one.job.stages[-1] for one in load.outcomes if one.job]
    mine = [stage.ended_at or 0.0 for stage in ended if f".{other.pid}." in (stage.worker or "")]
    before = sum(start < at < stopped for at in mine) / (stopped - start)
    during = sum(stopped < at < woken for at in mine) / (woken - stopped)
    row.notes.append(f"the other did {before:.0f}/s before, {during:.0f}/s meanwhile")
    row.require(during > 0.8 * before, row.notes[-1])
    row.require(frozen.alive(), "the frozen worker ended")
    kept = {one.job_id: one.job for one in load.outcomes}
    changed = [job_id for job_id, job in kept.items() if bench.cluster.store.job(job_id) != job]
    row.require(not changed, f"{len(changed)} records changed afterwards")


def kill_the_router(bench: Bench, row: Row) -> None:
    """SIGKILL of the router, master and worker, with 16 in flight, three times; clients repeat under the same key."""
    bench.whole()
    accepted = bench.cluster.store.counts(bench.cluster.pipe.name).get("accepted", 0)
    start = time.monotonic()
    load = WebLoad(bench.cluster, CLIENTS, TIMEOUT_S)
    with load:
        for _ in range(3):
            load.wait_for(CLIENTS * 4)
            router = next(p for p in bench.cluster.processes if p.name == "router" and p.alive())
            os.killpg(router.pid, signal.SIGKILL)
            router.kill()
            bench.cluster.router()
        time.sleep(max(0.0, bench.seconds - (time.monotonic() - start)))
    row.add(load, LEASE_S + 3.0)
    made = bench.cluster.store.counts(bench.cluster.pipe.name)["accepted"] - accepted
    row.require(made == len(load.outcomes), f"{made} jobs for {len(load.outcomes)} requests")
    row.notes.append(f"{load.repeated[0]} connections broke")


def restart_redis(bench: Bench, row: Row) -> None:
    """Redis (append-only) restarted twice within 3 s; no worker and no router is restarted."""
    bench.whole()
    before = bench.pids()
    with bench.load(row, LEASE_S + 3.0) as load:
        load.wait_for(CLIENTS)
        for _ in range(2):
            bench.cluster.valkey.stop()
            time.sleep(0.4)
            bench.cluster.valkey.start()
            time.sleep(0.6)
        load.wait_for(CLIENTS * 4)
    row.notes.append(f"{load.refused} refused meanwhile and repeated")
    row.require(bench.pids() == before, "a process was restarted")


def replace_every_worker(bench: Bench, row: Row) -> None:
    """Rolling SIGTERM of every worker; each exits with 0."""
    replicas = bench.whole(2)
    with bench.load(row, LEASE_S) as load:
        for stage_id, group in enumerate(replicas):
            for old in group:
                bench.cluster.worker(stage_id)
                status = old.terminate(60.0)
                row.require(status == 0, f"a worker exited with {status}")
                load.wait_for(CLIENTS)


def poison(bench: Bench, row: Row) -> None:
    """A prompt that kills the last stage's worker fails after three attempts; its neighbours complete."""
    (worker,) = bench.whole()[-1]
    last = bench.stages - 1
    with bench.load(row, 4 * (LEASE_S + 3.0)) as load:
        load.wait_for(CLIENTS)
        job = bench.cluster.submit("EXIT")
        for _ in range(3):
            row.require(worker.wait(30.0) == 9, "the worker did not die of it")
            worker = bench.cluster.worker(last)
    record = bench.cluster.ended(job)
    error = record.error or {}
    row.require(record.state.value == "failed" and error.get("attempts") == 3, f"the prompt: {record.state} {error}")
    row.notes.append(f"the prompt: {error.get('attempts')} attempts, {error.get('message')}")


def cancel_a_hundred(bench: Bench, row: Row) -> None:
    """100 cancels at random moments: each job ends once, and the capacity is whole afterwards."""
    bench.whole()
    moments = [bench.dice.uniform(0.0, 0.15 * bench.stages) for _ in range(100)]

    def one(after_s: float) -> tuple[str, float]:
        job = bench.cluster.submit("cancel", timeout_s=TIMEOUT_S)
        time.sleep(after_s)
        at = time.time()
        bench.cluster.store.cancel(job)
        return job, at

    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = list(pool.map(one, moments))
    records = bench.cluster.all_ended([job for job, _ in asked])
    states = Counter(record.state.value for record in records)
    row.requests, row.ok = len(records), states["succeeded"] + states["cancelled"]
    row.failed = row.requests - row.ok
    ends = [(record.finished_at or 0) - at for record, (_, at) in zip(records, asked, strict=True)]
    row.slowest_s = max(ends)
    row.require(row.failed == 0, f"{states}")
    row.require(all((r.result is None) == (r.state.value == "cancelled") for r in records), "cancelled with a result")
    row.require(row.slowest_s < 1.0, f"a cancel took {row.slowest_s:.2f} s")
    eventually(lambda: {worker["running"] for worker in bench.cluster.store.workers()} == {0}, 5.0)
    row.notes.append(f"{states['cancelled']} cancelled, {states['succeeded']} had succeeded")


def burst(bench: Bench, row: Row) -> None:
    """60 requests at once where 20 are accepted: exactly 40 are refused, and afterwards all of 20 again."""
    stages = config(*[{} for _ in range(bench.stages)], lease_s=LEASE_S, max_queue=20)
    with running(stages) as small:
        workers = small.workers(*[1] * bench.stages)
        for _ in range(2):
            workers[0][0].signal(signal.SIGSTOP)
            with ThreadPoolExecutor(60) as pool:
                jobs = list(pool.map(lambda _: _accepted(small), range(60)))
            workers[0][0].signal(signal.SIGCONT)
            records = small.all_ended([job for job in jobs if job])
            row.requests += 60
            row.ok += sum(record.state.value == "succeeded" for record in records)
            row.require(len(records) == 20, f"{len(records)} accepted, not 20")
    row.require(row.ok == 40, f"{row.ok} of 40 succeeded")
    row.notes.append(f"{row.requests - row.ok} refused")


def _accepted(cluster: Cluster) -> str | None:
    try:
        return cluster.submit("burst")
    except errors.QueueFull:
        return None


def long_task(bench: Bench, row: Row) -> None:
    """A task longer than any time-out of the broker has one result and ran once."""
    slow = {"delay_s": LONG_STEP_S, "steps": LONG_STEPS}
    stages = config(slow, *[{} for _ in range(bench.stages - 1)], lease_s=LEASE_S, request_timeout_s=120)
    with running(stages) as other:
        other.workers(2, *[1] * (bench.stages - 1))
        jobs = [other.submit("long") for _ in range(4)]
        records = other.all_ended(jobs, 120.0)
    row.requests, row.ok = len(records), sum(record.state.value == "succeeded" for record in records)
    row.slowest_s = max((record.finished_at or 0) - record.created_at for record in records)
    row.require(row.ok == row.requests, f"{[record.error for record in records]}")
    row.require({stage.attempt for record in records for stage in record.stages} == {1}, "it ran more than once")


def flat(bench: Bench, row: Row) -> None:
    """Memory and descriptors of router and workers over thousands of requests through the router."""
    bench.whole()

    def some(count: int) -> dict[int, tuple[int, int]]:
        with WebLoad(bench.cluster, CLIENTS, TIMEOUT_S) as load:
            load.wait_for(count, 60.0 + count / 5)
        row.add(load, LEASE_S)
        found = [psutil.Process(pid) for pid in sorted(bench.pids())]
        return {process.pid: (process.memory_info().rss, process.num_fds()) for process in found}

    before = some(max(500, bench.jobs // 10))
    after = some(bench.jobs)
    row.require(before.keys() == after.keys(), "a process was restarted")
    grown = [(after[pid][0] - before[pid][0]) / 1e6 for pid in before.keys() & after.keys()]
    opened = [after[pid][1] - before[pid][1] for pid in before.keys() & after.keys()]
    row.notes.append(f"at most {max(grown):.1f} MB and {max(opened)} descriptors more")
    row.require(max(grown) < 16.0 and max(opened) <= 4, row.notes[-1])


SCENARIOS: dict[str, Callable[[Bench, Row], None]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        quiet,
        kill_one_of_two,
        kill_the_only_one,
        freeze_one_of_two,
        kill_the_router,
        restart_redis,
        replace_every_worker,
        poison,
        cancel_a_hundred,
        burst,
        long_task,
        flat,
    )
}
