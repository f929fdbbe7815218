"""The record as it is read, and the states it may go through."""

from __future__ import annotations

import dataclasses

import pytest

from omniqueue import job
from omniqueue.job import Job, JobState

FIELDS = {
    "pipeline": "p",
    "state": "running",
    "stage": "1",
    "created": "100.250000",
    "deadline": "700.500000",
    "priority": "3",
    "request": '{"prompt": "苹果"}',
    "stages": "2",
    "0:state": "done",
    "0:attempt": "2",
    "0:failures": "1",
    "0:worker": "w0",
    "0:queued": "100.250000",
    "0:started": "101.000000",
    "0:ended": "102.000000",
    "0:progress": "4/4",
    "0:ref": '{"name": "oq_x"}',
    "0:params": '{"seed": 1}',
    "1:state": "running",
}


def test_a_hash_becomes_a_job() -> None:
    record = Job.from_hash("j", FIELDS)
    assert (record.id, record.state, record.stage, record.priority) == ("j", JobState.RUNNING, 1, 3)
    assert (record.created_at, record.deadline, record.finished_at) == (100.25, 700.5, None)
    assert record.request == {"prompt": "苹果"}
    assert (record.result, record.error) == (None, None)
    first, second = record.stages
    assert dataclasses.asdict(first) == {
        "stage_id": 0,
        "state": "done",
        "attempt": 2,
        "failures": 1,
        "worker": "w0",
        "queued_at": 100.25,
        "started_at": 101.0,
        "ended_at": 102.0,
        "progress": (4, 4),
        "reference": {"name": "oq_x"},
        "params": {"seed": 1},
    }
    assert (second.state, second.attempt, second.worker, second.progress) == ("running", 0, None, (0, 0))


def test_a_record_is_frozen() -> None:
    record = Job.from_hash("j", FIELDS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.state = JobState.FAILED  # type: ignore[misc]


def test_an_ended_job_has_its_result_or_its_error() -> None:
    ended = Job.from_hash("j", {**FIELDS, "state": "failed", "finished": "9.0", "error": '{"code": "c"}', "result": ""})
    assert (ended.finished_at, ended.error, ended.result) == (9.0, {"code": "c"}, None)
    assert ended.state.terminal


def test_nothing_follows_a_terminal_state_and_every_other_reaches_one() -> None:
    assert set(job.TRANSITIONS) == set(JobState)
    for state, following in job.TRANSITIONS.items():
        assert state.terminal == (not following)
        assert state.terminal == (state in job.TERMINAL)
    reached, open_states = set(job.TERMINAL), set(JobState) - job.TERMINAL
    while closer := {state for state in open_states - reached if job.TRANSITIONS[state] & reached}:
        reached |= closer
    assert reached == set(JobState)


def test_a_cancel_that_was_asked_for_never_ends_in_success() -> None:
    assert JobState.SUCCEEDED not in job.TRANSITIONS[JobState.CANCELLING]
