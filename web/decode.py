"""A request body as a typed request, or an InvalidRequest that names the field."""

from __future__ import annotations

import collections
import difflib
import functools
import json
import re
import typing
from typing import Any, TypeVar

import flask
import msgspec
from gunicorn.http.errors import ParseException
from werkzeug.exceptions import ClientDisconnected

from omniqueue import errors

T = TypeVar("T", bound=msgspec.Struct)

#: Largest JSON body in bytes; input media come as multipart, not as JSON.
MAX_JSON_BYTES = 1 << 20
#: Werkzeug cuts a chunked body at its limit without a word, so one byte more is read and then counted.
READ_BYTES = MAX_JSON_BYTES + 1

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_EXPECTED = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_BOUND = re.compile(r"Expected `(\w+)` (.+)")
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "null": "null",
    "object": "an object",
    "array": "an array",
}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "above", "<": "below", "of length <=": "of length at most"}


class UnsupportedMediaType(errors.InvalidRequest):
    """Send JSON, with the header Content-Type: application/json."""

    status = 415
    code = "unsupported_media_type"


def body(kind: type[T]) -> T:
    """The JSON body of the request in hand as ``kind``. Raises InvalidRequest, PayloadTooLarge."""
    return typed(json_object(), kind)


def json_object() -> dict[str, Any]:
    """The body of the request in hand as a JSON object. Raises InvalidRequest, PayloadTooLarge."""
    if not flask.request.is_json:
        raise UnsupportedMediaType()
    try:
        content = flask.request.get_data(cache=False)
    except ClientDisconnected:
        raise errors.InvalidRequest("The body ended, or paused for too long, before it was complete.") from None
    except ParseException as exc:
        raise errors.InvalidRequest(f"The body is not well-formed HTTP: {str(exc)[:200]}.") from None
    if len(content) > MAX_JSON_BYTES:
        raise errors.PayloadTooLarge(f"The body is larger than {MAX_JSON_BYTES:,} bytes.")
    return parse(content)


def parse(content: bytes) -> dict[str, Any]:
    """Strict JSON: no NaN, no duplicate key, no lone surrogate. Raises InvalidRequest."""
    if not content.strip():
        raise errors.InvalidRequest("The body is empty; send a JSON object.")
    try:
        value = _strict().decode(content.decode())
        if isinstance(value, dict) and b"\\u" in content:  # UTF-8 has no surrogates, so they can only come escaped
            _check_text(value, None)
    except RecursionError:
        raise errors.InvalidRequest("The body is nested too deeply.") from None
    except ValueError as exc:  # malformed JSON, bytes that are not UTF-8, a number of thousands of digits
        raise errors.InvalidRequest(f"The body is not valid JSON: {str(exc)[:200]}.") from exc
    if not isinstance(value, dict):
        raise errors.InvalidRequest("The body must be a JSON object.")
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python's reader would take the last of two equal keys."""
    result = dict(pairs)
    if len(result) < len(pairs):
        key, _ = collections.Counter(key for key, _ in pairs).most_common(1)[0]
        _check_text(key, None)
        raise errors.InvalidRequest(f"{key[:100]} is given twice.", param=key[:100])
    return result


def _check_text(value: Any, param: str | None) -> None:
    """Python's reader takes half a surrogate pair for a character."""
    if isinstance(value, dict):
        for key, entry in value.items():
            _check_text(key, None)
            _check_text(entry, key)
    elif isinstance(value, list):
        for entry in value:
            _check_text(entry, param)
    if not isinstance(value, str):
        return
    try:
        value.encode()
    except UnicodeEncodeError:
        name = param[:100] if param else None
        said = f"{name or 'A key'} must be valid Unicode; it has a lone surrogate."
        raise errors.InvalidRequest(said, param=name) from None


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


@functools.cache
def _strict() -> json.JSONDecoder:
    """Making one takes longer than most bodies do."""
    return json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant)


def typed(value: dict[str, Any], kind: type[T], *, strict: bool = True) -> T:
    """``value`` as ``kind``; null is the same as not given. Raises InvalidRequest that names the field.

    Without ``strict`` numbers and booleans may be texts, as they are in forms.
    """
    given = {name: entry for name, entry in value.items() if entry is not None or name not in _optional(kind)}
    try:
        return msgspec.convert(given, kind, strict=strict)
    except msgspec.ValidationError as exc:
        raise _invalid(str(exc), value, kind) from None


@functools.cache
def _optional(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The names of its fields that have a default; msgspec reads the annotations each time it is asked."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind) if not field.required)


def _invalid(text: str, value: dict[str, Any], kind: type[msgspec.Struct]) -> errors.InvalidRequest:
    """msgspec's message as a sentence of ours."""
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    path = _PATH.search(text)
    param = path[1] if path else None
    text = _PATH.sub("", text)
    named = re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", text, re.DOTALL)
    if named:  # the path is that of the object which has or lacks it
        field = f"{param}.{named[2]}" if param else named[2]
        unknown = named[1] == "contains unknown"
        said = _unknown(field, [] if param else list(fields)) if unknown else f"{field} is missing."
        return errors.InvalidRequest(said, param=field[:100])
    return errors.InvalidRequest(_sentence(text, param, value, fields.get(param or "")), param=param)


def _unknown(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"There is no field {name[:100]!r} here" + (f"; did you mean {close[0]!r}?" if close else ".")


def _sentence(text: str, param: str | None, value: dict[str, Any], declared: Any) -> str:
    """What is wrong with ``param``, and what it may be."""
    choices = _choices(declared)
    if param and declared is type(None):
        return f"{param} cannot be honoured here; leave it out."
    if param and choices:
        return f"{param} must be {' or '.join(map(repr, choices))} here; it is {str(value.get(param))[:100]!r}."
    if expected := _EXPECTED.search(text):
        names = (name.removesuffix(" | null") for name in expected.groups())
        wanted, got = (" or ".join(_WORDS.get(word, word) for word in name.split(" | ")) for name in names)
        return f"{param or 'The body'} must be {wanted}, not {got}."
    if bound := _BOUND.search(text):
        limit = bound[2].removeprefix("matching regex ")
        if limit != bound[2]:
            return f"{param or 'The body'} must match {limit}."
        for sign, words in _BOUNDS.items():
            limit = limit.replace(f"{sign} ", f"{words} ") if limit.startswith(f"{sign} ") else limit
        return f"{param or 'The body'} must be {limit}."
    return f"{param or 'The body'}: {text}."


def _choices(declared: Any) -> list[Any]:
    """The values of a Literal, alone or in a union with None."""
    if typing.get_origin(declared) is typing.Literal:
        return list(typing.get_args(declared))
    return [choice for part in typing.get_args(declared) for choice in _choices(part)]
