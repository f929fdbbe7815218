"""A multipart body as a typed request: text fields and files, checked by the same kind of type as a JSON body."""

from __future__ import annotations

import io
from typing import Any, TypeVar

import flask
import msgspec
from gunicorn.http.errors import ParseException
from werkzeug.exceptions import ClientDisconnected
from werkzeug.formparser import FormDataParser

from omniqueue import errors
from web import decode
from web.services import current

T = TypeVar("T", bound=msgspec.Struct)

#: Largest text field in bytes; files are bounded by the body's limit.
_MAX_TEXT_BYTES = 500_000
_MAX_PARTS = 128


class NotMultipart(decode.UnsupportedMediaType):
    """Send a form, with the header Content-Type: multipart/form-data."""


def body(kind: type[T]) -> T:
    """The multipart body of the request in hand as ``kind``; fields of ``bytes`` are files, lists may come repeatedly.

    Raises InvalidRequest that names the field, PayloadTooLarge.
    """
    texts, files = _parts()
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    value: dict[str, Any] = {}
    for source, is_file in ((texts, False), (files, True)):
        for name, given in source.items():
            if name in value:
                raise errors.InvalidRequest(f"{name[:100]} is given both as a text and as a file.", param=name[:100])
            if (field := fields.get(name)) is None:
                value[name] = given  # typed() refuses it, with the nearest right name
                continue
            _check_kind(name, field.type, is_file)
            if not _holds(field.type, list) and len(given) > 1:
                raise errors.InvalidRequest(f"{name} is given {len(given)} times.", param=name)
            value[name] = given if _holds(field.type, list) else given[0]
    return decode.typed(value, kind, strict=False)


def _parts() -> tuple[dict[str, list[str]], dict[str, list[bytes]]]:
    """Texts and files by name, in order."""
    request = flask.request
    if request.mimetype != "multipart/form-data":
        raise NotMultipart()
    request.max_content_length = current().config.max_upload_bytes
    parser = FormDataParser(
        lambda *_, **__: io.BytesIO(), max_form_memory_size=_MAX_TEXT_BYTES, max_form_parts=_MAX_PARTS, silent=False
    )
    try:
        _, texts, files = parser.parse(
            request.stream, request.mimetype, request.content_length, request.mimetype_params
        )
        contents = {str(name): [file.stream.read() for file in given] for name, given in files.lists()}
    except ClientDisconnected:
        raise errors.InvalidRequest("The body ended, or paused for too long, before it was complete.") from None
    except (ValueError, ParseException) as exc:
        raise errors.InvalidRequest(f"The body is not a well-formed form: {str(exc)[:200]}.") from None
    return {name: [_text(name, text) for text in given] for name, given in texts.lists()}, contents


def _text(name: str | None, text: str) -> str:
    """Werkzeug puts U+FFFD for what is not UTF-8, which would be something else than what was sent."""
    if name is None:
        raise errors.InvalidRequest("A part of the form has no name.")
    if "\ufffd" in text or "\ufffd" in name:
        raise errors.InvalidRequest(f"{name[:100]} must be UTF-8.", param=name[:100])
    return text


def _check_kind(name: str, declared: Any, is_file: bool) -> None:
    if _holds(declared, bytes) != is_file:
        words = "a text field, without a file name" if is_file else "a file, with a file name"
        raise errors.InvalidRequest(f"{name} must be {words}.", param=name)


def _holds(declared: Any, kind: type) -> bool:
    """Whether a field's type is ``kind``, or has it in it."""
    if declared is kind or getattr(declared, "__origin__", None) is kind:
        return True
    return any(_holds(part, kind) for part in getattr(declared, "__args__", ()))
