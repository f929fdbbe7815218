"""Multi-stage generative pipelines over queues: one Celery worker a stage, references only through the router."""

from __future__ import annotations

import sys
from typing import Any

__version__ = "0.1.0"

if not sys.platform.startswith("linux"):
    raise ImportError(f"omniqueue runs on Linux only (it needs /dev/shm and fork); this is {sys.platform}.")


def __getattr__(name: str) -> Any:
    """``celery -A omniqueue`` finds the app here; loaded when asked for, since most imports do not need Celery."""
    if name in ("app", "celery"):
        return _celery_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _celery_app() -> Any:
    """The app for the ``celery`` command, which would show a traceback for a bad environment; status 2 instead."""
    from omniqueue import errors

    try:
        from omniqueue import celery_app
    except errors.ConfigError as exc:
        sys.stderr.write(f"omniqueue: {exc.message}\n")
        raise SystemExit(2) from None
    return celery_app.app
