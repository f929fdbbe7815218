"""GET /v1/models, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import flask

from web import openai_format
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
    }
