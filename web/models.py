"""GET /v1/models, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import flask

from web import answers, openai_format, openapi
from web.services import Services, current

blueprint = flask.Blueprint("models", __name__)


@blueprint.get("/v1/models")
def models() -> flask.Response:
    """Every name that a request may give as ``model``."""
    services = current()
    data = [_model(services, name) for name in services.catalog.model_names()]
    return openai_format.reply({"object": "list", "data": data})


@blueprint.get("/v1/models/<path:name>")
def model(name: str) -> flask.Response:
    """One model; names of hub models have a slash in them."""
    return openai_format.reply(_model(current(), name))


def _model(services: Services, name: str) -> dict[str, Any]:
    pipe = services.catalog.for_model(name)
    return {
        "id": name,
        "object": "model",
        "created": int(services.started_at),
        "owned_by": "omniqueue",
        "pipeline": pipe.name,
        "output_types": sorted({stage.final_output_type or "image" for stage in pipe.final_stages}),
        "size": {
            "multiple": pipe.size.multiple,
            "min_side": pipe.size.min_side,
            "max_side": pipe.size.max_side,
            "max_area": pipe.size.max_area,
            "default": "{}x{}".format(*pipe.size.default),
        },
        "frames": {
            "step": pipe.frames.step,
            "max": pipe.frames.max_frames,
            "default": pipe.frames.default,
            "fps": pipe.frames.fps,
        },
        "voices": list(pipe.voices),
        "max_audio_s": pipe.max_audio_s,
        "max_n": pipe.max_n,
        "max_images": pipe.max_images,
        "extra_fields": list(pipe.extra_fields),
        "max_steps": pipe.max_steps,
        "max_prompt_chars": pipe.max_prompt_chars,
    }


operations = (
    openapi.Operation(method="GET", path="/v1/models", summary="Every served name", responses={200: answers.Models}),
    openapi.Operation(
        method="GET",
        path="/v1/models/{name}",
        summary="One model, and what it can make",
        responses={200: answers.Model},
        parameters=(openapi.Parameter("name", "path", str, "A served name; it may have slashes in it."),),
        errors=(404,),
    ),
)
