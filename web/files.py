"""GET /v1/files/<name>: finished media, streamed from the media store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import flask

from omniqueue import errors, media
from web import openapi
from web.services import Services, current

blueprint = flask.Blueprint("files", __name__)

_CHUNK_BYTES = 256 * 1024


class OutOfRange(errors.InvalidRequest):
    """The Range header asks for what lies behind the file's end."""

    status = 416
    code = "range_not_satisfiable"


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
    """A file of the media store as an answer, or the part that a GET asks for. Raises NotFound, OutOfRange."""
    file = services.media.open(name)
    size = file.seek(0, 2)
    try:
        span = _span(size)
    except OutOfRange:
        file.close()
        raise
    start, end = span or (0, size)
    file.seek(start)
    body = () if flask.request.method == "HEAD" else _chunks(file, end - start)
    answer = flask.Response(body, 206 if span else 200, content_type=content_type)
    answer.call_on_close(file.close)
    answer.content_length = end - start
    if span:
        answer.headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    if flask.request.method in ("GET", "HEAD"):
        answer.headers["Accept-Ranges"] = "bytes"
    return answer


def _span(size: int) -> tuple[int, int] | None:
    """The part that is asked for, which players need to seek; None for the whole. Raises OutOfRange.

    Several parts, other units, a broken header and a condition get the whole, as HTTP has it.
    """
    asked, method = flask.request.range, flask.request.method
    if method != "GET" or asked is None or asked.units != "bytes" or len(asked.ranges) != 1:
        return None
    if "If-Range" in flask.request.headers:  # no file has a version to compare with
        return None
    start, end = asked.ranges[0]
    start = max(0, size + start) if start < 0 else start
    if start >= size:
        raise OutOfRange(f"Range: the file has {size:,} bytes.", param="Range")
    return start, size if end is None else min(end, size)


def _content_type(name: str) -> str:
    return media.CONTENT_TYPES.get(name.rpartition(".")[2], "application/octet-stream")


def _chunks(file: BinaryIO, left: int) -> Iterator[bytes]:
    while chunk := file.read(min(_CHUNK_BYTES, left)):
        yield chunk
        left -= len(chunk)


#: For the routes that give a part of a file.
RANGE = openapi.Parameter("Range", "header", str | None, "A part of the file, such as bytes=0-1023.")
_FILE = openapi.Content(tuple(dict.fromkeys(media.CONTENT_TYPES.values())), "The file.")
operations = (
    openapi.Operation(
        method="GET",
        path="/v1/files/{name}",
        summary="Finished media, by the name that a result gave",
        responses={200: _FILE, 206: _FILE},
        parameters=(openapi.Parameter("name", "path", str, "A file's name, as in the URL of a result."), RANGE),
        errors=(404, 416),
    ),
)
