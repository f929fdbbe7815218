"""A worker's pulse: its announcement, its leases, what it is told to stop, and when it leaves."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omniqueue import errors, media, room
from omniqueue.engines.fake import FakeEngine
from omniqueue.payloads import PayloadStore
from omniqueue.pipeline import Pipeline
from omniqueue.store import Store
from tests.unit import support
from workers import pulse as pulse_module
from workers.host import StageHost
from workers.pulse import Pulse

pytestmark = pytest.mark.usefixtures("broker")


class Left(BaseException):
    """What os._exit would have done."""


@pytest.fixture
def pipe() -> Pipeline:
    return support.pipeline(1, lease_s=30.0, engine_args={"hang_on": "hang"})


@pytest.fixture
def host(records: Store, shm: PayloadStore, tmp_path: Path, pipe: Pipeline) -> Iterator[StageHost]:
    engine = FakeEngine()
    engine.start(pipe, pipe.stages[0], "", lambda phase: None)
    place = media.MediaStore(f"file://{tmp_path}")
    made = StageHost(pipe, pipe.stages[0], engine, records, shm, place, "me")
    yield made
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), made.loop).result(30)  # what was asked of the loop is answered
    made.close()


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Statuses with which the process would have exited; the caller is stopped there."""
    statuses: list[int] = []

    def leave(status: int) -> None:
        statuses.append(status)
        raise Left

    monkeypatch.setattr(pulse_module.os, "_exit", leave)  # type: ignore[attr-defined]
    return statuses


def until(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0.005)


def hold(host: StageHost, records: Store, pipe: Pipeline) -> tuple[str, threading.Thread]:
    """A job that hangs in the engine."""
    job_id = records.submit(pipe, {"prompt": "hang"}).job_id
    claim = support.claim(records, pipe, job_id, worker="me")

    def run() -> None:
        try:
            host.call(host.run(claim)).result()
        except errors.OmniqueueError as error:
            host.call(host.outcomes.give_up(claim, error, retry=False, counted=False)).result()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until(lambda: host.held() and host._running[(job_id, 0, 1)].task)
    return job_id, thread


def test_the_announcement_says_who_this_is_and_what_it_does(host: StageHost, records: Store, pipe: Pipeline) -> None:
    pulse = Pulse(host)
    pulse.report("loading weights")
    pulse._beat_once()
    (facts,) = records.workers()
    assert (facts["phase"], facts["detail"]) == ("loading", "loading weights")
    pulse.ready()
    (facts,) = records.workers()
    assert facts == {
        "worker": "me",
        "pipeline": pipe.name,
        "fingerprint": pipe.fingerprint,
        "stage_id": 0,
        "queue": pipe.stages[0].queue,
        "host": "here",
        "pid": os.getpid(),
        "started_at": facts["started_at"],
        "phase": "ready",
        "detail": "",
        "concurrency": 8,
        "running": 0,
        "told_at": facts["told_at"],
        "shm": facts["shm"],
    }
    assert abs(facts["told_at"] - time.time()) < 10
    assert facts["shm"]["id"] == room.identity(host.payloads.directory)
    assert facts["shm"]["size"] >= facts["shm"]["free"] > 0
    pulse.draining()
    assert pulse.facts()["phase"] == "draining"


def test_a_refusal_is_announced_and_then_it_is_silent(host: StageHost, records: Store) -> None:
    pulse = Pulse(host)
    pulse.refused("another topology")
    (facts,) = records.workers()
    assert (facts["phase"], facts["detail"]) == ("refused", "another topology")
    assert pulse._stop.is_set()


def test_it_beats_while_it_runs_and_takes_the_announcement_back(host: StageHost, records: Store) -> None:
    pulse = Pulse(host)
    pulse.start()
    until(records.workers)
    pulse.stop()
    assert records.workers() == []
    assert "pulse" not in {thread.name for thread in threading.enumerate()}
    until(lambda: "control" not in {thread.name for thread in threading.enumerate()})


def test_a_beat_prolongs_the_leases_of_what_is_in_hand(host: StageHost, records: Store, pipe: Pipeline) -> None:
    job_id, thread = hold(host, records, pipe)
    support.lapse(records, pipe, job_id, 0)
    Pulse(host)._beat_once()
    assert records.reap(pipe.name) == []
    host.stop((job_id, 0, 1), errors.Stopped())
    thread.join()


def test_a_beat_stops_what_was_given_to_another(host: StageHost, records: Store, pipe: Pipeline) -> None:
    job_id, thread = hold(host, records, pipe)
    support.lapse(records, pipe, job_id, 0)
    support.claim(records, pipe, job_id, worker="other")
    Pulse(host)._beat_once()
    thread.join()
    record = records.job(job_id)
    assert record is not None
    assert (record.stages[0].state, record.stages[0].attempt) == ("running", 2)


def test_a_cancel_is_heard_without_waiting_for_a_beat(
    host: StageHost, records: Store, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse_module, "INTERVAL_S", 3600.0)
    host.pipe = dataclasses.replace(pipe, lease_s=4 * 3600.0)
    pulse = Pulse(host)
    pulse.start()
    job_id, thread = hold(host, records, pipe)
    records.cancel(job_id)
    thread.join()
    record = records.job(job_id)
    assert record is not None
    assert record.state.value == "cancelled"
    pulse.stop()


@pytest.mark.parametrize("error", [errors.BrokerUnavailable(), ZeroDivisionError("a fault")])
def test_neither_an_absence_of_redis_nor_a_fault_ends_it(
    host: StageHost, records: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(pulse_module, "INTERVAL_S", 0.001)
    beat, faults = records.beat, [error] * 3

    def faulty(worker: str, facts: Any) -> None:
        if faults:
            raise faults.pop()
        beat(worker, facts)

    monkeypatch.setattr(records, "beat", faulty)
    pulse = Pulse(host)
    pulse.start()
    until(records.workers)
    assert faults == []
    pulse.stop()


def test_a_dead_engine_makes_it_leave_and_give_back_what_it_holds(
    host: StageHost, records: Store, pipe: Pipeline, left: list[int]
) -> None:
    job_id, thread = hold(host, records, pipe)
    pulse = Pulse(host)
    pulse.ready()
    pulse._check_engine()
    assert left == []
    host.dead.set()
    with pytest.raises(Left):
        pulse._check_engine()
    assert left == [pulse_module.EXIT_ENGINE]
    record = records.job(job_id)
    assert record is not None
    assert (record.stages[0].state, record.stages[0].failures) == ("queued", 1)
    host.stop((job_id, 0, 1), errors.Stopped())
    thread.join()


def test_an_engine_that_holds_work_and_does_not_move_makes_it_leave(
    host: StageHost, records: Store, pipe: Pipeline, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pulse = Pulse(host)
    pulse.ready()
    host.pipe = dataclasses.replace(pipe, hang_timeout_s=5.0)
    job_id, thread = hold(host, records, pipe)
    pulse._check_engine()
    until(lambda: pulse._health is None or pulse._health.done())
    host._running[(job_id, 0, 1)].moved_at += 1.0
    pulse._clock._awake_s += 6.0
    pulse._check_engine()  # it moved
    assert left == []
    until(lambda: pulse._health is None or pulse._health.done())
    pulse._clock._awake_s += 6.0
    with pytest.raises(Left):
        pulse._check_engine()
    assert left == [pulse_module.EXIT_ENGINE]
    host.stop((job_id, 0, 1), errors.Stopped())
    thread.join()


def test_a_worker_that_was_stopped_for_long_is_not_taken_for_a_hung_one(
    host: StageHost, records: Store, pipe: Pipeline, left: list[int]
) -> None:
    host.pipe = dataclasses.replace(pipe, hang_timeout_s=5.0)
    pulse = Pulse(host)
    pulse.ready()
    job_id, thread = hold(host, records, pipe)
    free = threading.Event()
    host.loop.call_soon_threadsafe(free.wait)  # no answer from the engine on waking either
    pulse._check_engine()
    pulse._clock._read_at -= 3600.0
    pulse._check_engine()
    assert left == []
    free.set()
    host.stop((job_id, 0, 1), errors.Stopped())
    thread.join()


def test_an_idle_engine_is_never_hung(host: StageHost, pipe: Pipeline, left: list[int]) -> None:
    host.pipe = dataclasses.replace(pipe, hang_timeout_s=1e-9)
    pulse = Pulse(host)
    pulse._phase = "loading"
    pulse._check_engine()
    pulse.ready()
    pulse._check_engine()
    until(lambda: pulse._health is None or pulse._health.done())
    pulse._check_engine()
    assert left == []


def test_an_engine_that_says_it_is_dead_makes_it_leave(host: StageHost, left: list[int]) -> None:
    async def check_health() -> None:
        raise errors.EngineDead("out of memory")

    host.engine.check_health = check_health  # type: ignore[method-assign]
    pulse = Pulse(host)
    pulse.ready()
    with pytest.raises(Left):
        until(pulse._check_engine)
    assert left == [pulse_module.EXIT_ENGINE]


def test_an_engine_that_blocks_its_loop_loses_no_lease_until_it_counts_as_hung(
    host: StageHost, records: Store, pipe: Pipeline, left: list[int]
) -> None:
    pulse = Pulse(host)
    pulse.ready()
    job_id, thread = hold(host, records, pipe)
    free = threading.Event()
    host.loop.call_soon_threadsafe(free.wait)
    for _ in range(3):
        support.lapse(records, pipe, job_id, 0)
        pulse._beat_once()
        pulse._check_engine()
        assert records.reap(pipe.name) == []
    assert left == []
    pulse._asked_at -= pipe.hang_timeout_s + 1
    with pytest.raises(Left):
        pulse._check_engine()
    free.set()
    host.stop((job_id, 0, 1), errors.Stopped())
    thread.join()


def test_a_load_that_takes_too_long_leaves_and_names_the_phase(
    host: StageHost, left: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    pulse = Pulse(host)
    pulse.report("loading weights")
    with pytest.raises(Left):
        pulse.load_took_too_long()
    assert left == [pulse_module.EXIT_ENGINE]
    assert "phase=loading weights" in caplog.records[-1].message


def test_a_health_check_of_a_closed_host_is_nobodys_fault(host: StageHost, left: list[int]) -> None:
    pulse = Pulse(host)
    pulse.ready()
    pulse._health = asyncio.run_coroutine_threadsafe(asyncio.sleep(60), host.loop)  # type: ignore[assignment]
    pulse._health.cancel()
    pulse._check_engine()
    assert left == []


def test_each_beat_touches_the_file_that_health_checks_look_at_also_while_redis_is_away(
    host: StageHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pulse"
    monkeypatch.setattr(host.store, "beat", support.raising(errors.BrokerUnavailable()))
    pulse = Pulse(host, str(file))
    pulse.start()
    try:
        until(file.exists)
        os.utime(file, (0, 0))
        until(lambda: file.stat().st_mtime > 0)
    finally:
        pulse.stop()


def test_a_file_that_cannot_be_touched_does_not_stop_the_pulse(host: StageHost, tmp_path: Path) -> None:
    Pulse(host, str(tmp_path / "none" / "pulse"))._touch()
