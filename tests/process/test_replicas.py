"""More consumers on a queue are more of that stage, and fewer lose nothing."""

from __future__ import annotations

import signal
import time

from tests.process.cluster import Cluster
from tests.process.load import Load


def test_a_second_worker_started_while_requests_run_takes_its_share_and_sigterm_to_it_loses_nothing(
    quick: Cluster,
) -> None:
    with Load(quick, clients=16) as load:
        load.wait_for(20)
        second = quick.worker(1)
        ready_at = time.time()
        load.wait_for(100)
        assert second.terminate() == 0
        load.wait_for(50)

    assert load.not_succeeded() == []
    after = [one.job for one in load.outcomes if one.job and (one.job.stages[1].started_at or 0) > ready_at]
    mine = [job for job in after if f".{second.pid}." in (job.stages[1].worker or "")]
    assert len(mine) > 25, f"{len(mine)} of {len(after)}"
    first = min(job.stages[1].started_at or 0 for job in mine)
    assert first - ready_at < 0.5


def test_a_worker_that_gets_sigterm_finishes_what_runs_and_exits_with_0(slow: Cluster) -> None:
    jobs = [slow.submit(f"drain {k}") for k in range(4)]
    (worker,), _ = slow.workers(1, 1)
    for job in jobs:
        slow.when_stage(job, 0, "running")

    assert worker.terminate() == 0

    for job in jobs:
        stage = slow.job(job).stages[0]
        assert (stage.state, stage.attempt) == ("done", 1)
    assert {record.state.value for record in slow.all_ended(jobs)} == {"succeeded"}


def test_a_second_sigterm_hands_back_at_once_and_the_attempt_does_not_count_as_a_failure(slow: Cluster) -> None:
    jobs = [slow.submit(f"hand back {k}") for k in range(4)]
    (worker,), _ = slow.workers(1, 1)
    for job in jobs:
        slow.when_stage(job, 0, "running")

    worker.signal(signal.SIGTERM)
    time.sleep(0.15)
    start = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert time.monotonic() - start < 15

    assert {slow.job(job).stages[0].state for job in jobs} == {"queued"}
    slow.worker(0)
    records = slow.all_ended(jobs)
    assert {record.state.value for record in records} == {"succeeded"}
    assert {(record.stages[0].attempt, record.stages[0].failures) for record in records} == {(2, 0)}


def test_every_worker_replaced_one_after_another_under_load_fails_nothing_and_each_exits_with_0(quick: Cluster) -> None:
    replicas = quick.workers(2, 2)
    with Load(quick, clients=16) as load:
        for stage_id, group in enumerate(replicas):
            for old in group:
                quick.worker(stage_id)
                assert old.terminate() == 0
                load.wait_for(20)

    assert load.not_succeeded() == []
    assert load.answered_twice() == 0
    assert max(load.attempts(0)) == 1
    assert max(load.attempts(1)) == 1
