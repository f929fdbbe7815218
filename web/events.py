"""A job's changes as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import flask
import msgspec

from omniqueue import errors, job
from web import job_view, openai_format
from web.services import Services

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
    """The stream; the client leaving closes the generator at its next write, and so does the router's shutdown."""
    latest: job.Job | None = record
    shown: dict[str, Any] = {}
    written_at = 0.0
    best = 0.0
    # By durations only: this host's clock need not agree with Redis's.
    ends_at = time.monotonic() + record.deadline - record.created_at + _GRACE_S
    while not services.stopping.is_set():
        if latest is None:
            yield event("error", openai_format.of_error(errors.NotFound(f"Job {record.id} was deleted.")).body())
            return
        view = job_view.of(services, latest)
        # A stage that is tried again starts over; what has been shown does not go back.
        best = view["progress"] = max(best, view["progress"])
        if view != shown:
            yield event("status", view)
            shown, written_at = view, time.monotonic()
        elif time.monotonic() - written_at >= KEEP_ALIVE_S:
            yield b": keep-alive\n\n"
            written_at = time.monotonic()
        if latest.state.terminal:
            return
        if time.monotonic() > ends_at:
            yield event("error", openai_format.of_error(errors.JobExpired()).body())
            return
        services.stopping.wait(POLL_S)
        latest = _again(services, latest)


def _again(services: Services, latest: job.Job) -> job.Job | None:
    """The record as it is now; while Redis is away, as it was."""
    try:
        return services.store.job(latest.id)
    except errors.BrokerUnavailable:
        return latest


def event(name: str, body: Any) -> bytes:
    """One server-sent event."""
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode(body) + b"\n\n"
