"""The router with one more route, which tells what its process has imported: for a real gunicorn."""

from __future__ import annotations

import sys

import flask

from web import app


def create_app() -> flask.Flask:
    made = app.create_app()

    @made.get("/imported")
    def imported() -> list[str]:
        return sorted({name.partition(".")[0] for name in sys.modules})

    return made
