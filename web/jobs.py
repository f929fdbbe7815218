"""/v1/jobs: any pipeline as a job that outlives the connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import flask
from msgspec import Meta

from omniqueue import errors, job, store
from web import answers, decode, events, images, job_view, openai_format, openapi, schema, submission
from web.services import Services, current

blueprint = flask.Blueprint("jobs", __name__)

_MAX_LIMIT = 100
#: More than can be created in one microsecond, which is how exactly times order jobs.
_TIES = 8


@blueprint.post("/v1/jobs")
def create() -> flask.Response:
    """Accept a job and answer at once; 202 also for a retry with the same Idempotency-Key."""
    services, content = current(), decode.json_object()
    kind = content.get("type")
    if kind not in (None, "image"):
        raise errors.InvalidRequest("type must be 'image'; other kinds of jobs are not served here.", param="type")
    ask = images.ask_for(services, decode.typed(content, schema.ImageJob), "jobs")
    job_id = submission.accept(services, ask, store.new_id()).job_id
    body = job_view.of(services, _record(services, job_id))
    headers = {"Location": flask.url_for("jobs.retrieve", job_id=job_id)}
    return openai_format.reply(body, 202, headers)


@blueprint.get("/v1/jobs")
def index() -> flask.Response:
    """Jobs by creation time, the newest first unless ``order`` is asc; ``after`` is the last id of the page before."""
    services = current()
    limit, ascending, after = page(services.store.job)
    found = listed(services, limit + 1, ascending, after)
    data = [job_view.of(services, record) for record in found[:limit]]
    return openai_format.reply(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(found) > limit,
        }
    )


@blueprint.get("/v1/jobs/<job_id>")
def retrieve(job_id: str) -> flask.Response:
    """One job."""
    services = current()
    return openai_format.reply(job_view.of(services, _record(services, job_id)))


@blueprint.delete("/v1/jobs/<job_id>")
def delete(job_id: str) -> flask.Response:
    """Cancel a live job (202, ``cancelling`` until its worker confirms); forget a finished one with its files (200)."""
    services = current()
    record = _record(services, job_id)
    if not record.state.terminal:
        services.store.cancel(job_id)
        if (left := services.store.job(job_id)) is not None:
            return openai_format.reply(job_view.of(services, left), 202)
    else:
        services.media.remove(record.result)  # before the record, which is all that knows of them
        services.store.delete(job_id)
    # Also when another DELETE of this job forgot it in the moment after this one had cancelled it.
    return openai_format.reply({"id": job_id, "object": "job.deleted", "deleted": True})


@blueprint.get("/v1/jobs/<job_id>/events")
def follow(job_id: str) -> flask.Response:
    """The job object again whenever it changes, as server-sent events; the last one is terminal."""
    services = current()
    return events.response(services, _record(services, job_id))


def _record(services: Services, job_id: str) -> job.Job:
    record = services.store.job(job_id)
    if record is None:
        raise _unknown(job_id)
    flask.g.job_id = job_id
    return record


def _unknown(job_id: str) -> errors.NotFound:
    return errors.NotFound(f"There is no job {job_id[:100]!r}; it never existed or its time to live has passed.")


def page(find: Callable[[str], job.Job | None]) -> tuple[int, bool, job.Job | None]:
    """limit, ascending and the job to go on after, which ``find`` knows by its id. Raises InvalidRequest."""
    arguments = flask.request.args
    known = [parameter.name for parameter in PAGE]
    for name, given in arguments.lists():
        if name not in known:
            raise errors.InvalidRequest(f"A list takes {', '.join(known)}, not {name[:100]!r}.", param=name[:100])
        if len(given) > 1:
            raise errors.InvalidRequest(f"{name} is given {len(given)} times.", param=name)
    text, order, after = arguments.get("limit", "20"), arguments.get("order", "desc"), arguments.get("after")
    if not (text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= _MAX_LIMIT):
        raise errors.InvalidRequest(f"limit must be a whole number from 1 to {_MAX_LIMIT}.", param="limit")
    if order not in ("asc", "desc"):
        raise errors.InvalidRequest("order must be asc or desc.", param="order")
    start = find(after) if after is not None else None
    if after is not None and start is None:
        raise errors.InvalidRequest(f"after must be an id of this list; there is no {after[:100]!r}.", param="after")
    return int(text), order == "asc", start


def listed(services: Services, count: int, ascending: bool, after: job.Job | None) -> list[job.Job]:
    """Up to ``count`` jobs of all pipelines, in order."""
    bound = None if after is None else after.created_at
    found = [
        record
        for pipe in services.catalog.pipelines
        for record in services.store.jobs(pipe.name, count + _TIES, bound, ascending=ascending)
    ]
    found.sort(key=_order, reverse=not ascending)
    if after is not None:
        mark = _order(after)
        found = [record for record in found if (_order(record) > mark if ascending else _order(record) < mark)]
    return found[:count]


def _order(record: job.Job) -> tuple[Any, ...]:
    return record.created_at, record.id


#: The parameters of a list.
PAGE = (
    openapi.Parameter("limit", "query", Annotated[int, Meta(ge=1, le=_MAX_LIMIT)], "Entries on a page; 20."),
    openapi.Parameter("order", "query", Literal["asc", "desc"], "desc: the newest first."),
    openapi.Parameter("after", "query", Annotated[str, Meta(min_length=1)], "The last id of the page before."),
)
operations = (
    openapi.Operation(
        method="POST",
        path="/v1/jobs",
        summary="Make a picture as a job, and answer at once",
        request=schema.ImageJob,
        responses={202: answers.Job},
        parameters=(openapi.IDEMPOTENCY_KEY,),
        errors=(404, 409, 413, 415),
        headers={202: ("Location", "X-Omniqueue-Job-Id")},
    ),
    openapi.Operation(
        method="GET",
        path="/v1/jobs",
        summary="Jobs by creation time",
        responses={200: answers.Jobs},
        parameters=PAGE,
    ),
    openapi.Operation(
        method="GET",
        path="/v1/jobs/{job_id}",
        summary="One job",
        responses={200: answers.Job},
        parameters=(openapi.JOB_ID,),
        errors=(404,),
    ),
    openapi.Operation(
        method="DELETE",
        path="/v1/jobs/{job_id}",
        summary="Cancel a live job, or forget a finished one with its files",
        responses={200: answers.JobDeleted, 202: answers.Job},
        parameters=(openapi.JOB_ID,),
        errors=(404,),
    ),
    openapi.Operation(
        method="GET",
        path="/v1/jobs/{job_id}/events",
        summary="A job's changes as server-sent events",
        responses={
            200: openapi.Content(
                ("text/event-stream",), "Each `status` event holds the job; one that is terminal, or `error`, is last."
            )
        },
        parameters=(openapi.JOB_ID,),
        errors=(404,),
    ),
)
