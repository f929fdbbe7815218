"""What the store hands out: the right to run a stage, what became of a submission, work that is owed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omniqueue import payloads


@dataclass(frozen=True)
class Claim:
    """The right to run one stage of one job: until the lease lapses, and only with this attempt number."""

    job_id: str
    stage_id: int
    attempt: int
    request: Mapping[str, Any]
    #: Seconds until the job's deadline, when it was claimed.
    remaining_s: float
    #: The request's input media, if it has any.
    input_reference: payloads.Reference | None
    #: Outputs of the earlier stages, by stage id.
    references: Mapping[int, payloads.Reference]
    #: As the job was accepted, 0 (most urgent) to 9.
    priority: int = 0


@dataclass(frozen=True)
class Submission:
    """What became of a submitted job: its id, and whether an earlier request with the same key already had made it."""

    job_id: str
    existing: bool


@dataclass(frozen=True)
class Owed:
    """A stage of a job whose message has to be published (again)."""

    job_id: str
    stage_id: int

    @classmethod
    def parse(cls, text: str) -> Owed:
        """Read ``id:stage``."""
        job_id, _, stage = text.rpartition(":")
        return cls(job_id, int(stage))


@dataclass(frozen=True)
class Message:
    """A broker message and the Redis list that it belongs in."""

    list: str
    text: str
