"""Redis away and back, messages lost and doubled, and what never goes through Redis."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from omniqueue import chain, errors, store
from omniqueue.job import Job
from tests.process.cluster import Cluster, config, eventually, running
from tests.process.load import Load


def test_redis_restarted_twice_within_three_seconds_under_load_loses_nothing_and_nobody_restarts(
    quick: Cluster,
) -> None:
    replicas = quick.workers(1, 1)
    processes = [process for group in replicas for process in group]
    with Load(quick, clients=16) as load:
        load.wait_for(50)
        for _ in range(2):
            quick.valkey.stop()
            time.sleep(0.3)
            quick.valkey.start()
            time.sleep(0.7)
        load.wait_for(100)

    assert load.not_succeeded() == []
    assert load.answered_twice() == 0
    assert all(process.alive() for process in processes)
    assert not any("EMERGENCY DUMP" in process.text() for process in processes)
    _assert_full_capacity(quick)


def test_workers_are_back_however_long_redis_was_away(quick: Cluster) -> None:
    jobs = [quick.submit(f"meanwhile {k}") for k in range(30)]
    quick.valkey.stop()
    time.sleep(9.0)  # Celery's own pauses would be 2, 4, 6 s by now
    quick.valkey.start()
    assert {record.state.value for record in quick.all_ended(jobs)} == {"succeeded"}


def _assert_full_capacity(cluster: Cluster) -> None:
    """All four slots of a stage are in use at once."""
    jobs = [cluster.submit(f"capacity {k}") for k in range(60)]
    records = cluster.all_ended(jobs)
    for stage_id in (0, 1):
        assert _whole(_at_once(records, stage_id)), f"stage {stage_id}"


def _whole(at_once: int) -> bool:
    """Four in the engine, and beside them those whose outcome is being recorded."""
    return 4 <= at_once <= 8


def _at_once(records: list[Job], stage_id: int) -> int:
    """Most that ran in a stage at the same time."""
    spans = [(r.stages[stage_id].started_at or 0, r.stages[stage_id].ended_at or 0) for r in records]
    return max(sum(a <= start < b for a, b in spans) for start, _ in spans)


def test_what_runs_through_an_absence_of_the_broker_still_takes_its_slots(slow: Cluster) -> None:
    jobs = [slow.submit(f"slot {k}") for k in range(10)]
    for job in jobs[:4]:
        slow.when_stage(job, 0, "running")
    slow.valkey.stop()
    slow.valkey.start()
    records = slow.all_ended(jobs)
    assert {record.state.value for record in records} == {"succeeded"}
    assert _whole(_at_once(records, 0))


def test_redis_without_persistence_that_restarts_ends_every_job_and_the_workers_go_on() -> None:
    with running(config({"delay_s": 0.5}, {}), append_only=False) as cluster:
        replicas = cluster.workers(1, 1)
        jobs = [cluster.submit(f"forgotten {k}") for k in range(12)]
        cluster.when_stage(jobs[0], 0, "running")
        cluster.valkey.stop()
        cluster.valkey.start()
        # Nothing is known of them any more: that is what a client is told, and soon.
        assert [cluster.store.job(job) for job in jobs] == [None] * 12
        for process in (process for group in replicas for process in group):
            cluster.wait_ready(process)
        again = cluster.all_ended([cluster.submit(f"again {k}") for k in range(8)])
        assert {record.state.value for record in again} == {"succeeded"}


def test_a_message_that_vanishes_is_enqueued_again_within_seconds(quick: Cluster) -> None:
    quick.workers(0, 1)
    job = quick.submit("lost")
    lists = chain.broker_lists("stage0")
    message = eventually(lambda: next(filter(None, (quick.store.client.lpop(name) for name in lists)), None))
    assert job in message
    quick.worker(0)
    record = quick.ended(job, 8.0)
    assert record.state.value == "succeeded"
    assert record.stages[0].attempt == 1
    assert (record.finished_at or 0) - record.created_at < 8.0


def test_a_doubled_message_does_not_run_twice(slow: Cluster) -> None:
    (worker,), _ = slow.workers(1, 1)
    job = slow.submit("twice", publish=False)
    for _ in range(5):
        chain.publish(slow.pipe, store.Owed(job, 0))
    record = slow.ended(job)
    chain.publish(slow.pipe, store.Owed(job, 0))  # and once more when all is over
    chain.publish(slow.pipe, store.Owed(job, 1))
    time.sleep(0.5)
    assert record.state.value == "succeeded"
    assert [stage.attempt for stage in slow.job(job).stages] == [1, 1]
    assert slow.job(job) == record
    assert worker.text().count(f"action=stage_ended job={job}") == 1
    assert slow.late_replies(job) == [0]


def test_a_task_longer_than_any_time_out_of_the_broker_runs_once(slow: Cluster) -> None:
    # 32 s: more than the socket's time-out (30 s) and the health check's interval (25 s); twelve leases.
    stage = {"delay_s": 0.5, "steps": 64, "max_num_seqs": 1}
    with running(config(stage, {}, request_timeout_s=60, lease_s=2.5)) as cluster:
        cluster.workers(2, 1)
        record = cluster.ended(cluster.submit("long"), 60.0)
        assert record.state.value == "succeeded"
        assert [stage.attempt for stage in record.stages] == [1, 1]
        assert record.stages[0].ended_at is not None
        assert record.stages[0].started_at is not None
        assert record.stages[0].ended_at - record.stages[0].started_at > 32.0


def test_nothing_larger_than_64_kib_goes_through_redis_whatever_the_size_of_picture_and_payload() -> None:
    with running(config({"payload_bytes": 32 << 20}, {})) as cluster:
        cluster.workers(1, 0)
        jobs = [
            cluster.submit("p" * length, width=side, height=side)
            for length, side in ((10, 16), (20_000, 2048), (9, 3000))
        ]
        for job in jobs:
            cluster.when_stage(job, 1, "queued")
        assert 0 < _largest(cluster) < 65536
        cluster.worker(1)
        for record in cluster.all_ended(jobs, 60.0):
            assert record.state.value == "succeeded"
        assert 0 < _largest(cluster) < 65536
        assert all(len(message) < 4096 for message in _messages(cluster))


def _largest(cluster: Cluster) -> int:
    return max([cluster.largest_value(), *map(len, _messages(cluster))])


def _messages(cluster: Cluster) -> list[str]:
    found: list[Any] = []
    for queue in ("stage0", "stage1"):
        for name in chain.broker_lists(queue):
            found += cluster.store.client.lrange(name, 0, -1)
    for text in found:
        assert "ppppppppp" not in json.dumps(json.loads(text)), "a prompt in a broker message"
    return found


def test_nothing_is_accepted_while_redis_is_away_and_that_is_said_within_two_seconds() -> None:
    with running(config({})) as cluster:
        cluster.valkey.stop()
        start = time.monotonic()
        with pytest.raises(errors.BrokerUnavailable):
            cluster.submit("nobody there")
        assert time.monotonic() - start < 10
        cluster.valkey.start()
