"""What stands before and after every route: who may ask, how often, under which name, and what browsers may do."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

import flask
from werkzeug.datastructures import Headers

from omniqueue import errors, rate
from web.keys import Keys, Unauthorized
from web.services import current

#: The one route that asks for no key: a supervisor's question whether the process lives.
_OPEN = "/health"
#: A name or an address, and a port: it becomes part of the URLs in answers.
_HOST = re.compile(r"([A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")
#: The page asks only this server, loads scripts and styles only from it, and is shown in no frame. ``media`` is the
#: public place of media, where there is one.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob: {media}; "
    "media-src 'self' blob: {media}; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
#: Of every answer.
_HEADERS = [("X-Content-Type-Options", "nosniff"), ("X-Frame-Options", "DENY"), ("Referrer-Policy", "no-referrer")]


class CrossSite(errors.InvalidRequest):
    """A page of another site may not send this; call the API from a program or from a page of this server."""

    status = 403
    type = "permission_error"
    code = "cross_site"


class TooMany(errors.QueueFull):
    """This key has sent as many requests as it may; ``retry_after_s`` tells when the next one is welcome."""

    code = "rate_limit_exceeded"

    def __init__(self, limit: str, retry_after_s: int) -> None:
        super().__init__(f"At most {limit} are served for one key; try again in {retry_after_s} s.")
        self.retry_after_s = retry_after_s


def attach(app: flask.Flask, keys: Keys, limit: rate.RateLimit | None) -> None:
    """Check every request of the application before its route is called, unknown routes included."""

    def check() -> None:
        request = flask.request
        if not _HOST.fullmatch(request.headers.get("Host", "localhost")):
            raise errors.InvalidRequest("The Host header must be a name or an address, and a port.", param="Host")
        who = request.remote_addr or "local"
        if keys and request.path != _OPEN:
            who = keys.holder(request.headers.get("Authorization"))
        if request.method not in ("GET", "HEAD", "OPTIONS"):
            _own_site(request.headers)
            if limit is not None and request.method == "POST" and (wait_s := limit.hit(who)):
                raise TooMany(str(current().config.rate_limit), wait_s)

    app.before_request(check)
    app.after_request(_secure)
    app.wsgi_app = _with_headers(app.wsgi_app)  # type: ignore[method-assign]


def _with_headers(serve: Any) -> Any:
    """The WSGI application with _HEADERS in its answers; Werkzeug would look at each of them for each answer."""

    def served(environ: Any, start_response: Any) -> Any:
        return serve(environ, lambda status, headers, *rest: start_response(status, [*headers, *_HEADERS], *rest))

    return served


def _own_site(headers: Headers) -> None:
    """Browsers say whose page sends a request, and bring along the key that their user once gave."""
    site, origin = headers.get("Sec-Fetch-Site"), headers.get("Origin")
    if site is None and origin is not None:  # they say the first over TLS and to localhost only
        site = "same-origin" if origin.partition("://")[2] == headers.get("Host") else "cross-site"
    if site not in (None, "same-origin", "none"):
        raise CrossSite()


def _secure(response: flask.Response) -> flask.Response:
    if response.mimetype in ("text/html", "image/svg+xml"):
        place = urlsplit(current().config.media_http_url or "")
        media = f"{place.scheme}://{place.netloc}" if place.netloc else ""
        response.headers["Content-Security-Policy"] = _POLICY.format(media=media)
    if response.status_code == Unauthorized.status:
        # Basic, so that a browser asks its user for the key.
        response.headers["WWW-Authenticate"] = 'Basic realm="omniqueue: the API key is the password", charset="UTF-8"'
    return response
