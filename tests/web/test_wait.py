"""The reply waiter: no lost wake-up, no wait without an end, nothing left behind."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from omniqueue import calls, errors, functions, store
from omniqueue.calls import Call
from omniqueue.exchange import Exchange
from omniqueue.job import Job, JobState
from omniqueue.pipeline import Pipeline
from tests.process.cluster import eventually
from tests.unit import support
from web import wait


@pytest.fixture
def waiter(records: store.Store) -> Iterator[wait.ReplyWaiter]:
    made = wait.ReplyWaiter(records)
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def pipe() -> Pipeline:
    return support.pipeline(1)


def end(records: store.Store, pipe: Pipeline, job_id: str) -> None:
    records.finish(support.claim(records, pipe, job_id), None, {}, {"kind": "text", "data": []})


def submitted(records: store.Store, pipe: Pipeline, waiter: wait.ReplyWaiter, **facts: object) -> str:
    return support.submit(records, pipe, reply_to=waiter.reply_to, **facts)


def waited(waiter: wait.ReplyWaiter, job_id: str, timeout_s: float = 5.0) -> Job:
    with waiter.expect(job_id) as waiting:
        return waiter.wait(waiting, timeout_s)


def after(seconds: float, call: Callable[[], object]) -> threading.Thread:
    thread = threading.Timer(seconds, call)
    thread.start()
    return thread


def test_an_answer_that_comes_before_the_wait_begins_is_found(
    records: store.Store, waiter: wait.ReplyWaiter, pipe: Pipeline
) -> None:
    job_id = store.new_id()
    with waiter.expect(job_id) as waiting:
        submitted(records, pipe, waiter, job_id=job_id)
        end(records, pipe, job_id)
        time.sleep(0.1)
        assert waiter.wait(waiting, 5.0).state is JobState.SUCCEEDED


def test_a_reply_wakes_at_once(
    records: store.Store, waiter: wait.ReplyWaiter, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "RECHECK_S", 4.0)  # long enough to tell a reply from a look
    delays = []
    for _ in range(5):
        job_id = store.new_id()
        with waiter.expect(job_id) as waiting:
            submitted(records, pipe, waiter, job_id=job_id)
            after(0.05, lambda job_id=job_id: end(records, pipe, job_id)).join()  # type: ignore[misc]
            started = time.monotonic()
            waiter.wait(waiting, 20.0)
            delays.append(time.monotonic() - started)
    assert sorted(delays)[2] < wait.RECHECK_S / 4


def test_a_lost_reply_is_noticed(records: store.Store, waiter: wait.ReplyWaiter, pipe: Pipeline) -> None:
    job_id = support.submit(records, pipe, reply_to="somebody-else")
    after(0.1, lambda: end(records, pipe, job_id))
    started = time.monotonic()
    assert waited(waiter, job_id).state is JobState.SUCCEEDED
    assert time.monotonic() - started < 10 + 4 * wait.RECHECK_S


def test_several_may_wait_for_one_job(records: store.Store, waiter: wait.ReplyWaiter, pipe: Pipeline) -> None:
    job_id = submitted(records, pipe, waiter)
    found: list[Job] = []
    threads = [threading.Thread(target=lambda: found.append(waited(waiter, job_id))) for _ in range(5)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    end(records, pipe, job_id)
    for thread in threads:
        thread.join()
    assert [record.state for record in found] == [JobState.SUCCEEDED] * 5


def test_a_wait_ends_with_its_time(records: store.Store, waiter: wait.ReplyWaiter, pipe: Pipeline) -> None:
    job_id = submitted(records, pipe, waiter)
    started = time.monotonic()
    with pytest.raises(errors.JobExpired, match=job_id):
        waited(waiter, job_id, 0.3)
    assert 0.25 < time.monotonic() - started < 10


def test_a_record_that_cannot_be_read_is_one_waiters_fault_only(
    records: store.Store, waiter: wait.ReplyWaiter, pipe: Pipeline
) -> None:
    bad, good = submitted(records, pipe, waiter), submitted(records, pipe, waiter)
    with waiter.expect(bad) as broken, waiter.expect(good) as whole:
        broken.submitted = whole.submitted = True
        records.client.hset(f"{records.namespace}:job:{bad}", "request", "{")
        for job_id in (bad, good):
            end(records, pipe, job_id) if job_id == good else records.cancel(job_id)
        assert waiter.wait(whole, 5.0).state is JobState.SUCCEEDED
        with pytest.raises(ValueError, match="truncated"):
            waiter.wait(broken, 5.0)


def test_a_vanished_record_ends_the_wait(records: store.Store, waiter: wait.ReplyWaiter, pipe: Pipeline) -> None:
    job_id = submitted(records, pipe, waiter)
    after(0.1, lambda: records.client.delete(f"{records.namespace}:job:{job_id}"))
    with pytest.raises(errors.JobFailed, match="Redis lost the record"):
        waited(waiter, job_id)


def test_a_job_that_is_not_submitted_yet_is_not_lost(
    records: store.Store, waiter: wait.ReplyWaiter, pipe: Pipeline
) -> None:
    job_id = store.new_id()
    with waiter.expect(job_id) as waiting:
        time.sleep(3 * wait.RECHECK_S)
        assert not waiting.woken.is_set()


def test_release_ends_every_wait_now_and_later(records: store.Store, waiter: wait.ReplyWaiter, pipe: Pipeline) -> None:
    job_id = submitted(records, pipe, waiter)
    after(0.1, waiter.release)
    for _ in range(2):
        with pytest.raises(wait.ShuttingDown, match=job_id):
            waited(waiter, job_id)


def test_nothing_is_left_of_those_who_waited(records: store.Store, waiter: wait.ReplyWaiter, pipe: Pipeline) -> None:
    for _ in range(20):
        job_id = store.new_id()
        with waiter.expect(job_id) as waiting:
            submitted(records, pipe, waiter, job_id=job_id)
            end(records, pipe, job_id)
            waiter.wait(waiting, 5.0)
    assert waiter._waiting == {}


def test_a_fault_in_the_thread_does_not_end_it(
    records: store.Store, waiter: wait.ReplyWaiter, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Exchange.replies, []

    async def replies(self: Exchange, wait_s: float) -> list[str]:
        calls.append(wait_s)
        if len(calls) <= 2:
            raise (RuntimeError("odd") if len(calls) == 1 else errors.BrokerUnavailable())
        return await real(self, wait_s)

    monkeypatch.setattr(Exchange, "replies", replies)
    job_id = submitted(records, pipe, waiter)
    after(1.0, lambda: end(records, pipe, job_id))
    assert waited(waiter, job_id).state is JobState.SUCCEEDED
    assert len(calls) > 2


# -- jobs that are left to the thread to be submitted ------------------------------------------------------------------


def asked(waiter: wait.ReplyWaiter, pipe: Pipeline, job_id: str, timeout_s: float = 20.0) -> Job:
    with waiter.expect(job_id) as waiting:
        waiter.submit(waiting, calls.submit(pipe, {"prompt": job_id}, job_id=job_id, reply_to=waiter.reply_to))
        return waiter.wait(waiting, timeout_s)


@contextlib.contextmanager
def ending(records: store.Store, pipe: Pipeline) -> Iterator[None]:
    """End all jobs of a pipeline as they come."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.01):
            for record in records.jobs(pipe.name, 1000):
                if record.state is JobState.QUEUED:
                    end(records, pipe, record.id)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_many_threads_get_their_own_jobs(records: store.Store, waiter: wait.ReplyWaiter, pipe: Pipeline) -> None:
    def client(_: int) -> bool:
        ids = [store.new_id() for _ in range(5)]
        got = [asked(waiter, pipe, job_id) for job_id in ids]
        return [(job.id, job.request["prompt"], job.state) for job in got] == [(i, i, JobState.SUCCEEDED) for i in ids]

    with ending(records, pipe), ThreadPoolExecutor(16) as pool:
        assert all(pool.map(client, range(16)))
    assert records.counts(pipe.name)["accepted"] == 80


def test_a_full_queue_is_told_to_who_waits(records: store.Store, waiter: wait.ReplyWaiter) -> None:
    pipe = support.pipeline(1, max_queue=1)
    first = support.submit(records, pipe)
    started = time.monotonic()
    with pytest.raises(errors.QueueFull, match="1 jobs"):
        asked(waiter, pipe, store.new_id())
    assert time.monotonic() - started < 10
    assert [job.id for job in records.jobs(pipe.name, 10)] == [first]


def test_without_the_thread_a_job_is_submitted_by_who_waits(records: store.Store, pipe: Pipeline) -> None:
    waiter = wait.ReplyWaiter(records)
    with pytest.raises(errors.JobExpired):  # nobody wakes it
        asked(waiter, pipe, job_id := store.new_id(), 0.2)
    assert [job.id for job in records.jobs(pipe.name, 10)] == [job_id]


@pytest.mark.parametrize("lost", ["function", "connections"])
def test_what_redis_loses_costs_no_job(
    records: store.Store, waiter: wait.ReplyWaiter, pipe: Pipeline, lost: str
) -> None:
    with ending(records, pipe):
        assert asked(waiter, pipe, store.new_id()).state is JobState.SUCCEEDED
        if lost == "function":
            records.client.function_delete(functions.name())
        else:
            records.client.client_kill_filter(_type="normal", skipme=True)
        assert asked(waiter, pipe, store.new_id()).state is JobState.SUCCEEDED


def test_a_call_that_cannot_be_sent_is_one_waiters_fault_only(
    records: store.Store, waiter: wait.ReplyWaiter, pipe: Pipeline
) -> None:
    bad: Call[store.Submission] = Call("submit", (object(),), lambda answer: store.Submission("", False))
    good = store.new_id()
    with ending(records, pipe), waiter.expect("bad") as broken, waiter.expect(good) as whole:
        waiter.submit(broken, bad)
        waiter.submit(whole, calls.submit(pipe, {}, job_id=good, reply_to=waiter.reply_to))
        assert waiter.wait(whole, 20.0).state is JobState.SUCCEEDED
        with pytest.raises(Exception, match="must be str"):
            waiter.wait(broken, 20.0)
        assert asked(waiter, pipe, store.new_id()).state is JobState.SUCCEEDED


@pytest.mark.parametrize(("released", "error"), [(False, errors.BrokerUnavailable), (True, errors.NotReady)])
def test_before_redis_has_answered_nobody_is_taken_to_have_a_job(
    records: store.Store, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, released: bool, error: type[Exception]
) -> None:
    class Mute(Exchange):
        def send(self, call: Call[object], hear: object) -> None:
            """Redis does not answer."""

    monkeypatch.setattr(wait, "Exchange", Mute)
    monkeypatch.setattr(store.Store, "timeout_s", 1.0)
    waiter = wait.ReplyWaiter(records)
    waiter.start()
    eventually(lambda: waiter._exchange is not None)
    try:
        with waiter.expect("j") as waiting:
            waiter.submit(waiting, calls.submit(pipe, {}, job_id="j"))
            if released:
                waiter.release()
            with pytest.raises(error) as told:
                waiter.wait(waiting, 20.0, left=lambda: True)
            assert not isinstance(told.value, wait.ShuttingDown)
    finally:
        waiter.stop()
