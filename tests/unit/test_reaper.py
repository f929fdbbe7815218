"""One pass of the reaper, with real records, a real broker and real files."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from omniqueue import chain, errors, media, reaper
from omniqueue.catalog import Catalog
from omniqueue.job import JobState
from omniqueue.payloads import PayloadStore
from omniqueue.pipeline import Pipeline
from omniqueue.reaper import Reaper
from omniqueue.store import Owed, Store
from tests.unit import support
from tests.unit.support import claim, submit
from tests.unit.test_chain import messages

pytestmark = pytest.mark.usefixtures("broker")


@pytest.fixture
def pipe() -> Pipeline:
    return support.pipeline(2, max_attempts=2)


@pytest.fixture
def place(tmp_path: Path) -> media.MediaStore:
    return media.MediaStore(f"file://{tmp_path}")


@pytest.fixture
def one(records: Store, pipe: Pipeline, shm: PayloadStore, place: media.MediaStore) -> Reaper:
    return Reaper(records, Catalog((pipe,)), shm, place)


def jobs_in(records: Store, queue: str) -> list[str]:
    """The jobs of a queue's messages, taken out of it."""
    return [message["headers"]["argsrepr"] for message in messages(records, queue)]


def test_a_job_whose_message_was_lost_is_enqueued_again(one: Reaper, records: Store, pipe: Pipeline) -> None:
    queue = pipe.stages[0].queue
    job_id = submit(records, pipe)
    assert chain.publish(pipe, Owed(job_id, 0))
    assert jobs_in(records, queue) == [f"({job_id}, 0)"]  # taken by a worker that died before it could claim
    support.earlier(records, pipe, job_id, 0, 10)
    one.once()
    one.once()
    assert jobs_in(records, queue) == [f"({job_id}, 0)"]


def test_a_message_that_is_still_there_is_not_doubled_however_long_it_waits(
    one: Reaper, records: Store, pipe: Pipeline
) -> None:
    ids = [submit(records, pipe) for _ in range(3)]
    for job_id in ids:
        chain.publish(pipe, Owed(job_id, 0))
        support.earlier(records, pipe, job_id, 0, 500 - ids.index(job_id))
    for _ in range(3):
        one.once()
    assert jobs_in(records, pipe.stages[0].queue) == [f"({job_id}, 0)" for job_id in ids]


def test_one_lost_message_among_others_is_found(one: Reaper, records: Store, pipe: Pipeline) -> None:
    ids = [submit(records, pipe) for _ in range(3)]
    for age_s, job_id in zip((300, 200, 100), ids, strict=True):
        if job_id != ids[0]:
            chain.publish(pipe, Owed(job_id, 0))
        support.earlier(records, pipe, job_id, 0, age_s)
    one.once()
    assert sorted(jobs_in(records, pipe.stages[0].queue)) == sorted(f"({job_id}, 0)" for job_id in ids)


def test_a_later_stage_is_enqueued_in_its_own_queue_and_with_its_priority(
    one: Reaper, records: Store, pipe: Pipeline
) -> None:
    job_id = records.submit(pipe, {}, priority=6).job_id
    records.finish(claim(records, pipe, job_id), None, {})
    support.earlier(records, pipe, job_id, 1, 10)
    one.once()
    assert jobs_in(records, pipe.stages[0].queue) == []
    lists = chain.broker_lists(pipe.stages[1].queue)
    assert [records.client.llen(name) for name in lists] == [0, 0, 0, 0, 0, 0, 1, 0, 0, 0]
    assert jobs_in(records, pipe.stages[1].queue) == [f"({job_id}, 1)"]


def test_a_stage_whose_worker_is_gone_is_enqueued_again_and_at_last_fails(
    one: Reaper, records: Store, pipe: Pipeline
) -> None:
    job_id = submit(records, pipe)
    claim(records, pipe, job_id)
    support.lapse(records, pipe, job_id, 0)
    one.once()
    assert jobs_in(records, pipe.stages[0].queue) == [f"({job_id}, 0)"]
    claim(records, pipe, job_id)
    support.lapse(records, pipe, job_id, 0)
    one.once()
    assert jobs_in(records, pipe.stages[0].queue) == []
    record = records.job(job_id)
    assert record is not None
    assert record.state is JobState.FAILED


def test_a_job_past_its_deadline_ends(one: Reaper, records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe)
    support.overdue(records, pipe, job_id)
    one.once()
    record = records.job(job_id)
    assert record is not None
    assert record.state is JobState.EXPIRED


def test_a_foreign_message_in_the_queue_does_not_stop_the_reaper(one: Reaper, records: Store, pipe: Pipeline) -> None:
    queue = pipe.stages[0].queue
    records.client.lpush(chain.broker_lists(queue)[0], "not even json")
    job_id = submit(records, pipe)
    support.earlier(records, pipe, job_id, 0, 500)
    one.once()
    records.client.rpop(chain.broker_lists(queue)[0])
    assert jobs_in(records, queue) == [f"({job_id}, 0)"]


def test_a_broker_that_is_no_redis_is_given_more_time(
    one: Reaper, records: Store, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = submit(records, pipe), submit(records, pipe)
    support.earlier(records, pipe, short, 0, 10)
    support.earlier(records, pipe, long, 0, 500)
    with monkeypatch.context() as other:
        other.setattr(chain, "broker_is_redis", lambda: False)
        one.once()
    assert jobs_in(records, pipe.stages[0].queue) == [f"({long}, 0)"]


def test_only_one_of_two_reapers_does_the_work(records: Store, pipe: Pipeline, shm: PayloadStore) -> None:
    first, second = (Reaper(records, Catalog((pipe,)), shm) for _ in range(2))
    second._me += "-second"
    job_id = submit(records, pipe)
    support.earlier(records, pipe, job_id, 0, 10)
    first.once()
    support.earlier(records, pipe, job_id, 0, 10)
    second.once()
    assert jobs_in(records, pipe.stages[0].queue) == [f"({job_id}, 0)"]


def test_payloads_of_jobs_that_are_over_or_unknown_are_swept(
    one: Reaper, records: Store, pipe: Pipeline, shm: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, over = submit(records, pipe), submit(records, pipe)
    records.cancel(over)
    names = [shm.put(shm.name(job_id, 0, 1), []).name for job_id in (live, over, "f" * 32)]
    sweep = shm.sweep
    monkeypatch.setattr(shm, "sweep", lambda is_live: sweep(is_live, min_age_s=0))
    one.once()
    assert shm.names() == names[:1]


def test_outdated_results_go_with_their_files_and_their_records(
    records: Store, shm: PayloadStore, place: media.MediaStore
) -> None:
    pipe = support.pipeline(1, result_ttl_s=0.001)
    ids = [submit(records, pipe) for _ in range(3)]
    for job_id in ids:
        name = media.file_name(job_id, 1, 0, "png")
        place.write(name, b"x")
        records.finish(claim(records, pipe, job_id), None, {}, {"data": [{"file": name}]})
    while len(records.outdated()) < 3:
        time.sleep(0.005)
    Reaper(records, Catalog((pipe,)), shm, place).once()
    assert [records.job(job_id) for job_id in ids] == [None] * 3
    for job_id in ids:
        with pytest.raises(errors.NotFound):
            place.read(media.file_name(job_id, 1, 0, "png"))


def test_one_pass_forgets_more_than_redis_is_asked_for_at_once(
    records: Store, shm: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "FORGET_S", 60.0)
    pipe = support.pipeline(1, result_ttl_s=0.001)
    for _ in range(250):
        records.cancel(submit(records, pipe))
    while len(records.outdated(1000)) < 250:
        time.sleep(0.005)
    Reaper(records, Catalog((pipe,)), shm).once()
    assert records.outdated() == []


def test_a_file_that_cannot_be_removed_does_not_stop_the_rest(
    records: Store, shm: PayloadStore, place: media.MediaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = support.pipeline(1, result_ttl_s=0.001)
    ids = [submit(records, pipe) for _ in range(2)]
    for job_id in ids:
        result = {"data": [{"file": media.file_name(job_id, 1, 0, "png")}]}
        records.finish(claim(records, pipe, job_id), None, {}, result)
    while len(records.outdated()) < 2:
        time.sleep(0.005)
    monkeypatch.setattr(place.fs, "rm", support.raising(PermissionError("no")))
    Reaper(records, Catalog((pipe,)), shm, place).once()
    assert [records.job(job_id) for job_id in ids] == [None, None]


def test_files_go_before_the_record_that_names_them(
    records: Store, shm: PayloadStore, place: media.MediaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = support.pipeline(1, result_ttl_s=0.001)
    job_id = submit(records, pipe)
    name = media.file_name(job_id, 1, 0, "png")
    place.write(name, b"x")
    records.finish(claim(records, pipe, job_id), None, {}, {"data": [{"file": name}]})
    while not records.outdated():
        time.sleep(0.005)
    monkeypatch.setattr(records, "delete", support.raising(errors.BrokerUnavailable()))
    with pytest.raises(errors.BrokerUnavailable):
        Reaper(records, Catalog((pipe,)), shm, place).once()
    monkeypatch.undo()
    with pytest.raises(errors.NotFound):
        place.read(name)
    assert records.outdated() == [job_id]  # so that the next pass finishes it


def test_the_thread_goes_on_after_a_pass_that_failed_and_ends_when_asked(
    one: Reaper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reaper, "INTERVAL_S", 0.001)
    passed, faults = threading.Event(), [ZeroDivisionError("a fault"), errors.BrokerUnavailable()]

    def once() -> None:
        if faults:
            raise faults.pop(0)
        passed.set()

    monkeypatch.setattr(one, "once", once)
    with caplog.at_level(logging.ERROR):
        one.start()
        assert passed.wait(30)
        one.stop()
    assert not one._thread.is_alive()
    assert [record.message for record in caplog.records] == ["action=reaper_failed"]


def test_after_redis_was_away_a_lapse_is_nobodys_fault_for_a_lease_long(
    one: Reaper, records: Store, pipe: Pipeline
) -> None:
    job_id = submit(records, pipe)
    claim(records, pipe, job_id)
    client, ended = records.client, time.time() - 1  # a moment ago: within the lease of 5 s
    client.hset(f"{records.namespace}:job:{job_id}", "0:lease", f"{ended:.6f}")
    client.zadd(f"{records.namespace}:leases:{pipe.name}", {f"{job_id}:0": ended})
    one._away_at = time.monotonic()
    one.once()
    assert jobs_in(records, pipe.stages[0].queue) == []
    one._away_at = float("-inf")
    one.once()
    assert jobs_in(records, pipe.stages[0].queue) == [f"({job_id}, 0)"]


def test_each_pass_gives_back_memory_that_is_kept_for_nothing(
    one: Reaper, shm: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(shm, "trim", lambda: asked.append("trim"))
    one.once()
    assert asked == ["trim"]


def test_a_reaper_without_payloads_or_media_does_the_rest(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe)
    support.overdue(records, pipe, job_id)
    Reaper(records, Catalog((pipe,))).once()
    record = records.job(job_id)
    assert record is not None
    assert record.state is JobState.EXPIRED
