"""Every error a user can meet, as one small tree; the docstring is the sentence shown when no other is given."""

from __future__ import annotations

from typing import ClassVar


class OmniqueueError(Exception):
    """Something went wrong inside omniqueue."""

    #: HTTP status the router answers with.
    status: ClassVar[int] = 500
    #: OpenAI's ``error.type``.
    type: ClassVar[str] = "server_error"
    #: OpenAI's ``error.code``.
    code: ClassVar[str | None] = None

    def __init__(self, message: str | None = None, *, param: str | None = None) -> None:
        """``param`` is the request field or configuration path at fault, if there is one."""
        self.message = message or (self.__doc__ or "").strip()
        self.param = param
        super().__init__(self.message)


class InvalidRequest(OmniqueueError):
    """The request is not valid; the message names the field."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ModelNotFound(InvalidRequest):
    """No pipeline here serves that model; GET /v1/models lists the names."""

    status = 404
    code = "model_not_found"


class NotFound(InvalidRequest):
    """There is nothing under that id; it never existed or its time to live has passed."""

    status = 404
    code = "not_found"


class Conflict(InvalidRequest):
    """The object is in a state that does not allow this."""

    status = 409
    code = "conflict"


class PayloadTooLarge(InvalidRequest):
    """The request body is larger than this server accepts."""

    status = 413
    code = "request_too_large"


class QueueFull(OmniqueueError):
    """The pipeline has as many jobs as it accepts; try again in a few seconds."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class BrokerUnavailable(OmniqueueError):
    """Redis does not answer; try again (with an Idempotency-Key nothing runs twice), and check OMNIQUEUE_REDIS_URL."""

    status = 503
    type = "service_unavailable"
    code = "broker_unavailable"


class NotReady(OmniqueueError):
    """A stage has no live worker."""

    status = 503
    type = "service_unavailable"
    code = "not_ready"


class JobFailed(OmniqueueError):
    """The job failed; the message names the stage and the reason."""

    code = "job_failed"


class JobCancelled(OmniqueueError):
    """The job was cancelled before it finished."""

    status = 409
    type = "invalid_request_error"
    code = "job_cancelled"


class JobExpired(OmniqueueError):
    """The job did not finish before its deadline."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class ConfigError(OmniqueueError):
    """The configuration is not valid; the message gives the path in the file and the nearest right name."""

    code = "config_error"


class PayloadError(OmniqueueError):
    """A payload in shared memory is missing or damaged."""

    code = "payload_error"


class NoRoom(PayloadError):
    """/dev/shm is too small for the payload; raise its size (docker: shm_size) or run fewer requests at once."""

    status = 507
    type = "insufficient_storage"
    code = "no_room"


class EngineError(OmniqueueError):
    """The engine refused or failed this request; others in the same engine are not affected."""

    code = "engine_error"


class EngineRejected(EngineError):
    """The engine says that the request itself is at fault (too long, unsupported); a retry would fail the same way."""

    status = 400
    type = "invalid_request_error"
    code = "engine_rejected"


class Stopped(EngineError):
    """The work was stopped because its job was cancelled, has ended, or was given to another worker."""

    code = "stopped"


class HandedBack(EngineError):
    """This worker is shutting down; the stage goes back to its queue."""

    code = "handed_back"


class EngineDead(EngineError):
    """The engine is gone; the worker process has to be restarted."""

    status = 503
    code = "engine_dead"
