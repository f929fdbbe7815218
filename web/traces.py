"""A span for every request that is worth one, while tracing is on."""

from __future__ import annotations

from typing import Any

import flask

from omniqueue import tracing

#: Asked again and again by machines; a span each would bury the rest.
_QUIET = frozenset({"/health", "/ready", "/metrics"})


def attach(app: flask.Flask) -> None:
    """Begin before the route is called, end when the answer has been sent."""
    app.before_request(_begin)
    app.after_request(_end)


def parent() -> str:
    """The request in hand, as the record of its job names it; "" while tracing is off."""
    return tracing.header_of(flask.g.get("span"))


def _begin() -> None:
    request = flask.request
    if tracing.active() and request.path not in _QUIET:
        route = request.url_rule.rule if request.url_rule else "other"
        facts = {"http.request.method": request.method, "http.route": route, "url.path": request.path[:200]}
        flask.g.span = tracing.begin_request(f"{request.method} {route}", request.headers.get("traceparent"), facts)


def _end(response: flask.Response) -> flask.Response:
    span: Any = flask.g.get("span")
    if span is not None:
        span.set_attribute("http.response.status_code", response.status_code)
        if "job_id" in flask.g:
            span.set_attribute("omniqueue.job.id", flask.g.job_id)
        response.call_on_close(span.end)
    return response
