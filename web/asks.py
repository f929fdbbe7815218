"""What every kind of request does alike on its way to a job: choose the pipeline, and say where the job ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import flask

from omniqueue import errors, media
from omniqueue.pipeline import Pipeline, Stage
from web import files, schema, submission
from web.services import Services


def outputs(pipe: Pipeline) -> list[str]:
    """What a pipeline makes, in the order of its stages."""
    return [stage.final_output_type or "image" for stage in pipe.final_stages]


def pipeline(services: Services, model: str | None, kinds: tuple[str, ...], what: str) -> Pipeline:
    """The pipeline of that name; without one the first that makes the first of ``kinds`` that any makes.

    Raises ModelNotFound, and InvalidRequest for a model that makes none of them.
    """
    named = [services.catalog.for_model(model)] if model is not None else services.catalog.pipelines
    for kind in kinds:
        for pipe in named:
            if kind in outputs(pipe):
                return pipe
    said = f"{model} does not make {what}." if model is not None else f"No model here makes {what}."
    raise errors.InvalidRequest(said, param="model")


def last_stage(pipe: Pipeline, kinds: tuple[str, ...]) -> Stage:
    """The stage at which a job ends that asks for ``kinds``: the last that makes one of them."""
    return [stage for stage in pipe.final_stages if (stage.final_output_type or "image") in kinds][-1]


def text_stage(pipe: Pipeline) -> Stage | None:
    """The stage that writes the text which clients read, if there is one."""
    return next((stage for stage in pipe.final_stages if stage.final_output_type == "text"), None)


def ask(pipe: Pipeline, request: schema.Common, endpoint: str, job: Mapping[str, Any], last: Stage) -> submission.Ask:
    """A job that may be accepted. Raises InvalidRequest for a bad Idempotency-Key."""
    key = submission.idempotency_key(flask.request.headers.get("Idempotency-Key"))
    facts: dict[str, Any] = {
        "model": request.model or next(iter(pipe.served_model_names), pipe.name),
        "user": request.user,
    }
    if last.stage_id != pipe.stages[-1].stage_id:
        facts["last_stage"] = last.stage_id
    kept = {name: value for name, value in {**job, **facts}.items() if value is not None}
    return submission.Ask(
        pipeline=pipe,
        job=kept,
        timeout_s=request.request_timeout_s or pipe.request_timeout_s,
        priority=request.priority,
        idempotency_key=key,
        digest=submission.digest(endpoint, request) if key else "",
    )


def check_n(pipe: Pipeline, n: int) -> None:
    """Raise InvalidRequest for more answers than the pipeline gives to one request."""
    if n > pipe.max_n:
        raise errors.InvalidRequest(f"n must be from 1 to {pipe.max_n}.", param="n")


def refuse(request: schema.Common, names: tuple[str, ...], why: str) -> None:
    """Raise InvalidRequest for the first of these fields that the request says."""
    for name in names:
        if getattr(request, name) is not None:
            raise errors.InvalidRequest(f"{name} {why}; leave it out.", param=name)


def check_voice(pipe: Pipeline, voice: str | None, param: str = "voice") -> None:
    """Raise InvalidRequest for a voice that the model does not have; ``default`` is every model's own."""
    if voice is None or voice == "default" or voice in pipe.voices:
        return
    known = ", ".join(pipe.voices) or "no voices to choose from, so leave it out or say default"
    raise errors.InvalidRequest(f"{param} {voice[:100]!r} is not one of this model's: it has {known}.", param=param)


def read(services: Services, name: str) -> bytes:
    """A file of a result. Raises JobFailed when it is not where this router looks."""
    with _expected(services, name):
        return services.media.read(name)


def file(services: Services, name: str, content_type: str) -> flask.Response:
    """A file of a result as the answer. Raises JobFailed when it is not where this router looks."""
    with _expected(services, name):
        return files.response(services, name, content_type)


@contextlib.contextmanager
def _expected(services: Services, name: str) -> Iterator[None]:
    try:
        yield
    except errors.NotFound:
        if _forgotten(services, media.job_of(name)):
            raise
        raise errors.JobFailed(
            f"{name} was made, but it is not at {services.media.url} as this router sees it; OMNIQUEUE_MEDIA_FS_URL "
            "must name a place that the router and the last stage's workers share."
        ) from None


def _forgotten(services: Services, job_id: str) -> bool:
    """Whether the job was deleted while its file was asked for: files go a moment before their record."""
    for _ in range(5):
        if services.store.job(job_id) is None:
            return True
        services.stopping.wait(0.1)
    return False
