"""/openapi.json, made from the types that check the requests, and a page of it at /docs.

Every module of endpoints has a tuple ``operations`` beside its blueprint; ``create_app`` hands them all to
:func:`attach`, and a test sees that routes and operations are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any

import flask
import msgspec
from msgspec import Meta

import omniqueue
from web import answers, openai_format

blueprint = flask.Blueprint("openapi", __name__)

JSON = "application/json"
FORM = "multipart/form-data"
EVENTS = "text/event-stream"
_KEY = "omniqueue.openapi"
_TEMPLATE = "#/components/schemas/{name}"
_BINARY = {"type": "string"}
#: One server-sent event; a comment has neither.
_EVENT = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}

#: Statuses of errors that any route may answer with; 401 only where keys are asked for.
_ANYWHERE = (400, 429, 500, 503)
#: And those of a route that makes a job of its body.
SUBMITS = (404, 409, 413, 415, 504, 507)

#: What the headers of an answer mean, by their names.
_HEADERS = {
    "Retry-After": ("Seconds after which to try again.", {"type": "string"}),
    "X-Omniqueue-Job-Id": ("The job's id, also of a job that failed.", {"type": "string"}),
    "Location": ("Where the object is.", {"type": "string"}),
}


@dataclass(frozen=True)
class Parameter:
    """A value in the path, the query or a header; ``type`` may be an Annotated type with limits."""

    name: str
    where: str
    type: Any = str
    description: str = ""


@dataclass(frozen=True)
class Content:
    """A body that is not JSON: its media types, and for server-sent events what each one's data holds."""

    media_types: tuple[str, ...]
    description: str = ""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one route, with ``path`` as OpenAPI writes it: /v1/jobs/{job_id}.

    ``request`` is the msgspec Struct that the body is checked with. ``responses`` says what each status that is no
    error carries: a Struct (JSON), a Content, or a tuple of both when the request chooses. ``errors`` are the statuses
    of errors beside those that any route may have.
    """

    method: str
    path: str
    summary: str
    responses: Mapping[int, Any]
    request: Any = None
    request_type: str = JSON
    #: The same as a form, for a route that takes either.
    form: Any = None
    parameters: tuple[Parameter, ...] = ()
    errors: tuple[int, ...] = ()
    headers: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    #: True for a route that asks for no API key.
    public: bool = False

    def bodies(self) -> dict[str, Any]:
        """The types of the request's body, by media type."""
        found = {self.request_type: self.request} if self.request is not None else {}
        return {**found, FORM: self.form} if self.form is not None else found


#: For the routes of a job's own id.
JOB_ID = Parameter("job_id", "path", Annotated[str, Meta(min_length=1)], "A job's id.")
#: For the routes that make a job.
IDEMPOTENCY_KEY = Parameter(
    "Idempotency-Key",
    "header",
    Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[!-~]([ -~]*[!-~])?$")] | None,
    "A request that is sent again with the same key gets the same job.",
)


def document(operations: Iterable[Operation], *, keys: bool = False) -> dict[str, Any]:
    """The OpenAPI document. ``keys`` tells whether API keys are asked for."""
    known = sorted(operations, key=lambda operation: (operation.path, operation.method))
    schemas, components = _schemas(known)
    paths: dict[str, Any] = {}
    for operation in known:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schemas, keys)
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "omniqueue",
            "version": omniqueue.__version__,
            "description": "Multi-stage generative pipelines behind OpenAI's shapes. GET /v1/models tells the sizes "
            "and counts that each model can make; whatever it cannot is a 400 that names the field.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if keys:
        made["security"] = [{"bearer": []}, {"basic": []}]
        made["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "basic": {"type": "http", "scheme": "basic", "description": "Any user name; the key is the password."},
        }
    return made


def _types(operations: Iterable[Operation]) -> Iterator[Any]:
    """Every type that the document describes."""
    yield answers.ErrorAnswer
    for operation in operations:
        yield from operation.bodies().values()
        yield from (parameter.type for parameter in operation.parameters)
        for body in operation.responses.values():
            yield from (part for part in parts(body) if not isinstance(part, Content))


def parts(body: Any) -> tuple[Any, ...]:
    """What an answer of one status may carry."""
    return body if isinstance(body, tuple) else (body,)


def _schemas(operations: list[Operation]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """The schema of every type, and the named ones among them."""
    types = list(dict.fromkeys(_types(operations)))
    made, components = msgspec.json.schema_components(types, ref_template=_TEMPLATE)
    found = dict(zip(types, made, strict=True))
    for name in _referenced([found[kind] for o in operations for kind in o.bodies().values()], components):
        _allow_null(components[name])
    return found, _binary(components)


def _referenced(part: Any, components: Mapping[str, Any]) -> set[str]:
    """The names of the components that a part of a schema is made of."""
    if isinstance(part, list):
        return {name for entry in part for name in _referenced(entry, components)}
    if not isinstance(part, dict):
        return set()
    names = {name for entry in part.values() for name in _referenced(entry, components)}
    if "$ref" in part:
        name = part["$ref"].rpartition("/")[2]
        names |= {name} | _referenced(components[name], components)
    return names


def _binary(part: Any) -> Any:
    """Files in forms are raw bytes; msgspec says base64, as in JSON."""
    if isinstance(part, dict):
        kept = {key: _binary(value) for key, value in part.items()}
        if part.get("format") == "binary":
            kept.pop("contentEncoding", None)
        return kept
    return [_binary(entry) for entry in part] if isinstance(part, list) else part


def _allow_null(schema: dict[str, Any]) -> None:
    """In a request, null is the same as not given (see decode.typed), whatever the field's type."""
    required = set(schema.get("required", ()))
    for name, entry in schema.get("properties", {}).items():
        if name in required or entry.get("type") == "null" or {"type": "null"} in entry.get("anyOf", ()):
            continue
        if None in entry.get("enum", ()):
            continue
        kept = {key: entry.pop(key) for key in ("default", "description") if key in entry}
        schema["properties"][name] = {"anyOf": [dict(entry), {"type": "null"}], **kept}


def _operation(operation: Operation, schemas: Mapping[Any, Any], keys: bool) -> dict[str, Any]:
    name = operation.path.strip("/").translate({ord(c): "_" for c in "/{}.-"}) or "page"
    made: dict[str, Any] = {
        "operationId": f"{operation.method.lower()}_{name}",
        "summary": operation.summary,
        "responses": _responses(operation, schemas, keys),
    }
    if operation.public:
        made["security"] = []
    if operation.parameters:
        made["parameters"] = [_parameter(parameter, schemas) for parameter in operation.parameters]
    if bodies := operation.bodies():
        content = {media_type: {"schema": schemas[kind]} for media_type, kind in bodies.items()}
        made["requestBody"] = {"required": True, "content": content}
    return made


def _parameter(parameter: Parameter, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    schema = schemas[parameter.type]
    if parameter.where != "path" and {"type": "null"} in schema.get("anyOf", ()):
        [schema] = [part for part in schema["anyOf"] if part != {"type": "null"}]
    made = {"name": parameter.name, "in": parameter.where, "required": parameter.where == "path", "schema": schema}
    return {**made, "description": parameter.description} if parameter.description else made


def _responses(operation: Operation, schemas: Mapping[Any, Any], keys: bool) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for status, body in operation.responses.items():
        content: dict[str, Any] = {}
        for part in parts(body):
            if isinstance(part, Content):
                content |= {kind: {"schema": _EVENT if kind == EVENTS else _BINARY} for kind in part.media_types}
            else:
                content[JSON] = {"schema": schemas[part]}
        made[str(status)] = {"description": _said(operation, status, body), "content": content}
    common = (*_ANYWHERE, *((401,) if keys and not operation.public else ()))
    if operation.method != "GET":
        common += (403,)  # sent by another site's page
    for status in sorted({*common, *operation.errors} - set(operation.responses)):
        error = {JSON: {"schema": schemas[answers.ErrorAnswer]}}
        made[str(status)] = {"description": HTTPStatus(status).phrase, "content": error}
    for text, answer in made.items():
        names = [*operation.headers.get(int(text), ()), *(("Retry-After",) if text in ("429", "503") else ())]
        if names:
            answer["headers"] = {name: _header(name) for name in names}
    return dict(sorted(made.items()))


def _said(operation: Operation, status: int, body: Any) -> str:
    said = " ".join(part.description for part in parts(body) if isinstance(part, Content) and part.description)
    return said or HTTPStatus(status).phrase


def _header(name: str) -> dict[str, Any]:
    description, schema = _HEADERS[name]
    return {"description": description, "schema": schema}


def attach(app: flask.Flask, operations: Iterable[Operation], *, keys: bool = False) -> None:
    """Make the document of these operations what /openapi.json and /docs show."""
    app.extensions[_KEY] = document(operations, keys=keys)


@blueprint.get("/openapi.json")
def openapi() -> flask.Response:
    """The document."""
    return openai_format.reply(flask.current_app.extensions[_KEY])


@blueprint.get("/docs")
def docs() -> str:
    """The document as a page, without a script."""
    made = flask.current_app.extensions[_KEY]
    return flask.render_template("docs.html", document=made, schema_text=schema_text, said_of=said_of)


def said_of(schema: Mapping[str, Any]) -> str:
    """What a field's schema says about it in words."""
    return str(schema.get("description") or " ".join(filter(None, map(said_of, schema.get("anyOf", ())))))


def schema_text(schema: Mapping[str, Any]) -> str:
    """A schema in a few words: its type or values, and its limits."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(schema_text(part) for part in schema["anyOf"] if part != {"type": "null"}) or "null"
    if "enum" in schema:
        return " | ".join(msgspec.json.encode(value).decode() for value in schema["enum"])
    said = "file" if schema.get("format") == "binary" else str(schema.get("type", "anything"))
    if said == "array":
        said = f"list of {schema_text(schema.get('items', {}))}"
    limits = (("minimum", ">="), ("maximum", "<="), ("exclusiveMinimum", ">"), ("exclusiveMaximum", "<"))
    told = [f"{sign} {schema[name]:,}" for name, sign in limits if name in schema]
    sizes = (("minLength", "at least"), ("maxLength", "at most"), ("minItems", "at least"), ("maxItems", "at most"))
    told += [f"{words} {schema[name]:,}" for name, words in sizes if name in schema]
    return f"{said}, {', '.join(told)}" if told else said


operations = (
    Operation(method="GET", path="/openapi.json", summary="This document", responses={200: dict[str, Any]}),
    Operation(method="GET", path="/docs", summary="This document as a page", responses={200: Content(("text/html",))}),
)
