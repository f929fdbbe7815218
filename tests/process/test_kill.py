"""kill -9 and SIGSTOP: what a process held is done by another, and what was done is not done again."""

from __future__ import annotations

import random
import signal
import time

from omniqueue.store import Claim
from tests.process.cluster import Cluster, Process, eventually
from tests.process.load import Load

LEASE_S = 2.0


def test_sigkill_of_one_of_two_replicas_ten_times_in_a_row_fails_nothing(quick: Cluster) -> None:
    dice = random.Random(5)
    replicas = quick.workers(2, 2)
    with Load(quick, clients=16) as load:
        for _ in range(10):
            load.wait_for(20)
            stage_id = dice.randrange(2)
            victim = replicas[stage_id].pop(dice.randrange(2))
            victim.kill()
            time.sleep(dice.random() * 0.3)
            replicas[stage_id].append(quick.worker(stage_id))

    assert load.not_succeeded() == []
    assert load.answered_twice() == 0


def test_sigkill_of_the_only_replica_that_is_back_after_four_seconds_runs_no_earlier_stage_again(
    quick: Cluster,
) -> None:
    _, (only,) = quick.workers(1, 1)
    with Load(quick, clients=16) as load:
        load.wait_for(30)
        only.kill()
        time.sleep(4.0)
        quick.worker(1)
        load.wait_for(50)

    assert load.not_succeeded() == []
    assert load.answered_twice() == 0
    assert set(load.attempts(0)) == {1}


def _freeze_at_work(cluster: Cluster, worker: Process) -> bool:
    """Stop it; let it go on, and False, when it had nothing in hand at that moment."""
    worker.signal(signal.SIGSTOP)
    stages = [job.stages[1] for job in cluster.store.jobs(cluster.pipe.name, 64)]
    if any(stage.state == "running" and f".{worker.pid}." in (stage.worker or "") for stage in stages):
        return True
    worker.signal(signal.SIGCONT)
    return False


def test_a_frozen_replica_does_not_slow_the_other_and_changes_nothing_when_it_wakes(quick: Cluster) -> None:
    _, (frozen, _) = quick.workers(1, 2)
    with Load(quick, clients=16) as load:
        load.wait_for(50)
        eventually(lambda: _freeze_at_work(quick, frozen))
        time.sleep(LEASE_S + 2.0)
        busy = load.completed()
        time.sleep(2.0)
        pace = (load.completed() - busy) / 2.0
        frozen.signal(signal.SIGCONT)
        time.sleep(2.0)
        assert frozen.alive()

    assert load.not_succeeded() == []
    assert load.answered_twice() == 0
    assert pace > 5  # a hundred on a machine that is free; none when the frozen one holds things up
    # What the frozen one finished on waking was refused: each record has one answer, and no file of an older attempt.
    mine = [one.job for one in load.outcomes if one.job and one.job.stages[1].attempt > 1]
    assert mine
    files = {path.name for path in (quick.folder / "media").iterdir()}
    for job in mine:
        assert job.result is not None
        assert quick.job(job.id) == job
        assert {name for name in files if name.startswith(job.id)} == {job.result["data"][0]["file"]}


def test_a_prompt_that_kills_its_worker_fails_after_the_attempt_limit_and_its_neighbours_complete(
    quick: Cluster,
) -> None:
    _, (worker,) = quick.workers(1, 1)
    worker.signal(signal.SIGSTOP)  # so that all four start together
    jobs = [quick.submit("neighbour 1"), quick.submit("EXIT"), quick.submit("neighbour 2"), quick.submit("neighbour 3")]
    for job in jobs:
        quick.when_stage(job, 1, "queued")
    worker.signal(signal.SIGCONT)
    deaths = 0
    for _ in range(3):  # as a supervisor does
        assert worker.wait(20.0) == 9
        deaths += 1
        worker = quick.worker(1, ready=False)  # it may be killed as soon as it is

    poison, *neighbours = quick.all_ended([jobs[1], jobs[0], *jobs[2:]])
    assert poison.state.value == "failed"
    assert poison.error is not None
    assert poison.error["attempts"] == 3
    assert poison.error["stage"] == 1
    assert "stopped answering" in poison.error["message"]
    assert {job.state.value for job in neighbours} == {"succeeded"}
    assert {job.stages[0].attempt for job in neighbours} == {1}
    assert deaths == 3
    assert quick.ended(quick.submit("afterwards")).state.value == "succeeded"


def test_a_hung_engine_ends_its_process_with_a_status_for_the_supervisor_and_the_job_ends(quick: Cluster) -> None:
    _, (worker,) = quick.workers(1, 1)
    job = quick.submit("HANG", timeout_s=12)
    assert worker.wait(15.0) == 70
    assert "no progress" in worker.text()
    quick.worker(1)
    start = time.monotonic()
    record = quick.ended(job)
    assert time.monotonic() - start < 30
    assert record.state.value in ("failed", "expired")
    assert record.finished_at is not None
    assert record.finished_at < record.deadline + 1.0
    eventually(lambda: len(quick.store.workers()) == 2 or quick.workers(1, 1))


def test_payloads_of_a_killed_worker_are_swept_within_seconds(quick: Cluster) -> None:
    (first,), (second,) = quick.workers(1, 1)
    second.kill()
    jobs = [quick.submit(f"left behind {k}", timeout_s=8) for k in range(6)]
    for job in jobs:
        quick.when_stage(job, 0, "done")
    # A file that its writer had no time to finish.
    torn = quick.payloads.directory / f"{quick.payloads.name(jobs[0], 0, 9)}.part{first.pid}-1"
    torn.write_bytes(b"half")
    assert len(quick.payloads.names()) == 7
    for job in jobs:
        quick.store.cancel(job)
    assert {record.state.value for record in quick.all_ended(jobs)} == {"cancelled"}
    eventually(lambda: quick.payloads.names() == [], 8.0)
    assert first.alive()


def test_media_that_a_killed_worker_left_half_written_go_with_its_job(quick: Cluster) -> None:
    _, (worker,) = quick.workers(1, 1)
    worker.signal(signal.SIGSTOP)
    job = quick.submit("half written")
    quick.when_stage(job, 1, "queued")
    worker.kill()
    claim = eventually(lambda: _claimed(quick, job))  # the killed one may have been given it when it was stopped
    # As the attempt leaves them when it dies before it can record its output.
    media = quick.folder / "media"
    media.mkdir(exist_ok=True)
    (media / f"{job}-{claim.attempt}-0.png.part").write_bytes(b"half")
    (media / f"{job}-{claim.attempt}-1.png").write_bytes(b"whole")
    quick.worker(1)
    assert quick.ended(job).state.value == "succeeded"
    eventually(lambda: [path.name for path in media.glob(f"{job}*")] == [f"{job}-{claim.attempt + 1}-0.png"])


def _claimed(cluster: Cluster, job: str) -> Claim | None:
    answer = cluster.store.claim(cluster.pipe, job, 1, "a worker that dies")
    return None if isinstance(answer, str) else answer
