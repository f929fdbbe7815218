"""GET /v1/files/<name>: finished media, streamed from the media store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import flask

from omniqueue import media
from web import openapi
from web.services import Services, current

blueprint = flask.Blueprint("files", __name__)

_CHUNK_BYTES = 256 * 1024


def url(services: Services, name: str) -> str:
    """Where a client gets a file: the configured public place, or this router as the client reached it."""
    if services.config.media_http_url:
        return f"{services.config.media_http_url.rstrip('/')}/{name}"
    return flask.request.host_url.rstrip("/") + flask.url_for("files.content", name=name)


@blueprint.get("/v1/files/<name>")
def content(name: str) -> flask.Response:
    """A file by the name that a result gave. Names are checked before anything is opened."""
    answer = response(current(), name, _content_type(name))
    # A name is never used twice, so what it stands for never changes.
    answer.headers["Cache-Control"] = "private, max-age=31536000, immutable"
    return answer


def response(services: Services, name: str, content_type: str) -> flask.Response:
    """A file of the media store as an answer. Raises NotFound."""
    file = services.media.open(name)
    size = file.seek(0, 2)
    file.seek(0)
    body = () if flask.request.method == "HEAD" else _chunks(file)
    answer = flask.Response(body, content_type=content_type)
    answer.call_on_close(file.close)
    answer.content_length = size
    answer.headers["X-Content-Type-Options"] = "nosniff"
    return answer


def _content_type(name: str) -> str:
    return media.CONTENT_TYPES.get(name.rpartition(".")[2], "application/octet-stream")


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


operations = (
    openapi.Operation(
        method="GET",
        path="/v1/files/{name}",
        summary="Finished media, by the name that a result gave",
        responses={200: openapi.Content(tuple(dict.fromkeys(media.CONTENT_TYPES.values())), "The file.")},
        parameters=(openapi.Parameter("name", "path", str, "A file's name, as in the URL of a result."),),
        errors=(404,),
    ),
)
