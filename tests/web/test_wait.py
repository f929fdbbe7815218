"""The reply waiter: no lost wake-up, no wait without an end, nothing left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from omniqueue import errors, store
from omniqueue.exchange import Exchange
from omniqueue.job import Job, JobState
from omniqueue.pipeline import Pipeline
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
