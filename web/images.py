"""POST /v1/images/generations, in OpenAI's shape."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import flask

from omniqueue import errors, job, params
from omniqueue.pipeline import Pipeline
from web import answers, decode, files, openai_format, openapi, schema, submission
from web.services import Services, current

blueprint = flask.Blueprint("images", __name__)

#: Fields of a request that go into the job as they are.
_JOB_FIELDS = (
    "prompt",
    "negative_prompt",
    "n",
    "size",
    "seed",
    "num_inference_steps",
    "guidance_scale",
    "output_format",
    "output_compression",
    "user",
)


@blueprint.post("/v1/images/generations")
def generations() -> flask.Response:
    """Make pictures and wait for them; the job's deadline bounds the wait."""
    services, request = current(), decode.body(schema.ImageGeneration)
    if request.stream:
        raise errors.InvalidRequest("stream is not possible for pictures; leave it out.", param="stream")
    ask = ask_for(services, request, "images.generations")
    record = submission.complete(services, ask)
    body = _formatted(services, record, request.response_format)
    return openai_format.reply(body)


def ask_for(services: Services, request: schema.Picture, endpoint: str) -> submission.Ask:
    """Everything that can be refused is refused here, before anything is submitted. Raises InvalidRequest."""
    pipe = services.catalog.for_model(request.model)
    if not any((stage.final_output_type or "image") == "image" for stage in pipe.final_stages):
        raise errors.InvalidRequest(f"{request.model or pipe.name} does not make pictures.", param="model")
    key = submission.idempotency_key(flask.request.headers.get("Idempotency-Key"))
    return submission.Ask(
        pipeline=pipe,
        job=_job(pipe, request),
        timeout_s=request.request_timeout_s or pipe.request_timeout_s,
        priority=request.priority,
        idempotency_key=key,
        digest=submission.digest(endpoint, request) if key else "",
    )


def _job(pipe: Pipeline, request: schema.Picture) -> dict[str, Any]:
    if request.output_format == "png" and request.output_compression != 100:
        raise errors.InvalidRequest(
            "output_compression needs output_format jpeg or webp; a png is lossless.", param="output_compression"
        )
    fields = {name: getattr(request, name) for name in _JOB_FIELDS}
    if request.size == "auto":
        fields["size"] = None
    model = request.model or next(iter(pipe.served_model_names), pipe.name)
    return params.image_job(pipe, **fields, model=model)


def _read(services: Services, name: str) -> bytes:
    try:
        return services.media.read(name)
    except errors.NotFound:
        raise errors.JobFailed(
            f"The picture {name} was made, but it is not at {services.media.url} as this router sees it; "
            "OMNIQUEUE_MEDIA_FS_URL must name a place that the router and the last stage's workers share."
        ) from None


def _formatted(services: Services, record: job.Job, response_format: str) -> Mapping[str, Any]:
    result, request = record.result or {}, record.request
    data = []
    for entry in result.get("data", ()):
        if response_format == "url":
            picture = {"url": files.url(services, entry["file"])}
        else:
            picture = {"b64_json": base64.b64encode(_read(services, entry["file"])).decode()}
        data.append({**picture, "revised_prompt": None, "seed": entry.get("seed")})
    return {
        "created": int(record.finished_at or record.created_at),
        "data": data,
        "size": f"{request['width']}x{request['height']}",
        "output_format": request["output_format"],
        "model": request["model"],
        **submission.warnings(services.catalog.named(record.pipeline), record),
    }


operations = (
    openapi.Operation(
        method="POST",
        path="/v1/images/generations",
        summary="Make pictures from a prompt",
        request=schema.ImageGeneration,
        responses={200: answers.Pictures},
        parameters=(openapi.IDEMPOTENCY_KEY,),
        errors=openapi.SUBMITS,
        headers={200: ("X-Omniqueue-Job-Id",)},
    ),
)
