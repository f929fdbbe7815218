"""GET /: a page to try it on, with its own script and style and nothing from anywhere else."""

from __future__ import annotations

from pathlib import Path

import flask

from omniqueue import errors
from web import openapi

blueprint = flask.Blueprint("site", __name__)

_FOLDER = Path(__file__).parent / "page"
_TYPES = {"page.css": "text/css; charset=utf-8", "page.js": "text/javascript; charset=utf-8"}
#: Read once: no path of a request reaches the file system.
_FILES = {name: (_FOLDER / name).read_bytes() for name in ("index.html", *_TYPES)}


@blueprint.get("/")
def index() -> flask.Response:
    """The page."""
    return _reply("index.html", "text/html; charset=utf-8")


@blueprint.get("/page/<name>")
def part(name: str) -> flask.Response:
    """Its script and its style."""
    if name not in _TYPES:
        raise errors.NotFound(f"There is no {name[:100]!r} here.")
    return _reply(name, _TYPES[name])


def _reply(name: str, content_type: str) -> flask.Response:
    response = flask.Response(_FILES[name], content_type=content_type)
    response.headers["Cache-Control"] = "no-cache"  # it goes with this router, not with the one before an upgrade
    return response


operations = (
    openapi.Operation(
        method="GET", path="/", summary="A page to try it on", responses={200: openapi.Content(("text/html",))}
    ),
    openapi.Operation(
        method="GET",
        path="/page/{name}",
        summary="The page's script and style",
        responses={200: openapi.Content(("text/css", "text/javascript"))},
        parameters=(openapi.Parameter("name", "path", str, "page.css or page.js."),),
        errors=(404,),
    ),
)
