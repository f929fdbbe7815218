"""The operations of records.lua in Redis, as a function that is loaded when it is first missed.

Its name has a hash of its text, so that two versions of omniqueue can share a Redis while one takes the other's place.
"""

from __future__ import annotations

import functools
import hashlib
from importlib import resources
from typing import Any


@functools.cache
def _source() -> str:
    return resources.files("omniqueue").joinpath("records.lua").read_text()


@functools.cache
def name() -> str:
    """What FCALL calls."""
    return f"omniqueue_{hashlib.sha256(_source().encode()).hexdigest()[:16]}"


@functools.cache
def library() -> str:
    """What FUNCTION LOAD takes."""
    return f"#!lua name={name()}\nredis.register_function('{name()}', (function()\n{_source()}\nend)())\n"


def command(namespace: str, operation: str, *args: Any) -> tuple[Any, ...]:
    """What asks Redis for one of its operations."""
    return ("FCALL", name(), 0, operation, namespace, *args)


def missing(error: Exception) -> bool:
    """Whether Redis has no such function: it is new, or was restarted without what it had."""
    return "Function not found" in str(error)
