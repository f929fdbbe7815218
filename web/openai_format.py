"""Answers in OpenAI's shapes: JSON bodies, and one error shape for whatever goes wrong."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import flask
import msgspec
from werkzeug.exceptions import HTTPException

from omniqueue import errors, job
from web import submission

log = logging.getLogger(__name__)

#: Every answer about a job names it here, also when it failed.
_JOB_HEADER = "X-Omniqueue-Job-Id"

#: What a failed job's code means for its client; any other code is our own fault, 500.
_JOB_ERRORS: Mapping[str, type[errors.OmniqueueError]] = {
    kind.code: kind
    for kind in (errors.EngineRejected, errors.NoRoom, errors.JobExpired, errors.JobCancelled)
    if kind.code
}
_HTTP_CODES = {
    404: ("not_found", "There is nothing at {method} {path}."),
    405: ("method_not_allowed", "{path} does not take {method}."),
    413: ("request_too_large", "The body is larger than this server accepts."),
}


@dataclass(frozen=True)
class Problem:
    """An error as it leaves the server."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """OpenAI's error object; what came in with a broken encoding goes out escaped."""
        message = self.message.encode("utf-8", "backslashreplace").decode()
        return {"error": {"message": message, "type": self.type, "param": self.param, "code": self.code}}


#: A fault of ours: the log has the details, the client a sentence.
CRASHED = Problem(500, "The router failed; its log has the details.", "server_error", "internal_error")


def reply(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> flask.Response:
    """A JSON response."""
    response = flask.Response(msgspec.json.encode(body) + b"\n", status, content_type="application/json")
    response.headers.update(headers or {})
    return response


def error_reply(problem: Problem) -> flask.Response:
    """An error response."""
    return reply(problem.body(), problem.status, problem.headers)


def of_error(exc: errors.OmniqueueError) -> Problem:
    """Our own exceptions carry what the client needs."""
    if isinstance(exc, submission.JobEnded):
        return of_job(exc.record)
    headers = {}
    if (retry_after_s := getattr(exc, "retry_after_s", None)) is not None:
        headers["Retry-After"] = str(retry_after_s)
    elif exc.status == 503:
        headers["Retry-After"] = "1"
    return Problem(exc.status, exc.message, exc.type, exc.code, exc.param, headers)


def of_job(record: job.Job) -> Problem:
    """Why a job has no result, with the stage, the reason and the number of attempts."""
    facts = job_error(record)
    kind = _JOB_ERRORS.get(facts["code"], errors.JobFailed)
    return Problem(kind.status, facts["message"], kind.type, facts["code"], facts.get("param"))


def job_error(record: job.Job) -> dict[str, Any]:
    """The ``error`` of a job that ended without a result."""
    told = dict(record.error or {})
    if record.state is job.JobState.CANCELLED:
        return {"code": errors.JobCancelled.code, "message": errors.JobCancelled().message}
    attempts = int(told.get("attempts", 0))
    where = f"Stage {told.get('stage', record.stage)} ({told.get('name', '?')})"
    tries = f"after {attempts} attempt{'' if attempts == 1 else 's'}" if attempts else "before its first attempt"
    reason = str(told.get("message", "no reason was recorded"))
    if record.state is job.JobState.EXPIRED:
        limit_s = record.deadline - record.created_at
        message = f"The job did not end within its {round(limit_s, 3):g} s. {where}, {tries}: {reason}"
        return {**told, "code": errors.JobExpired.code, "message": message}
    return {**told, "code": told.get("code") or errors.JobFailed.code, "message": f"{where} failed {tries}: {reason}"}


def _name_job(response: flask.Response) -> flask.Response:
    if "job_id" in flask.g:
        response.headers[_JOB_HEADER] = flask.g.job_id
    return response


def register(app: flask.Flask) -> None:
    """Turn every exception into an error response."""
    app.after_request(_name_job)
    app.register_error_handler(errors.OmniqueueError, _on_own)
    app.register_error_handler(HTTPException, _on_http)
    app.register_error_handler(Exception, _on_unexpected)


def _on_own(exc: errors.OmniqueueError) -> flask.Response:
    problem = of_error(exc)
    if problem.status >= 500:
        log.warning("action=request_failed path=%s status=%s error=%s", flask.request.path, problem.status, exc)
    return error_reply(problem)


def _on_http(exc: HTTPException) -> flask.Response | HTTPException:
    status = exc.code or 500
    if status < 400:
        return exc  # a redirect
    phrase = HTTPStatus(status).phrase
    code, text = _HTTP_CODES.get(status, (phrase.lower().replace(" ", "_"), exc.description or phrase))
    message = text.format(method=flask.request.method, path=flask.request.path[:200])
    kept = {name: value for name, value in exc.get_headers() if name in ("Allow", "Retry-After")}
    kind = "invalid_request_error" if status < 500 else "server_error"
    return error_reply(Problem(status, message, kind, code, headers=kept))


def _on_unexpected(exc: Exception) -> flask.Response:
    log.error("action=request_crashed path=%s", flask.request.path, exc_info=exc)
    return error_reply(CRASHED)
