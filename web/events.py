"""A job's changes as server-sent events."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import flask
import msgspec

from omniqueue import errors, job
from web import job_view, openai_format, wait
from web.services import Services

log = logging.getLogger(__name__)

#: How often the record is read, in seconds.
POLL_S = 0.25
#: WSGI notices that a client has left only when it writes, so something is written this often, in seconds.
KEEP_ALIVE_S = 3.0
#: No proxy may hold events back.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
#: After the job's deadline: time for the reaper to end the job.
_GRACE_S = 10.0


def response(services: Services, record: job.Job) -> flask.Response:
    """``event: status`` with the job object now and on every change; the terminal one ends the stream."""
    # Inside the request's context, which the URLs in a result need.
    body = flask.stream_with_context(_events(services, record))
    return flask.Response(body, content_type="text/event-stream; charset=utf-8", headers=HEADERS)


def _events(services: Services, record: job.Job) -> Iterator[bytes]:
    """The stream, which has one last event whatever happens: a terminal status, or why there will be none."""
    try:
        yield from _changes(services, record)
    except errors.OmniqueueError as exc:
        yield event("error", openai_format.of_error(exc).body())
    except Exception:  # the status line is long gone, so this is the only way to say it
        log.exception("action=stream_crashed job=%s", record.id)
        yield event("error", openai_format.CRASHED.body())


def _changes(services: Services, record: job.Job) -> Iterator[bytes]:
    """Statuses until the terminal one; the client leaving closes the generator at its next write.

    Raises NotFound for a job that was deleted, JobExpired when nobody ended it, ShuttingDown.
    """
    shown: dict[str, Any] = {}
    written_at = 0.0
    best = 0.0
    # By durations only: this host's clock need not agree with Redis's.
    ends_at = time.monotonic() + record.deadline - record.created_at + _GRACE_S
    while not services.stopping.is_set():
        if (view := _view(services, record.id, shown)) is None:
            raise errors.NotFound(f"Job {record.id} was deleted.")
        if view is not shown:
            # A stage that is tried again starts over; what has been shown does not go back.
            best = view["progress"] = max(best, view["progress"])
        if view != shown:
            yield event("status", view)
            shown, written_at = view, time.monotonic()
        elif time.monotonic() - written_at >= KEEP_ALIVE_S:
            yield b": keep-alive\n\n"
            written_at = time.monotonic()
        if shown and job.JobState(shown["status"]).terminal:
            return
        if time.monotonic() > ends_at:
            raise errors.JobExpired()
        services.stopping.wait(POLL_S)
    raise wait.ShuttingDown(record.id)


def _view(services: Services, job_id: str, shown: dict[str, Any]) -> dict[str, Any] | None:
    """The job as it is now; while Redis is away, what was shown. None when there is no such job any more."""
    try:
        record = services.store.job(job_id)
        return None if record is None else job_view.of(services, record)
    except errors.BrokerUnavailable:
        return shown


def event(name: str, body: Any) -> bytes:
    """One server-sent event."""
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode(body) + b"\n\n"
