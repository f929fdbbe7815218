"""POST /v1/images/generations and /v1/images/edits, in OpenAI's shapes."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import flask
import msgspec

from omniqueue import errors, job, params, payloads, pictures, remote
from omniqueue.pipeline import Pipeline
from web import answers, asks, decode, files, form, job_view, openai_format, openapi, schema, submission
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
    "guidance_scale_2",
    "true_cfg_scale",
    "flow_shift",
    "output_format",
    "output_compression",
    "user",
)


@blueprint.post("/v1/images/generations")
def generations() -> flask.Response:
    """Make pictures and wait for them; the job's deadline bounds the wait."""
    request = decode.body(schema.ImageGeneration)
    return _completed(request, ask_for(current(), request, "images.generations"))


@blueprint.post("/v1/images/edits")
def edits() -> flask.Response:
    """Make pictures from pictures and a prompt, and wait for them."""
    services, request = current(), form.body(schema.ImageEdit)
    return _completed(request, _edit(services, request))


def _completed(request: schema.Awaited, ask: submission.Ask) -> flask.Response:
    services = current()
    record = submission.complete(services, ask)
    return openai_format.reply(_formatted(services, record, request))


def ask_for(services: Services, request: schema.Picture, endpoint: str, **more: Any) -> submission.Ask:
    """Everything that can be refused is refused here, before anything is submitted. Raises InvalidRequest.

    ``more`` are fields of the job beside those that every picture has.
    """
    if isinstance(request, schema.Awaited) and request.stream:
        raise errors.InvalidRequest("stream is not possible for pictures; leave it out.", param="stream")
    pipe = asks.pipeline(services, request.model, ("image",), "pictures")
    key = submission.idempotency_key(flask.request.headers.get("Idempotency-Key"))
    return submission.Ask(
        pipeline=pipe,
        job=_job(pipe, request, more),
        timeout_s=request.request_timeout_s or pipe.request_timeout_s,
        priority=request.priority,
        idempotency_key=key,
        digest=submission.digest(endpoint, request) if key else "",
    )


def _edit(services: Services, request: schema.ImageEdit) -> submission.Ask:
    """An edit's job and its pictures. What costs nothing is checked before a URL is opened or a file decoded."""
    for name, other in (("image", "image[]"), ("url", "url[]"), ("mask", "mask_image")):
        if _given(request, name) and _given(request, other):
            raise errors.InvalidRequest(f"{name} and {other} are the same; give one of them.", param=other)
    uploads, urls = request.image or request.image_array, request.url or request.url_array
    mask = request.mask if request.mask is not None else request.mask_image
    more = {
        "images": len(uploads) + len(urls),
        "strength": request.strength,
        "mask": True if mask is not None else None,
        "reference_image": True if request.reference_image is not None else None,
    }
    pipe = asks.pipeline(services, request.model, ("image",), "pictures")
    _check_count(pipe, len(uploads) + len(urls))
    ask = ask_for(services, request, "images.edits", **more)
    config = services.config
    files_by_name = [("image", "image", content) for content in uploads]
    for url in urls:
        files_by_name.append(
            ("image", "url", remote.fetch(url, config.allow_remote_media, "url", config.max_upload_bytes))
        )
    others = (("mask", mask), ("reference_image", request.reference_image))
    files_by_name += [(name, name, content) for name, content in others if content is not None]
    tensors = _decoded(files_by_name)
    height, width = tensors["image.0"].shape[:2]
    if request.size in (None, "auto"):
        params.check_size(width, height, pipe.size)
        ask.job.update(width=width, height=height)
    if mask is not None and tensors["mask"].shape[:2] != (height, width):
        raise errors.InvalidRequest("mask must be as large as the first picture.", param="mask")
    return dataclasses.replace(ask, inputs=(payloads.Item({}, tensors),))


def _decoded(given: Iterable[tuple[str, str, bytes]]) -> dict[str, payloads.Tensor]:
    """Tensors by name from (name, field, content); all pictures of a request share one limit of pixels."""
    tensors: dict[str, payloads.Tensor] = {}
    left = pictures.MAX_PIXELS
    for name, param, content in given:
        tensor = pictures.decode(content, param, left)
        left -= tensor.shape[0] * tensor.shape[1]
        tensors[f"image.{len(tensors)}" if name == "image" else name] = tensor
    return tensors


def _given(request: schema.ImageEdit, name: str) -> bool:
    [value] = [getattr(request, f.name) for f in msgspec.structs.fields(request) if f.encode_name == name]
    return value is not None and value != []


def _check_count(pipe: Pipeline, count: int) -> None:
    if not pipe.max_images:
        raise errors.InvalidRequest("This model does not edit pictures; GET /v1/models tells which do.", param="image")
    if not count:
        raise errors.InvalidRequest("image is missing; send one picture at least.", param="image")
    if count > pipe.max_images:
        raise errors.InvalidRequest(
            f"image is given {count} times; this model takes at most {pipe.max_images}.", param="image"
        )


def _job(pipe: Pipeline, request: schema.Picture, more: Mapping[str, Any]) -> dict[str, Any]:
    if request.output_format == "png" and request.output_compression != 100:
        raise errors.InvalidRequest(
            "output_compression needs output_format jpeg or webp; a png is lossless.", param="output_compression"
        )
    fields = {name: getattr(request, name) for name in _JOB_FIELDS}
    if request.size == "auto":
        fields["size"] = None
    model = request.model or next(iter(pipe.served_model_names), pipe.name)
    return params.image_job(pipe, **fields, **more, model=model)


def _formatted(services: Services, record: job.Job, asked: schema.Awaited) -> Mapping[str, Any]:
    result, request = record.result or {}, record.request
    data = []
    for entry in result.get("data", ()):
        if asked.response_format == "url":
            picture = {"url": files.url(services, entry["file"])}
        else:
            picture = {"b64_json": base64.b64encode(asks.read(services, entry["file"])).decode()}
        data.append({**picture, "revised_prompt": None, "seed": entry.get("seed")})
    return {
        "created": int(record.finished_at or record.created_at),
        "data": data,
        "size": f"{request['width']}x{request['height']}",
        "output_format": request["output_format"],
        "model": request["model"],
        **submission.warnings(services.catalog.named(record.pipeline), record),
        **({"metrics": _metrics(services, record)} if asked.return_stage_metrics else {}),
    }


def _metrics(services: Services, record: job.Job) -> dict[str, Any]:
    """Seconds that each stage ran, by its name. Read here: who waits for a job reads none of its stages."""
    whole = services.store.job(record.id)
    stages = job_view.of(services, whole)["stages"] if whole else []
    return {"stage_durations": {stage["name"]: stage["run_s"] for stage in stages}}


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
    openapi.Operation(
        method="POST",
        path="/v1/images/edits",
        summary="Make pictures from pictures and a prompt",
        request=schema.ImageEdit,
        request_type=openapi.FORM,
        responses={200: answers.Pictures},
        parameters=(openapi.IDEMPOTENCY_KEY,),
        errors=(*openapi.SUBMITS, 424),
        headers={200: ("X-Omniqueue-Job-Id",)},
    ),
)
