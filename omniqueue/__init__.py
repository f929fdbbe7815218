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
        from omniqueue import celery_app

        return celery_app.app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
