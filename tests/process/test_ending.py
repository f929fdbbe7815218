"""Cancels, deadlines and full queues: every job ends once, in time, and the capacity is whole afterwards."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from omniqueue import errors
from omniqueue.job import Job
from tests.process.cluster import Cluster, eventually

STEP_S = 0.05
#: For a record to be written and a message to be heard on a busy machine, in seconds.
SLACK_S = 1.0


def assert_whole(cluster: Cluster) -> None:
    """Nothing runs, and all four slots of both stages can be used at once."""
    eventually(lambda: [worker["running"] for worker in cluster.store.workers()] == [0, 0], 5.0)
    records = cluster.all_ended([cluster.submit(f"capacity {k}") for k in range(8)])
    assert {record.state.value for record in records} == {"succeeded"}
    for stage_id in (0, 1):
        spans = [(r.stages[stage_id].started_at or 0, r.stages[stage_id].ended_at or 0) for r in records]
        # Four in the engine, and beside them those whose outcome is being recorded.
        assert 4 <= max(sum(a <= start < b for a, b in spans) for start, _ in spans) <= 8


def test_a_hundred_cancels_at_random_moments_each_end_a_job_once_and_stop_the_engine_within_a_step(
    slow: Cluster,
) -> None:
    dice = random.Random(11)
    asked: dict[str, float] = {}

    def one(number: int) -> str:
        job = slow.submit(f"cancel {number}")
        time.sleep(moments[number])
        asked[job] = time.time()
        slow.store.cancel(job)
        return job

    moments = [dice.choice([0.0, 0.001, 0.005, 0.05, dice.uniform(0, 3.5), dice.uniform(0, 8)]) for _ in range(100)]
    with ThreadPoolExecutor(25) as pool:
        jobs = list(pool.map(one, range(100)))
    records = slow.all_ended(jobs)

    counts = Counter(record.state.value for record in records)
    assert set(counts) == {"cancelled", "succeeded"}
    assert counts["cancelled"] > 50
    for record in records:
        assert (record.result is None) == (record.state.value == "cancelled")
        if record.state.value == "cancelled":
            assert (record.finished_at or 0) - asked[record.id] < STEP_S + SLACK_S
    assert max(stage.attempt for record in records for stage in record.stages) == 1
    media = {path.name[:32] for path in (slow.folder / "media").iterdir()}
    assert media.isdisjoint(record.id for record in records if record.state.value == "cancelled")
    assert_whole(slow)
    assert [slow.job(record.id) for record in records] == records  # and so they stay


def test_a_cancelled_request_stops_alone_and_its_neighbours_in_the_engine_go_on(slow: Cluster) -> None:
    jobs = [slow.submit(f"neighbour {k}") for k in range(4)]
    for job in jobs:
        slow.when_stage(job, 0, "running")
    assert slow.store.cancel(jobs[2]) == "cancelling"
    cancelled, *others = slow.all_ended([jobs[2], jobs[0], jobs[1], jobs[3]])
    assert cancelled.state.value == "cancelled"
    assert {record.state.value for record in others} == {"succeeded"}
    assert {stage.attempt for record in others for stage in record.stages} == {1}


def test_every_request_is_answered_before_its_deadline_and_a_second_and_none_is_started_after_it(
    slow: Cluster,
) -> None:
    dice = random.Random(3)
    jobs = [slow.submit(f"late {k}", timeout_s=dice.uniform(0.3, 3.0)) for k in range(30)]
    start = time.monotonic()
    records = slow.all_ended(jobs)
    assert time.monotonic() - start < 15
    counts = Counter(record.state.value for record in records)
    assert set(counts) <= {"expired", "succeeded"}
    assert counts["expired"] > 15
    for record in records:
        assert record.finished_at is not None
        assert record.finished_at < record.deadline + 1.0
        if record.state.value == "expired":
            assert record.error is not None
            assert record.error["code"] == "deadline_exceeded"
            assert record.finished_at >= record.deadline
        assert all((stage.started_at or 0) <= record.deadline for stage in record.stages)
    assert_whole(slow)


def test_a_burst_beyond_max_queue_has_exactly_the_excess_refused_and_full_capacity_afterwards(slow: Cluster) -> None:
    barrier = threading.Barrier(60)

    def one(number: int) -> str | None:
        barrier.wait(10.0)
        try:
            return slow.submit(f"burst {number}")
        except errors.QueueFull:
            return None

    with ThreadPoolExecutor(60) as pool:
        jobs = list(pool.map(one, range(60)))
    accepted = [job for job in jobs if job]
    assert len(accepted) == 40
    for job in accepted[8:]:
        slow.store.cancel(job)
    records = slow.all_ended(accepted)
    assert Counter(record.state.value for record in records)["succeeded"] >= 8
    assert slow.store.live(slow.pipe.name) == 0
    assert_whole(slow)


def test_urgent_jobs_overtake_those_that_wait(slow: Cluster) -> None:
    jobs = [slow.submit(f"patient {k}", priority=9) for k in range(12)]
    slow.when_stage(jobs[3], 0, "running")
    urgent = slow.submit("urgent", priority=0)
    records: list[Job] = slow.all_ended([urgent, *jobs])
    began = [record.stages[0].started_at or 0 for record in records]
    assert sum(other < began[0] for other in began[1:]) <= 8
