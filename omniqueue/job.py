"""The job record, frozen as read: the truth about a request, whatever the broker believes."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec


class JobState(str, enum.Enum):
    """Where a job stands. ``cancelling`` waits for a worker to confirm; the last four are terminal."""

    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def terminal(self) -> bool:
        """True when nothing about the job can change any more."""
        return self in TERMINAL


TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED})

#: Legal transitions; the scripts in records.lua make no others (tests/unit/test_store_model.py checks).
TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED}),
    JobState.RUNNING: frozenset({JobState.CANCELLING}) | TERMINAL,
    JobState.CANCELLING: frozenset({JobState.CANCELLED, JobState.EXPIRED}),
    **{state: frozenset() for state in TERMINAL},
}


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """What the record says about one stage of one job; times are Unix seconds."""

    stage_id: int
    #: "" before it is reached, then queued, running, done.
    state: str
    #: Fencing token: raised by every claim; a write with an older one is refused.
    attempt: int
    failures: int
    worker: str | None
    queued_at: float | None
    started_at: float | None
    ended_at: float | None
    #: Steps done and steps in all, 0 when unknown.
    progress: tuple[int, int]
    reference: Mapping[str, Any] | None
    params: Mapping[str, Any] | None


#: What a record says of the job itself; the rest is of its stages.
FIELDS = ("pipeline", "state", "stage", "created", "deadline", "finished", "priority", "request", "result", "error")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One accepted request; times are Unix seconds. Whoever waits for its end reads no ``stages``."""

    id: str
    pipeline: str
    state: JobState
    stage: int
    created_at: float
    deadline: float
    finished_at: float | None
    priority: int
    request: Mapping[str, Any]
    stages: tuple[StageRecord, ...]
    result: Mapping[str, Any] | None
    error: Mapping[str, Any] | None

    @classmethod
    def from_hash(cls, job_id: str, fields: Mapping[str, str]) -> Job:
        """Read the Redis hash that records.lua writes, or those of its fields that are FIELDS."""
        return cls(
            id=job_id,
            pipeline=fields["pipeline"],
            state=JobState(fields["state"]),
            stage=int(fields["stage"]),
            created_at=float(fields["created"]),
            deadline=float(fields["deadline"]),
            finished_at=_number(fields.get("finished")),
            priority=int(fields["priority"]),
            request=msgspec.json.decode(fields["request"]),
            stages=tuple(_stage(k, fields) for k in range(int(fields.get("stages", 0)))),
            result=_json(fields.get("result")),
            error=_json(fields.get("error")),
        )


def _stage(k: int, fields: Mapping[str, str]) -> StageRecord:
    done, _, total = fields.get(f"{k}:progress", "0/0").partition("/")
    return StageRecord(
        stage_id=k,
        state=fields.get(f"{k}:state", ""),
        attempt=int(fields.get(f"{k}:attempt", 0)),
        failures=int(fields.get(f"{k}:failures", 0)),
        worker=fields.get(f"{k}:worker"),
        queued_at=_number(fields.get(f"{k}:queued")),
        started_at=_number(fields.get(f"{k}:started")),
        ended_at=_number(fields.get(f"{k}:ended")),
        progress=(int(done), int(total)),
        reference=_json(fields.get(f"{k}:ref")),
        params=_json(fields.get(f"{k}:params")),
    )


def _number(text: str | None) -> float | None:
    return float(text) if text else None


def _json(text: str | None) -> Any:
    return msgspec.json.decode(text) if text else None
