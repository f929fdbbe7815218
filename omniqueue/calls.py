"""The calls that every job needs, to accept it, to claim a stage and to record it: what is asked, what answers mean.

Pure functions, because they are made in two ways: through redis-py by whoever is in a thread (store.py), and on an
event loop, a worker's (hotpath.py) or a router's (exchange.py).
"""

from __future__ import annotations

import hashlib
import json as jsonlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from omniqueue import errors, payloads, pipeline
from omniqueue.claims import Claim, Message, Submission

T = TypeVar("T")
IDEMPOTENCY_TTL_S = 24 * 3600
#: A message, the job that it is for, and the claim, or why there is none.
Taken = tuple[str, str, Claim | str]


@dataclass(frozen=True)
class Call(Generic[T]):
    """An operation of records.lua with its arguments, and how its answer is read."""

    operation: str
    args: tuple[Any, ...]
    read: Callable[[list[Any]], T]


def new_id() -> str:
    """A job id: opaque, and without the characters that payload names and record keys use."""
    return os.urandom(16).hex()


def flat(message: Message | None) -> tuple[str, ...]:
    """A message as arguments, if there is one."""
    return (message.list, message.text) if message else ()


def json(value: Any) -> str:
    """As JSON, made in C."""
    return msgspec.json.encode(value).decode()


def _reference(text: str) -> payloads.Reference:
    return payloads.Reference.from_json(msgspec.json.decode(text))


def digest(request: Mapping[str, Any]) -> str:
    """Fingerprint of a request, to tell a retry from another request under the same idempotency key."""
    return hashlib.sha256(jsonlib.dumps(request, sort_keys=True).encode()).hexdigest()[:16]


def submit(
    pipe: pipeline.Pipeline,
    request: Mapping[str, Any],
    *,
    job_id: str | None = None,
    reply_to: str = "",
    timeout_s: float | None = None,
    priority: int = 0,
    input_reference: payloads.Reference | None = None,
    idempotency_key: str = "",
    request_digest: str | None = None,
    message: Message | None = None,
    trace: str = "",
) -> Call[Submission]:
    """Write the record of a new job and enqueue ``message``; without one the caller enqueues, once that is done.

    ``request_digest`` tells a retry under the same ``idempotency_key`` from another request; give one when ``request``
    holds what was drawn at random, such as a seed. ``trace`` names the span of the request.

    Its ``read`` raises QueueFull, and Conflict (the idempotency key was used for another request).
    """
    job_id = job_id or new_id()
    record = {
        "pipeline": pipe.name,
        "fingerprint": pipe.fingerprint,
        "request": json(request),
        "digest": (request_digest or digest(request)) if idempotency_key else "",
        "stages": str(len(pipe.stages)),
        "queues": json([stage.queue for stage in pipe.stages]),
        "names": json([stage.name for stage in pipe.stages]),
        "timeout": str(timeout_s or pipe.request_timeout_s),
        "priority": str(priority),
        "max_attempts": str(pipe.max_attempts),
        "ttl": str(pipe.result_ttl_s),
        "reply": reply_to,
        "input": json(input_reference.to_json()) if input_reference else "",
        **({"trace": trace} if trace else {}),
    }
    limits = (pipe.max_queue, idempotency_key, int(IDEMPOTENCY_TTL_S))

    def read(answer: list[Any]) -> Submission:
        if answer[0] == "full":
            raise errors.QueueFull(f"{pipe.name} has {pipe.max_queue} jobs in hand, which is all it accepts.")
        if answer[0] == "differs":
            raise errors.Conflict("This Idempotency-Key was used for a different request.", param="Idempotency-Key")
        return Submission(job_id=answer[1], existing=answer[0] == "existing")

    return Call("submit", (job_id, json(record), *limits, *flat(message)), read)


def claim(
    pipe: pipeline.Pipeline, job_id: str, stage_id: int, worker: str, *, alone: bool = False, call: str = ""
) -> Call[Claim | str]:
    """Claim a stage, or why not: gone, over, done (pass it on), busy (another has it), early, mismatch, alone.

    The last attempt needs ``alone``: nothing else runs in the worker. The same ``call`` gets the same answer again.
    """

    options = ("1" if alone else "0", call or new_id())
    told = (job_id, stage_id, worker, pipe.lease_s, pipe.fingerprint, *options)
    return Call("claim", told, lambda answer: _claimed(job_id, stage_id, answer))


def _claimed(job_id: str, stage_id: int, answer: list[Any]) -> Claim | str:
    if answer[0] != "run":
        return str(answer[0])
    _, attempt, request, remaining, priority, given, *references = answer
    return Claim(
        job_id=job_id,
        stage_id=stage_id,
        attempt=int(attempt),
        request=msgspec.json.decode(request),
        remaining_s=float(remaining),
        priority=int(priority),
        input_reference=_reference(given) if given else None,
        references={k: _reference(text) for k, text in enumerate(references) if text},
    )


def take(pipe: pipeline.Pipeline, stage_id: int, worker: str, most: int, lists: Sequence[str]) -> Call[list[Taken]]:
    """Take at most ``most`` messages of a stage out of ``lists``, the most urgent first, and claim what they are for.

    Answers with each message, its job's id and the claim, or why not; "" and "" for a message that is no stage's.
    """

    def read(answer: list[Any]) -> list[Taken]:
        threes = zip(answer[::3], answer[1::3], answer[2::3], strict=True)
        return [(text, job_id, _claimed(job_id, stage_id, claim) if job_id else "") for text, job_id, claim in threes]

    return Call("take", (worker, stage_id, pipe.lease_s, pipe.fingerprint, most, *lists), read)


def finish(
    claim: Claim,
    reference: payloads.Reference | None,
    params: Mapping[str, Any],
    result: Mapping[str, Any] | None = None,
    message: Message | None = None,
    used: Mapping[str, float] | None = None,
) -> Call[str]:
    """Record a stage's output if the claim still holds, and enqueue the next stage's ``message``, if one is given.

    What the attempt ``used`` is added to the stage's counters.

    Answers next, succeeded, stale, cancelled or expired.
    """
    said = json(reference.to_json()) if reference else ""
    ended = json(result) if result is not None else ""
    amounts = [part for pair in (used or {}).items() for part in pair]
    told = (said, json(params), ended, *(flat(message) or ("", "")), *amounts)
    return Call("finish", (claim.job_id, claim.stage_id, claim.attempt, *told), lambda answer: str(answer[0]))
