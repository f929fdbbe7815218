"""The router: ``create_app`` is the whole stack, from the outside in."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flask

from omniqueue import catalog, celery_app, rate, settings
from web import (
    chat,
    decode,
    files,
    guard,
    health,
    images,
    jobs,
    metrics,
    models,
    openai_format,
    openapi,
    site,
    speech,
    videos,
)
from web.keys import Keys
from web.services import Services, attach

#: The families of endpoints: each has a blueprint and says its operations for the OpenAPI document.
FAMILIES = (images, chat, speech, videos, jobs, models, files, health, metrics, openapi, site)
_TCP = (socket.AF_INET, socket.AF_INET6)
_TEMPLATES = Path(__file__).parent / "page"


class _Flask(flask.Flask):
    def ensure_sync(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Nothing here is a coroutine: to look at each function for each request took a twentieth of its time."""
        return func


def _in_one_piece(response: flask.Response) -> flask.Response:
    """Head and body of an answer leave together: gunicorn sends one after the other, and each would wake the client."""
    connection = flask.request.environ.get("gunicorn.socket")
    if connection is not None and connection.family in _TCP and not response.is_streamed:
        _hold(connection, 1)
        response.call_on_close(lambda: _hold(connection, 0))
    return response


def _hold(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):  # the client has left
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, how)


def create_app(config: settings.Settings | None = None, known: catalog.Catalog | None = None) -> flask.Flask:
    """The WSGI application. Raises ConfigError when the environment or a stage config is not valid."""
    config = config or settings.load()
    celery_app.publish_only(config)
    app = _Flask("omniqueue.web", static_folder=None, template_folder=str(_TEMPLATES))
    app.config["MAX_CONTENT_LENGTH"] = decode.READ_BYTES
    services, keys = Services.build(config, known or catalog.load(config)), Keys.load(config)
    attach(app, services)
    guard.attach(app, keys, rate.RateLimit(config, services.store) if config.rate_limit else None)
    for family in FAMILIES:
        app.register_blueprint(family.blueprint)
    openapi.attach(app, [operation for family in FAMILIES for operation in family.operations], keys=bool(keys))
    openai_format.register(app)
    app.after_request(_in_one_piece)
    return app
