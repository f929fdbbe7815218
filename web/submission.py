"""From a checked request to its ended job: register, record, enqueue, wait. The path of every request is here."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flask
import msgspec

from omniqueue import calls, chain, errors, job, logs, payloads, store
from omniqueue.calls import Call
from omniqueue.pipeline import Pipeline
from web import traces, wait
from web.services import Services

#: After the job's deadline: time for the reaper to end it and for the reply, within a second of the deadline in all.
GRACE_S = 0.9
#: Bounds of Retry-After, in seconds.
_RETRY_AFTER_S = (1, 30)
_IDEMPOTENCY_KEY = re.compile(r"[!-~](?:[ -~]{0,253}[!-~])?")


class Busy(errors.QueueFull):
    """The queue is full; ``retry_after_s`` is a guess at when it will not be."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class JobEnded(errors.JobFailed):
    """The job ended without a result; its record says why."""

    def __init__(self, record: job.Job) -> None:
        super().__init__(f"Job {record.id} ended as {record.state.value}.")
        self.record = record


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A job that may be accepted, and what the client said about accepting it."""

    pipeline: Pipeline
    job: dict[str, Any]
    timeout_s: float
    priority: int = 0
    idempotency_key: str = ""
    digest: str = ""
    #: Media that the request brought: one item of named tensors.
    inputs: Sequence[payloads.Item] = ()


def digest(endpoint: str, request: msgspec.Struct) -> str:
    """Fingerprint of what the client sent, before anything is drawn at random: tells its retry from another request."""
    text = msgspec.json.encode([endpoint, request], order="sorted")
    return hashlib.sha256(text).hexdigest()[:32]


def idempotency_key(value: str | None) -> str:
    """The Idempotency-Key header, or "" without one. Raises InvalidRequest."""
    if value is None:
        return ""
    if not _IDEMPOTENCY_KEY.fullmatch(value):
        raise errors.InvalidRequest(
            "Idempotency-Key must be 1 to 255 printable ASCII characters.", param="Idempotency-Key"
        )
    return value


Make = Callable[[Call[store.Submission]], store.Submission]


def accept(services: Services, ask: Ask, job_id: str, reply_to: str = "", make: Make | None = None) -> store.Submission:
    """Write the job's record, then enqueue its first stage; a job that a retry finds is only named.

    ``make`` makes the call, in place of the store.

    Raises Busy, Conflict, BrokerUnavailable, NoRoom: in each case nothing was enqueued.
    """
    owed = store.Owed(job_id, 0)
    message = chain.message(ask.pipeline, services.store, owed, ask.priority)
    given = services.payloads.put(services.payloads.input_name(job_id), ask.inputs) if ask.inputs else None
    call = calls.submit(
        ask.pipeline,
        ask.job,
        job_id=job_id,
        reply_to=reply_to,
        timeout_s=ask.timeout_s,
        priority=ask.priority,
        input_reference=given,
        idempotency_key=ask.idempotency_key,
        request_digest=ask.digest or None,
        message=message,
        trace=traces.parent(),
    )
    try:
        submission = (make or services.store.make)(call)
    except errors.QueueFull as exc:
        _release(services, given)
        raise _busy(services, ask, exc) from exc
    except errors.Conflict:
        _release(services, given)
        raise
    logs.now_about(job=submission.job_id)
    flask.g.job_id = submission.job_id  # every answer from here on names the job
    if submission.existing:
        _release(services, given)
    elif message is None:
        # Should this fail, the record says that the work is owed, and a reaper enqueues it.
        chain.publish(ask.pipeline, owed, ask.priority)
    return submission


def _release(services: Services, given: payloads.Reference | None) -> None:
    """Remove media of a job that was not made; what a lost answer of Redis leaves in doubt is left to the sweep."""
    if given is not None:
        services.payloads.release([given.name])


def complete(services: Services, ask: Ask) -> job.Job:
    """Submit and wait; a client that leaves cancels its job, unless an Idempotency-Key says that it may come back.

    Raises what :func:`accept` raises, JobExpired, and JobEnded for a job that ends without a result.
    """
    waiter, job_id = services.waiter, store.new_id()
    with waiter.expect(job_id) as waiting:
        # Nothing has to be done with the answer: it comes while the job runs, and no thread wakes up for it.
        soon = services.store.holds_queues and not ask.inputs and not ask.idempotency_key
        make = functools.partial(waiter.submit, waiting) if soon else None
        submission = accept(services, ask, job_id, waiter.reply_to, make)
        if not submission.existing:
            try:
                return _succeeded(_wait_for_client(services, ask, waiting))
            except errors.QueueFull as exc:
                raise _busy(services, ask, exc) from exc
            finally:
                if not waiting.submitted:  # there may be no such job
                    flask.g.pop("job_id")
    with waiter.expect(submission.job_id) as waiting:
        waiting.woken.set()  # it may have ended long ago
        return _succeeded(waiter.wait(waiting, ask.timeout_s + GRACE_S))


class Watch:
    """A submitted job that is watched while it runs: iterating yields None whenever it may have said something.

    The last thing yielded is the record, once it is terminal. A watch that is closed before has lost its client: the
    job is cancelled, unless an Idempotency-Key says that the client may come back.
    """

    def __init__(self, services: Services, ask: Ask) -> None:
        """Submit. Raises what :func:`accept` raises."""
        self._services, self._ask = services, ask
        self._left = client_left(flask.request.environ)
        self._ended = False
        self._stack = contextlib.ExitStack()
        self._deadline = time.monotonic() + ask.timeout_s + GRACE_S
        self.job_id = store.new_id()
        #: Unix seconds: now, or when the job was made that a retry finds.
        self.created_at = time.time()
        self._waiting = self._stack.enter_context(services.waiter.expect(self.job_id))
        try:
            submission = accept(services, ask, self.job_id, services.waiter.reply_to)
            if submission.existing:
                self.job_id = submission.job_id
                if (record := services.store.job(self.job_id)) is not None:
                    self.created_at = record.created_at
                self._waiting = self._stack.enter_context(services.waiter.expect(self.job_id))
                self._waiting.woken.set()  # it may have ended long ago
        except BaseException:
            self._stack.close()
            raise

    def __iter__(self) -> Iterator[job.Job | None]:
        """Raises JobFailed for a record that vanished, JobExpired, ShuttingDown, ClientLeft."""
        while time.monotonic() < self._deadline:
            record = self._services.waiter.hear(self._waiting, wait.RECHECK_S)
            self._ended = record is not None
            yield record
            if record is not None:
                return
            if self._left():
                raise wait.ClientLeft(f"The client of job {self.job_id} closed its connection.")
        raise errors.JobExpired(f"Job {self.job_id} did not end within its time limit.")

    def close(self) -> None:
        """Stop watching; may be called twice."""
        self._stack.close()
        if not self._ended and not self._ask.idempotency_key and not self._services.stopping.is_set():
            self._ended = True
            with contextlib.suppress(errors.BrokerUnavailable):  # then its deadline ends it
                self._services.store.cancel(self.job_id)


def _wait_for_client(services: Services, ask: Ask, waiting: wait.Waiting) -> job.Job:
    left = (lambda: False) if ask.idempotency_key else client_left(flask.request.environ)
    try:
        return services.waiter.wait(waiting, ask.timeout_s + GRACE_S, left)
    except wait.ClientLeft:
        services.store.cancel(waiting.job_id)
        raise


def client_left(environ: Mapping[str, Any]) -> Callable[[], bool]:
    """Whether the client has closed its connection; False where the server does not show its socket."""
    connection = environ.get("gunicorn.socket")

    def left() -> bool:
        try:
            return connection is not None and connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except (BlockingIOError, ValueError):  # nothing to read; a TLS socket cannot be asked
            return False
        except OSError:
            return True

    return left


def _succeeded(record: job.Job) -> job.Job:
    if record.state is not job.JobState.SUCCEEDED:
        raise JobEnded(record)
    return record


def _busy(services: Services, ask: Ask, exc: errors.QueueFull) -> Busy:
    return Busy(exc.message, _retry_after_s(services, ask.pipeline))


def _retry_after_s(services: Services, pipe: Pipeline) -> int:
    """As long as the oldest waiting job has waited: about what the queue needs to move on by its length."""
    oldest_s = max(services.store.waiting(stage.queue)[1] for stage in pipe.stages)
    low, high = _RETRY_AFTER_S
    return min(high, max(low, round(oldest_s)))


def warnings(pipe: Pipeline, record: job.Job) -> dict[str, list[str]]:
    """What the request said that its model does not use: never silently."""
    said = [name for name in pipe.unused_fields if record.request.get(name) is not None]
    return {"warnings": [f"{name}: this model takes it and does not use it." for name in said]} if said else {}
