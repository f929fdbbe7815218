"""The records in a real Valkey, operation by operation."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omniqueue import calls, embedded, errors, heartbeats, meters, store
from omniqueue.job import JobState
from omniqueue.payloads import Reference
from omniqueue.pipeline import Pipeline
from omniqueue.store import Claim, Owed, Store
from tests.unit import support
from tests.unit.support import claim, submit

RESULT: dict[str, Any] = {"kind": "image", "data": [{"file": "f.png"}]}


@pytest.fixture
def pipe() -> Pipeline:
    return support.pipeline(2)


def ref(stage_id: int = 0, attempt: int = 1) -> Reference:
    return Reference(f"oq_x_{stage_id}_{attempt}", 10, "here")


def state(records: Store, job_id: str) -> JobState:
    record = records.job(job_id)
    assert record is not None
    return record.state


def run_through(records: Store, pipe: Pipeline, job_id: str) -> None:
    for stage in pipe.stages:
        last = stage is pipe.stages[-1]
        held = claim(records, pipe, job_id, stage.stage_id)
        outcome = records.finish(held, None if last else ref(stage.stage_id), {"a": 1}, RESULT if last else None)
        assert outcome == ("succeeded" if last else "next")


# -- submit ------------------------------------------------------------------------------------------------------------


def test_a_submitted_job_is_on_record_before_anything_is_enqueued(records: Store, pipe: Pipeline) -> None:
    given = Reference("oq_x_in_0", 5, "here")
    submission = records.submit(pipe, {"prompt": "苹果"}, priority=3, timeout_s=30, input_reference=given)
    record = records.job(submission.job_id)
    assert record is not None
    assert (record.state, record.stage, record.priority) == (JobState.QUEUED, 0, 3)
    assert record.request == {"prompt": "苹果"}
    assert record.deadline == pytest.approx(record.created_at + 30)
    assert [s.state for s in record.stages] == ["queued", ""]
    assert (records.live(pipe.name), records.position(pipe.stages[0].queue, submission.job_id)) == (1, 0)
    assert claim(records, pipe, submission.job_id).input_reference == given


def test_the_same_idempotency_key_finds_the_same_job(records: Store, pipe: Pipeline) -> None:
    first = records.submit(pipe, {"prompt": "a"}, idempotency_key="k")
    again = records.submit(pipe, {"prompt": "a"}, idempotency_key="k")
    assert (first.existing, again.existing) == (False, True)
    assert again.job_id == first.job_id
    assert records.counts(pipe.name) == {"accepted": 1}


def test_an_idempotency_key_finds_its_job_after_it_has_ended_and_when_the_queue_is_full(records: Store) -> None:
    pipe = support.pipeline(1, max_queue=1)
    first = records.submit(pipe, {"prompt": "a"}, idempotency_key="k")
    assert records.submit(pipe, {"prompt": "a"}, idempotency_key="k").existing
    records.cancel(first.job_id)
    assert records.submit(pipe, {"prompt": "a"}, idempotency_key="k").job_id == first.job_id


def test_the_same_idempotency_key_for_another_request_is_a_conflict(records: Store, pipe: Pipeline) -> None:
    records.submit(pipe, {"prompt": "a"}, idempotency_key="k")
    with pytest.raises(errors.Conflict, match="Idempotency-Key"):
        records.submit(pipe, {"prompt": "b"}, idempotency_key="k")


def test_a_digest_of_the_callers_own_decides_what_the_same_request_is(records: Store, pipe: Pipeline) -> None:
    first = records.submit(pipe, {"seed": 1}, idempotency_key="k", request_digest="d")
    assert records.submit(pipe, {"seed": 2}, idempotency_key="k", request_digest="d").job_id == first.job_id


def test_a_key_whose_job_was_deleted_makes_a_new_job(records: Store, pipe: Pipeline) -> None:
    first = records.submit(pipe, {"prompt": "a"}, idempotency_key="k")
    records.cancel(first.job_id)
    records.delete(first.job_id)
    assert not records.submit(pipe, {"prompt": "b"}, idempotency_key="k").existing


def test_sixteen_clients_with_one_key_make_one_job(records: Store, pipe: Pipeline) -> None:
    made: list[store.Submission] = []

    def one() -> None:
        made.append(records.submit(pipe, {"prompt": "a"}, idempotency_key="k"))

    threads = [threading.Thread(target=one) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({submission.job_id for submission in made}) == 1
    assert sorted(submission.existing for submission in made) == [False] + [True] * 15


def test_a_submission_said_twice_because_its_answer_was_lost_is_one_job(records: Store, pipe: Pipeline) -> None:
    job_id = store.new_id()
    records.submit(pipe, {"prompt": "p"}, job_id=job_id)
    held = claim(records, pipe, job_id)
    assert records.submit(pipe, {"prompt": "p"}, job_id=job_id) == store.Submission(job_id, False)
    assert records.finish(held, ref(), {}) == "next"
    assert records.counts(pipe.name)["accepted"] == 1


def test_exactly_the_excess_over_max_queue_is_refused_and_the_room_comes_back(records: Store) -> None:
    pipe = support.pipeline(1, max_queue=5)
    ids = [submit(records, pipe) for _ in range(5)]
    for _ in range(3):
        with pytest.raises(errors.QueueFull, match="has 5 jobs in hand"):
            submit(records, pipe)
    run_through(records, pipe, ids[0])
    records.cancel(ids[1])
    assert [bool(submit(records, pipe)) for _ in range(2)] == [True, True]
    with pytest.raises(errors.QueueFull):
        submit(records, pipe)
    assert records.live(pipe.name) == 5


def test_max_queue_is_exact_when_many_submit_at_once(records: Store) -> None:
    pipe = support.pipeline(1, max_queue=10)
    answers: list[bool] = []

    def one() -> None:
        try:
            submit(records, pipe)
            answers.append(True)
        except errors.QueueFull:
            answers.append(False)

    threads = [threading.Thread(target=one) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (answers.count(True), answers.count(False)) == (10, 20)


# -- claim -------------------------------------------------------------------------------------------------------------


def test_a_claim_has_the_request_the_time_left_and_every_earlier_output(records: Store) -> None:
    pipe = support.pipeline(3, request_timeout_s=50)
    job_id = submit(records, pipe)
    for k in range(2):
        assert records.finish(claim(records, pipe, job_id, k), ref(k), {"k": k}) == "next"
    held = claim(records, pipe, job_id, 2, "me")
    assert held.references == {0: ref(0), 1: ref(1)}
    assert (held.request, held.attempt, held.input_reference) == ({"prompt": "p"}, 1, None)
    assert 0 < held.remaining_s <= 50
    record = records.job(job_id)
    assert record is not None
    assert (record.state, record.stage) == (JobState.RUNNING, 2)
    assert [s.state for s in record.stages] == ["done", "done", "running"]
    assert [s.params for s in record.stages] == [{"k": 0}, {"k": 1}, None]
    assert record.stages[2].worker == "me"


def test_a_job_that_is_not_there_is_gone(records: Store, pipe: Pipeline) -> None:
    assert records.claim(pipe, "0" * 32, 0, "w") == "gone"


def test_a_job_that_has_ended_is_over(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe)
    records.cancel(job_id)
    assert records.claim(pipe, job_id, 0, "w") == "over"


def test_a_stage_that_is_done_is_done_and_its_record_stays(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe)
    records.finish(claim(records, pipe, job_id), ref(), {})
    before = records.job(job_id)
    assert records.claim(pipe, job_id, 0, "w2") == "done"
    assert records.job(job_id) == before


def test_a_stage_that_another_worker_runs_is_busy(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe)
    claim(records, pipe, job_id)
    assert records.claim(pipe, job_id, 0, "w2") == "busy"


def test_a_stage_whose_turn_has_not_come_is_early(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe)
    assert records.claim(pipe, job_id, 1, "w") == "early"
    assert records.claim(pipe, job_id, 7, "w") == "early"


def test_a_worker_that_knows_another_topology_is_a_mismatch(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe)
    other = support.with_stage(pipe, 0, name="another")
    assert records.claim(other, job_id, 0, "w") == "mismatch"
    assert isinstance(records.claim(pipe, job_id, 0, "w"), Claim)


def test_a_claim_after_the_deadline_expires_the_job(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe)
    support.overdue(records, pipe, job_id)
    assert records.claim(pipe, job_id, 0, "w") == "over"
    record = records.job(job_id)
    assert record is not None
    assert record.error is not None
    assert (record.state, record.error["code"]) == (JobState.EXPIRED, "deadline_exceeded")
    assert "waited" in record.error["message"]


def test_of_many_that_claim_at_once_one_gets_it(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe)
    answers: list[Claim | str] = []
    threads = [
        threading.Thread(target=lambda n=n: answers.append(records.claim(pipe, job_id, 0, f"w{n}"))) for n in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(isinstance(answer, Claim) for answer in answers) == [False] * 15 + [True]
    assert answers.count("busy") == 15


def test_the_last_attempt_is_given_only_to_a_worker_that_runs_nothing_else(records: Store) -> None:
    pipe = support.pipeline(1, max_attempts=2)
    job_id = submit(records, pipe)
    first = records.claim(pipe, job_id, 0, "w")
    assert isinstance(first, Claim)
    assert records.fail(first, "c", "r", retry=True) == "queued"
    assert records.claim(pipe, job_id, 0, "w") == "alone"
    assert state(records, job_id) is JobState.RUNNING
    assert isinstance(records.claim(pipe, job_id, 0, "w", alone=True), Claim)


def test_a_pipeline_of_one_attempt_needs_no_worker_of_its_own(records: Store) -> None:
    pipe = support.pipeline(1, max_attempts=1)
    assert isinstance(records.claim(pipe, submit(records, pipe), 0, "w"), Claim)


# -- leases and fencing ------------------------------------------------------------------------------------------------


def test_a_lease_that_lapsed_gives_the_stage_to_the_next_and_refuses_the_first(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe)
    old = claim(records, pipe, job_id, 0, "frozen")
    support.lapse(records, pipe, job_id, 0)
    new = claim(records, pipe, job_id, 0, "alive")
    assert (old.attempt, new.attempt) == (1, 2)
    assert records.finish(old, ref(0, 1), {}) == "stale"
    assert records.fail(old, "c", "r", retry=True) == "stale"
    assert records.renew([(old, (1, 2)), (new, (1, 2))], 5.0) == {(job_id, 0, 1)}
    assert records.finish(new, ref(0, 2), {}) == "next"
    record = records.job(job_id)
    assert record is not None
    assert record.stages[0].reference == ref(0, 2).to_json()
    assert record.stages[0].failures == 1
    assert records.finish(old, ref(0, 1), {}) == "stale"


def test_renewing_keeps_a_lease_and_records_the_progress(records: Store) -> None:
    pipe = support.pipeline(1, lease_s=30)
    job_id = submit(records, pipe)
    held = claim(records, pipe, job_id)
    support.lapse(records, pipe, job_id, 0)
    assert records.renew([(held, (3, 10))], 30.0) == set()
    assert records.reap(pipe.name) == []
    record = records.job(job_id)
    assert record is not None
    assert record.stages[0].progress == (3, 10)


def test_renewing_nothing_asks_nothing_and_many_are_renewed_in_parts(records: Store) -> None:
    pipe = support.pipeline(1, max_queue=1000)
    assert records.renew([], 5.0) == set()
    held = [claim(records, pipe, submit(records, pipe)) for _ in range(600)]
    for one in held[::2]:
        records.delete(one.job_id)
        records.cancel(one.job_id)
    stop = records.renew([(one, (0, 0)) for one in held], 5.0)
    assert stop == {(one.job_id, 0, 1) for one in held[::2]}


def test_a_job_that_is_gone_is_to_be_stopped(records: Store, pipe: Pipeline) -> None:
    held = claim(records, pipe, submit(records, pipe))
    records.cancel(held.job_id)
    records.fail(held, "stopped", "r", retry=False)
    assert records.delete(held.job_id)[0] == "deleted"
    assert records.renew([(held, (0, 0))], 5.0) == {(held.job_id, 0, 1)}
    assert records.finish(held, ref(), {}) == "stale"


def test_an_output_said_twice_because_the_answer_was_lost_is_recorded_once(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe, reply_to="r")
    held = claim(records, pipe, job_id)
    assert [records.finish(held, ref(), {}) for _ in range(2)] == ["next", "next"]
    last = claim(records, pipe, job_id, 1)
    assert [records.finish(last, None, {}, RESULT) for _ in range(2)] == ["succeeded", "succeeded"]
    assert records.replies("r", 0.01) == [job_id]
    assert records.counts(pipe.name)["succeeded"] == 1


# -- failing and handing back ------------------------------------------------------------------------------------------


def test_the_attempt_limit_fails_the_job_with_stage_reason_and_attempts(records: Store) -> None:
    pipe = support.pipeline(2, max_attempts=3)
    job_id = submit(records, pipe, reply_to="r")
    records.finish(claim(records, pipe, job_id), ref(), {})
    outcomes = [records.fail(claim(records, pipe, job_id, 1), "no_luck", f"reason {i}", retry=True) for i in range(3)]
    assert outcomes == ["queued", "queued", "failed"]
    record = records.job(job_id)
    assert record is not None
    assert record.error == {"stage": 1, "name": "part1", "code": "no_luck", "message": "reason 2", "attempts": 3}
    assert records.counts(pipe.name) == {"accepted": 1, "attempt_failures": 3, "failed": 1}
    assert records.replies("r", 0.01) == [job_id]


def test_lapsed_leases_count_and_the_error_says_that_the_worker_was_lost(records: Store) -> None:
    pipe = support.pipeline(1, max_attempts=2)
    job_id = submit(records, pipe)
    for worker in ("w1", "w2"):
        claim(records, pipe, job_id, 0, worker)
        support.lapse(records, pipe, job_id, 0)
        records.reap(pipe.name)
    record = records.job(job_id)
    assert record is not None
    assert record.error is not None
    assert (record.state, record.error["code"]) == (JobState.FAILED, "worker_lost")
    assert "w2" in record.error["message"]
    assert record.error["attempts"] == 2


def test_a_failure_that_a_retry_would_not_mend_ends_the_job_at_once(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe)
    assert records.fail(claim(records, pipe, job_id), "engine_rejected", "too long", retry=False) == "failed"
    record = records.job(job_id)
    assert record is not None
    assert record.error is not None
    assert "param" not in record.error


def test_a_failure_names_the_field_at_fault_where_there_is_one(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe)
    records.fail(claim(records, pipe, job_id), "engine_rejected", "too long", retry=False, param="max_tokens")
    record = records.job(job_id)
    assert record is not None
    assert record.error is not None
    assert record.error["param"] == "max_tokens"


def test_handing_back_is_not_counted(records: Store) -> None:
    pipe = support.pipeline(1, max_attempts=2)
    job_id = submit(records, pipe)
    for _ in range(10):
        assert records.fail(claim(records, pipe, job_id), "handed_back", "r", retry=True, counted=False) == "queued"
    record = records.job(job_id)
    assert record is not None
    assert (record.stages[0].attempt, record.stages[0].failures) == (10, 0)
    assert records.position(pipe.stages[0].queue, job_id) == 0


def test_a_failed_attempt_after_the_deadline_expires_the_job_and_keeps_the_reason(
    records: Store, pipe: Pipeline
) -> None:
    held = claim(records, pipe, submit(records, pipe))
    support.overdue(records, pipe, held.job_id)
    assert records.fail(held, "stopped", "the reason", retry=False) == "expired"
    record = records.job(held.job_id)
    assert record is not None
    assert record.error is not None
    assert record.error["message"] == "the reason"


def test_an_output_after_the_deadline_expires_the_job(records: Store, pipe: Pipeline) -> None:
    held = claim(records, pipe, submit(records, pipe))
    support.overdue(records, pipe, held.job_id)
    assert records.finish(held, ref(), {}) == "expired"


def test_a_reason_of_any_size_and_alphabet_can_be_recorded(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe)
    assert records.fail(claim(records, pipe, job_id), "c", "\ud800苹\0" + "x" * 10**6, retry=False) == "failed"
    record = records.job(job_id)
    assert record is not None
    assert record.error is not None
    assert len(record.error["message"]) < 10_000


# -- cancel and delete -------------------------------------------------------------------------------------------------


def test_cancelling_a_waiting_job_ends_it_at_once(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe, reply_to="r")
    assert records.cancel(job_id) == "cancelled"
    assert records.replies("r", 0.01) == [job_id]
    assert records.position(pipe.stages[0].queue, job_id) is None
    assert records.live(pipe.name) == 0


def test_cancelling_between_two_stages_ends_the_job_at_once(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe)
    records.finish(claim(records, pipe, job_id), ref(), {})
    assert records.cancel(job_id) == "cancelled"
    assert records.claim(pipe, job_id, 1, "w") == "over"


def test_cancelling_a_running_job_waits_for_its_worker_and_tells_it(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe, reply_to="r")
    held = claim(records, pipe, job_id, 0, "me")
    assert records.cancel(job_id) == "cancelling"
    assert records.cancel(job_id) == "cancelling"
    assert records.controls("me", 0.01) == {(job_id, 0, 1)}
    assert records.renew([(held, (0, 0))], 5.0) == {(job_id, 0, 1)}
    assert state(records, job_id) is JobState.CANCELLING
    assert records.replies("r", 0.01) == []
    assert records.fail(held, "stopped", "r", retry=False) == "cancelled"
    assert records.replies("r", 0.01) == [job_id]


def test_an_output_that_meets_a_cancel_is_dropped(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe)
    held = claim(records, pipe, job_id)
    records.cancel(job_id)
    assert records.finish(held, ref(), {}) == "cancelled"
    record = records.job(job_id)
    assert record is not None
    assert record.stages[0].reference is None


def test_a_cancel_whose_worker_is_gone_is_confirmed_by_the_reaper(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe)
    claim(records, pipe, job_id)
    records.cancel(job_id)
    support.lapse(records, pipe, job_id, 0)
    assert records.reap(pipe.name) == []
    assert state(records, job_id) is JobState.CANCELLED


def test_a_cancel_whose_worker_hangs_expires_at_the_deadline(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe)
    claim(records, pipe, job_id)
    records.cancel(job_id)
    support.overdue(records, pipe, job_id)
    records.reap(pipe.name)
    assert state(records, job_id) is JobState.EXPIRED


@pytest.mark.parametrize("ending", ["succeeded", "failed", "cancelled", "expired"])
def test_cancelling_what_has_ended_changes_nothing(records: Store, ending: str) -> None:
    pipe = support.pipeline(1)
    job_id = ended(records, pipe, ending)
    before = records.job(job_id)
    assert records.cancel(job_id) == ending
    assert records.job(job_id) == before


def ended(records: Store, pipe: Pipeline, ending: str, **facts: Any) -> str:
    job_id = submit(records, pipe, **facts)
    if ending == "succeeded":
        run_through(records, pipe, job_id)
    elif ending == "failed":
        records.fail(claim(records, pipe, job_id), "c", "r", retry=False)
    elif ending == "cancelled":
        records.cancel(job_id)
    else:
        support.overdue(records, pipe, job_id)
        records.reap(pipe.name)
    assert state(records, job_id) is JobState(ending)
    return job_id


def test_cancelling_and_deleting_the_unknown_is_gone(records: Store) -> None:
    assert records.cancel("0" * 32) == "gone"
    assert records.delete("0" * 32) == ("gone", None)


def test_only_a_job_that_has_ended_can_be_deleted(records: Store) -> None:
    pipe = support.pipeline(1)
    job_id = submit(records, pipe)
    assert records.delete(job_id) == ("live", None)
    held = claim(records, pipe, job_id)
    assert records.delete(job_id) == ("live", None)
    records.finish(held, None, {}, RESULT)
    assert records.delete(job_id) == ("deleted", RESULT)
    assert records.job(job_id) is None
    assert records.delete(job_id) == ("gone", None)


@pytest.mark.parametrize("ending", ["succeeded", "failed", "cancelled", "expired"])
def test_a_job_that_has_ended_leaves_no_entry_but_its_record(records: Store, ending: str) -> None:
    pipe = support.pipeline(1)
    job_id = ended(records, pipe, ending, reply_to="r")
    assert records.replies("r", 0.01) == [job_id]
    kinds = {key.split(":")[1] for key in records.client.scan_iter(f"{records.namespace}:*")}
    assert kinds <= {"job", "jobs", "ended", "count", "control", "meter"}


# -- the reaper's questions --------------------------------------------------------------------------------------------


def test_reap_returns_what_is_owed_again_once(records: Store, pipe: Pipeline) -> None:
    lapsed, fine = submit(records, pipe), submit(records, pipe)
    claim(records, pipe, lapsed)
    claim(records, pipe, fine)
    support.lapse(records, pipe, lapsed, 0)
    assert records.reap(pipe.name) == [Owed(lapsed, 0)]
    assert records.reap(pipe.name) == []
    record = records.job(lapsed)
    assert record is not None
    assert (record.state, record.stages[0].state) == (JobState.RUNNING, "queued")


def test_reap_can_be_lenient_after_redis_was_away(records: Store) -> None:
    pipe = support.pipeline(1)
    job_id = submit(records, pipe)
    claim(records, pipe, job_id)
    support.lapse(records, pipe, job_id, 0)
    assert records.reap(pipe.name, grace_s=86400.0) == []
    assert records.reap(pipe.name, grace_s=60.0) == [Owed(job_id, 0)]


def test_reap_ends_what_is_past_its_deadline_whether_it_waits_or_runs(records: Store, pipe: Pipeline) -> None:
    waits, runs, fine = (submit(records, pipe, reply_to="r") for _ in range(3))
    claim(records, pipe, runs, 0, "me")
    for job_id in (waits, runs):
        support.overdue(records, pipe, job_id)
    assert records.reap(pipe.name) == []
    assert [state(records, i).value for i in (waits, runs, fine)] == ["expired", "expired", "queued"]
    assert records.controls("me", 0.01) == {(runs, 0, 1)}
    assert sorted(records.replies("r", 0.01)) == sorted([waits, runs])
    texts = [records.job(i).error["message"] for i in (waits, runs)]  # type: ignore[union-attr, index]
    assert ["waited" in text for text in texts] == [True, False]


def test_a_limit_keeps_one_pass_short(records: Store, pipe: Pipeline) -> None:
    for _ in range(7):
        job_id = submit(records, pipe)
        claim(records, pipe, job_id)
        support.lapse(records, pipe, job_id, 0)
    assert [len(records.reap(pipe.name, limit=3)) for _ in range(4)] == [3, 3, 1, 0]


def test_every_passed_deadline_ends_its_job_in_one_pass(records: Store, pipe: Pipeline) -> None:
    ids = [submit(records, pipe) for _ in range(7)]
    for job_id in ids:
        support.overdue(records, pipe, job_id)
    assert records.reap(pipe.name, limit=3) == []
    assert {state(records, one).value for one in ids} == {"expired"}


def test_a_waiting_stage_whose_queue_is_empty_has_lost_its_message(records: Store, pipe: Pipeline) -> None:
    queue = pipe.stages[0].queue
    lost, young = submit(records, pipe), submit(records, pipe)
    support.earlier(records, pipe, lost, 0, 10)
    assert records.lost(queue, [], grace_s=2.0) == [Owed(lost, 0)]
    assert records.lost(queue, [], grace_s=2.0) == []  # published again just now
    assert records.position(queue, young) is not None


def test_what_was_published_before_the_oldest_message_is_lost_and_what_came_after_it_is_not(
    records: Store, pipe: Pipeline
) -> None:
    queue = pipe.stages[0].queue
    before, oldest, after = (submit(records, pipe) for _ in range(3))
    for job_id, seconds in ((before, 100), (oldest, 60), (after, 50)):
        support.earlier(records, pipe, job_id, 0, seconds)
    assert records.lost(queue, [oldest], grace_s=2.0) == [Owed(before, 0)]


def test_with_several_lists_only_what_is_older_than_every_oldest_message_is_lost(
    records: Store, pipe: Pipeline
) -> None:
    queue = pipe.stages[0].queue
    first, second, third = (submit(records, pipe) for _ in range(3))
    for job_id, seconds in ((first, 100), (second, 60), (third, 50)):
        support.earlier(records, pipe, job_id, 0, seconds)
    assert records.lost(queue, [third, second], grace_s=2.0) == [Owed(first, 0)]
    support.earlier(records, pipe, first, 0, 100)
    assert records.lost(queue, [third, first], grace_s=2.0) == []


def test_a_message_of_an_unknown_job_makes_the_reaper_patient_not_blind(records: Store, pipe: Pipeline) -> None:
    queue = pipe.stages[0].queue
    long, short = submit(records, pipe), submit(records, pipe)
    support.earlier(records, pipe, long, 0, 100)
    support.earlier(records, pipe, short, 0, 10)
    assert records.lost(queue, ["?"], grace_s=2.0) == [Owed(long, 0)]


def test_what_runs_or_has_ended_has_no_message_to_lose(records: Store, pipe: Pipeline) -> None:
    runs, over = submit(records, pipe), submit(records, pipe)
    claim(records, pipe, runs)
    records.cancel(over)
    assert records.lost(pipe.stages[0].queue, [], grace_s=0.0) == []


def test_ended_jobs_are_outdated_after_their_time_and_not_before(records: Store) -> None:
    kept, brief = support.pipeline(1, result_ttl_s=100), support.pipeline(1, result_ttl_s=0.001)
    run_through(records, kept, submit(records, kept))
    job_id = submit(records, brief)
    run_through(records, brief, job_id)
    while not records.outdated():
        time.sleep(0.005)
    assert records.outdated() == [job_id]
    assert records.delete(job_id) == ("deleted", RESULT)
    assert records.outdated() == []


def test_a_record_that_vanished_by_itself_does_not_block_the_clean_up(records: Store) -> None:
    pipe = support.pipeline(1, result_ttl_s=0.001)
    ids = [submit(records, pipe) for _ in range(3)]
    for job_id in ids:
        run_through(records, pipe, job_id)
    records.client.delete(*(f"{records.namespace}:job:{job_id}" for job_id in ids[:2]))  # their backstop's EXPIRE
    while len(records.outdated()) < 3:
        time.sleep(0.005)
    for job_id in records.outdated(limit=2):
        records.delete(job_id)
    assert len(records.outdated()) == 1
    assert [record.id for record in records.jobs(pipe.name, 10)] == [ids[2]]


def test_one_leader_at_a_time_and_another_when_it_is_gone(records: Store) -> None:
    assert records.lead("reap", "a", 60.0)
    assert records.lead("reap", "a", 60.0)
    assert not records.lead("reap", "b", 60.0)
    assert records.lead("sweep", "b", 60.0)
    records.client.pexpire(f"{records.namespace}:lead:reap", 1)  # the leader was silent too long
    while not records.lead("reap", "b", 60.0):
        time.sleep(0.005)
    assert not records.lead("reap", "a", 60.0)


# -- reading -----------------------------------------------------------------------------------------------------------


def test_jobs_are_listed_from_either_end_and_paged_without_gap(records: Store, pipe: Pipeline) -> None:
    ids = [submit(records, pipe) for _ in range(25)]
    for ascending in (False, True):
        listed: dict[str, float] = {}
        bound = None
        while True:  # a page begins with the last job of the one before
            page = records.jobs(pipe.name, 10, bound, ascending=ascending)
            if listed.keys() >= {record.id for record in page}:
                break
            listed |= {record.id: record.created_at for record in page}
            bound = page[-1].created_at
        assert list(listed) == (ids if ascending else ids[::-1])


def test_a_more_urgent_job_stands_before_those_that_wait_longer(records: Store, pipe: Pipeline) -> None:
    queue = pipe.stages[0].queue
    late, later, urgent = (submit(records, pipe, priority=priority) for priority in (5, 5, 4))
    assert [records.position(queue, i) for i in (urgent, late, later)] == [0, 1, 2]
    assert [records.priority(i) for i in (urgent, late)] == [4, 5]
    claim(records, pipe, urgent)
    assert [records.position(queue, i) for i in (urgent, late, later)] == [None, 0, 1]


def test_positions_fall_as_the_queue_moves_and_waiting_tells_number_and_age(records: Store, pipe: Pipeline) -> None:
    queue = pipe.stages[0].queue
    assert records.waiting(queue) == (0, 0.0)
    ids = [submit(records, pipe) for _ in range(3)]
    assert [records.position(queue, i) for i in ids] == [0, 1, 2]
    claim(records, pipe, ids[0])
    assert [records.position(queue, i) for i in ids] == [None, 0, 1]
    support.earlier(records, pipe, ids[1], 0, 40)
    count, age_s = records.waiting(queue)
    assert count == 2
    assert 40 <= age_s < 100


def test_running_names_those_that_have_not_ended(records: Store, pipe: Pipeline) -> None:
    waits, over = submit(records, pipe), submit(records, pipe)
    records.cancel(over)
    assert records.running([waits, over, "0" * 32]) == {waits}
    assert records.running([]) == set()


def test_the_counts_are_those_of_the_ends(records: Store) -> None:
    pipe = support.pipeline(1)
    for ending in ("succeeded", "succeeded", "failed", "cancelled", "expired"):
        ended(records, pipe, ending)
    counts = {"accepted": 5, "succeeded": 2, "failed": 1, "cancelled": 1, "expired": 1, "attempt_failures": 1}
    assert records.counts(pipe.name) == counts


# -- heartbeats --------------------------------------------------------------------------------------------------------


def test_a_worker_is_alive_while_it_beats(records: Store) -> None:
    records.beat("w1", {"stage_id": 0})
    records.beat("w2", {"stage_id": 1})
    assert records.workers() == [{"stage_id": 0}, {"stage_id": 1}]
    lives_ms = records.client.pttl(f"{records.namespace}:worker:w1")
    assert 0 < lives_ms <= heartbeats.HEARTBEAT_TTL_S * 1000  # type: ignore[operator]
    for worker in ("w1", "w2"):
        records.client.lpush(heartbeats.hand(records.namespace, worker), "a message")
    records.client.pexpire(f"{records.namespace}:worker:w1", 1)
    while len(records.workers()) == 2:
        time.sleep(0.005)
    assert records.workers() == [{"stage_id": 1}]
    assert records.client.zrange(f"{records.namespace}:workers", 0, -1) == ["w2"]
    assert list(records.client.scan_iter("*:hand:*")) == [heartbeats.hand(records.namespace, "w2")]


def test_a_worker_that_retires_is_gone_at_once(records: Store) -> None:
    records.beat("w1", {})
    records.retire("w1")
    assert records.workers() == []
    assert list(records.client.scan_iter(f"{records.namespace}:*")) == []


def test_a_declared_topology_is_found_until_it_changes(records: Store, pipe: Pipeline) -> None:
    assert records.declared(pipe) is None
    records.declare(pipe)
    assert records.declared(pipe) == pipe.fingerprint


def test_replies_wait_and_arrive_in_order_up_to_a_number(records: Store) -> None:
    pipe = support.pipeline(1)
    ids = [ended(records, pipe, "cancelled", reply_to="r") for _ in range(5)]
    assert records.replies("r", 0.01, most=3) == ids[:3]
    assert records.replies("r", 0.01) == ids[3:]
    assert records.replies("r", 0.01) == []


def test_a_listener_may_wait_longer_than_a_command_may_take(records: Store) -> None:
    pipe = support.pipeline(1)
    hasty = Store(store.connect(_url(records), 0.05), records.namespace)
    listener = Store.listener(hasty)
    got: list[list[str]] = []
    thread = threading.Thread(target=lambda: got.append(listener.replies("r", 20.0)))
    thread.start()
    time.sleep(0.2)  # four times what a command of the other may take
    job_id = ended(records, pipe, "cancelled", reply_to="r")
    thread.join()
    assert got == [[job_id]]
    for each in (hasty, listener):
        each.client.close()


def _url(records: Store) -> str:
    return f"unix://{records.client.connection_pool.connection_kwargs['path']}?db=0"


# -- Redis away --------------------------------------------------------------------------------------------------------

OPERATIONS = {
    "ping": lambda s, p, c: s.ping(),
    "submit": lambda s, p, c: s.submit(p, {}),
    "claim": lambda s, p, c: s.claim(p, c.job_id, 0, "w"),
    "renew": lambda s, p, c: s.renew([(c, (0, 0))], 1.0),
    "finish": lambda s, p, c: s.finish(c, None, {}),
    "fail": lambda s, p, c: s.fail(c, "c", "r", retry=True),
    "say": lambda s, p, c: s.say(c, [{}]),
    "said": lambda s, p, c: s.said(c.job_id),
    "cancel": lambda s, p, c: s.cancel(c.job_id),
    "delete": lambda s, p, c: s.delete(c.job_id),
    "reap": lambda s, p, c: s.reap(p.name),
    "lost": lambda s, p, c: s.lost("q", []),
    "outdated": lambda s, p, c: s.outdated(),
    "unheard": lambda s, p, c: s.unheard(p.name, "w", [c]),
    "make": lambda s, p, c: s.make(calls.submit(p, {})),
    "lead": lambda s, p, c: s.lead("x", "me", 1.0),
    "job": lambda s, p, c: s.job(c.job_id),
    "jobs": lambda s, p, c: s.jobs(p.name, 3),
    "running": lambda s, p, c: s.running([c.job_id]),
    "position": lambda s, p, c: s.position("q", c.job_id),
    "waiting": lambda s, p, c: s.waiting("q"),
    "live": lambda s, p, c: s.live(p.name),
    "counts": lambda s, p, c: s.counts(p.name),
    "overview": lambda s, p, c: s.overview(p),
    "traffic": lambda s, p, c: s.traffic(),
    "trace": lambda s, p, c: s.trace(c.job_id, 0),
    "replies": lambda s, p, c: s.replies("r", 0.01),
    "controls": lambda s, p, c: s.controls("w", 0.01),
    "beat": lambda s, p, c: s.beat("w", {}),
    "retire": lambda s, p, c: s.retire("w"),
    "workers": lambda s, p, c: s.workers(),
    "declare": lambda s, p, c: s.declare(p),
    "declared": lambda s, p, c: s.declared(p),
    "enqueue": lambda s, p, c: s.enqueue(store.Message("q", "text")),
    "priority": lambda s, p, c: s.priority(c.job_id),
    "oldest_messages": lambda s, p, c: s.oldest_messages(["q"]),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_says_broker_unavailable_when_redis_is_away(
    operation: str, tmp_path: Path, pipe: Pipeline
) -> None:
    away = Store(store.connect(f"unix://{tmp_path}/none.sock", 0.5))
    held = Claim("0" * 32, 0, 1, {}, 1.0, None, {})
    with pytest.raises(errors.BrokerUnavailable):
        OPERATIONS[operation](away, pipe, held)  # type: ignore[no-untyped-call]


def test_the_operations_above_are_all_there_are() -> None:
    members = {**vars(heartbeats.Heartbeats), **vars(meters.Meters), **vars(Store)}
    public = {n for n, f in members.items() if callable(f) and not n.startswith("_")}
    assert public - {"record_key", "reply_key"} == OPERATIONS.keys()


class Deaf:
    """A server that accepts and never answers, and counts who came."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.came: list[socket.socket] = []
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen(64)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                self.came.append(self._listening.accept()[0])
            except OSError:
                return

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for each in (*self.came, self._listening):
            each.close()


@pytest.fixture
def deaf() -> Iterator[Deaf]:
    with tempfile.TemporaryDirectory(prefix="oq-") as folder:
        server = Deaf(Path(folder) / "s")
        yield server
        server.close()


def test_a_redis_that_hangs_is_asked_once_and_given_up_after_the_time_out(deaf: Deaf, pipe: Pipeline) -> None:
    client = store.connect(f"unix://{deaf.path}", 0.1)
    with pytest.raises(errors.BrokerUnavailable):
        submit(Store(client), pipe)
    assert len(deaf.came) == 1
    client.close()


def test_a_redis_that_was_restarted_is_found_by_the_same_store(pipe: Pipeline) -> None:
    with tempfile.TemporaryDirectory(prefix="oq-") as folder:
        server = embedded.EmbeddedValkey(Path(folder))
        server.start()
        records = Store(store.connect(server.url, 2.0))
        job_id = submit(records, pipe)
        server.stop()
        with pytest.raises(errors.BrokerUnavailable):
            records.job(job_id)
        server.start()
        assert state(records, job_id) is JobState.QUEUED  # append-only, so it is still there
        assert isinstance(records.claim(pipe, job_id, 0, "w"), Claim)  # the script too, though the server forgot it
        records.client.close()
        server.stop()


def test_a_redis_that_was_stopped_with_sigstop_is_unavailable_and_then_is_not(pipe: Pipeline) -> None:
    with tempfile.TemporaryDirectory(prefix="oq-") as folder:
        server = embedded.EmbeddedValkey(Path(folder), append_only=False)
        server.start()
        assert server.process is not None
        records = Store(store.connect(server.url, 0.3))
        job_id = submit(records, pipe)
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(errors.BrokerUnavailable):
                records.cancel(job_id)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        while True:
            try:
                assert state(records, job_id) in (JobState.QUEUED, JobState.CANCELLED)
                break
            except errors.BrokerUnavailable:
                time.sleep(0.05)
        records.client.close()
        server.stop()


def test_a_redis_without_memory_left_is_unavailable_and_keeps_what_it_has(pipe: Pipeline) -> None:
    with tempfile.TemporaryDirectory(prefix="oq-") as folder:
        server = embedded.EmbeddedValkey(Path(folder), append_only=False)
        server.start()
        records = Store(store.connect(server.url, 2.0))
        job_id = submit(records, pipe)
        records.client.config_set("maxmemory", 1)
        with pytest.raises(errors.BrokerUnavailable, match="out of memory"):
            submit(records, pipe)
        assert records.live(pipe.name) == 1
        records.client.config_set("maxmemory", 0)
        assert isinstance(records.claim(pipe, job_id, 0, "w"), Claim)
        records.client.close()
        server.stop()


@pytest.mark.parametrize(
    "text",
    [
        "MISCONF Valkey is configured to save RDB snapshots, but it's currently unable to persist to disk.",
        "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    ],
)
def test_a_redis_that_cannot_write_or_is_busy_is_unavailable(
    records: Store, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    import redis

    monkeypatch.setattr(records.client, "ping", support.raising(redis.ResponseError(text)))
    with pytest.raises(errors.BrokerUnavailable):
        records.ping()


def test_a_fault_of_our_own_is_not_called_an_absence_of_redis(records: Store) -> None:
    import redis

    with pytest.raises(redis.ResponseError):
        records._call("no_such_operation")


# -- what stays --------------------------------------------------------------------------------------------------------


def test_after_two_hundred_jobs_only_records_and_their_index_are_left_and_those_go_with_them(records: Store) -> None:
    pipe = support.pipeline(2, max_queue=1000, result_ttl_s=0.001)
    for number in range(200):
        job_id = records.submit(pipe, {"prompt": "p" * 500}, reply_to="r", idempotency_key=f"k{number}").job_id
        run_through(records, pipe, job_id)
        assert records.replies("r", 0.01) == [job_id]
    kinds = [key.split(":")[1] for key in records.client.scan_iter(f"{records.namespace}:*", count=1000)]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "job": 200, "jobs": 1, "ended": 1, "count": 1, "meter": 1, "idem": 200,
    }  # fmt: skip
    while records.outdated():
        for job_id in records.outdated():
            records.delete(job_id)
    kinds = [key.split(":")[1] for key in records.client.scan_iter(f"{records.namespace}:*", count=1000)]
    assert sorted(kinds) == ["count", "meter"]


def test_no_value_of_an_ordinary_job_comes_near_64_kilobytes(records: Store, pipe: Pipeline) -> None:
    request = {"prompt": "苹" * 4000, "negative_prompt": "x" * 1000, "n": 10, "width": 4096, "height": 4096}
    job_id = records.submit(pipe, request, input_reference=ref()).job_id
    records.finish(claim(records, pipe, job_id), ref(), {"temperature": 1.0})
    files = [{"file": f"{job_id}-1-{i}.png", "nbytes": 1 << 25, "width": 4096, "height": 4096} for i in range(10)]
    records.finish(claim(records, pipe, job_id, 1), None, {}, {"kind": "image", "data": files})
    sizes = [
        len(str(value).encode())
        for key in records.client.scan_iter(f"{records.namespace}:job:*")
        for value in records.client.hvals(key)  # type: ignore[union-attr]
    ]
    assert max(sizes) < 64 * 1024


def test_two_namespaces_in_one_redis_do_not_meet(records: Store, pipe: Pipeline) -> None:
    other = Store(records.client, f"t{uuid.uuid4().hex[:8]}")
    job_id = submit(records, pipe)
    assert other.job(job_id) is None
    assert other.claim(pipe, job_id, 0, "w") == "gone"
    assert (records.live(pipe.name), other.live(pipe.name)) == (1, 0)


def test_a_new_id_has_only_what_file_names_and_keys_may_have() -> None:
    ids = {store.new_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(i) == 32 and set(i) <= set("0123456789abcdef") for i in ids)


def test_a_digest_depends_on_what_is_asked_and_not_on_its_order() -> None:
    assert store.digest({"a": 1, "b": 2}) == store.digest({"b": 2, "a": 1})
    assert store.digest({"a": 1}) != store.digest({"a": 2})
    assert json.loads(json.dumps(store.digest({}))) == store.digest({})


# -- text while it is written ------------------------------------------------------------------------------------------


def test_pieces_are_heard_in_order_and_wake_the_router_that_waits(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe, reply_to="router")
    held = claim(records, pipe, job_id)
    assert records.said(job_id) == []
    records.say(held, [{"text": "a"}, {"text": "苹果"}])
    first, second = records.said(job_id)
    assert [first[1], second[1]] == [{"text": "a"}, {"text": "苹果"}]
    assert records.said(job_id, first[0]) == [second]
    assert records.replies("router", 1.0) == [job_id]
    records.say(held, [{"text": "c"}])
    assert [piece for _, piece in records.said(job_id, second[0])] == [{"text": "c"}]


def test_an_attempt_that_was_given_up_says_nothing_more(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe)
    stale = claim(records, pipe, job_id)
    records.fail(stale, "c", "r", retry=True)
    again = claim(records, pipe, job_id)
    records.say(stale, [{"text": "old"}])
    records.say(again, [{"text": "new"}])
    assert [piece["text"] for _, piece in records.said(job_id)] == ["new"]


def test_what_was_said_is_bounded_and_goes_with_the_job(records: Store, pipe: Pipeline) -> None:
    job_id = submit(records, pipe)
    held = claim(records, pipe, job_id)
    for _ in range(5):
        records.say(held, [{"text": "x"}] * 1000)
    assert 2000 <= len(records.said(job_id)) <= 3000
    assert 0 < int(records.client.ttl(f"{records.namespace}:said:{job_id}")) <= 60
    records.cancel(job_id)
    records.fail(held, "c", "r", retry=False)
    records.say(held, [{"text": "too late"}])
    assert records.delete(job_id)[0] == "deleted"
    assert records.said(job_id) == []
