"""Log lines as text or as JSON (OMNIQUEUE_LOG_FORMAT), each with the job, stage and attempt that it is about."""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

FORMATS = ("text", "json")
_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
#: Our own lines are written as action=NAME key=value ...; a value goes up to the next key.
_PAIR = re.compile(r"(\w+)=(.*?)(?=\s\w+=|$)", re.S)

_about: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar("about", default=MappingProxyType({}))


@contextlib.contextmanager
def about(**facts: Any) -> Iterator[None]:
    """Every line that this thread logs inside the block is about that: job, stage, attempt."""
    token = _about.set(facts)
    try:
        yield
    finally:
        _about.reset(token)


def now_about(**facts: Any) -> None:
    """The same until the next call, for a thread that does one thing after another."""
    _about.set(facts)


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__(_TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        missing = " ".join(f"{k}={v}" for k, v in _about.get().items() if f"{k}=" not in record.message)
        line = super().formatMessage(record)
        return f"{line} {missing}" if missing else line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        at = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        told: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": message,
            **_about.get(),
        }
        if message.startswith("action="):
            told.update((key, value) for key, value in _PAIR.findall(message) if key not in told)
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False, default=str)


def configure(kind: str, level: int | str = logging.WARNING, file: str | None = None) -> None:
    """Send every logger's lines to ``file`` or standard error, in one of FORMATS."""
    handler = logging.FileHandler(file) if file else logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if kind == "json" else _Text())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)


def adopt(*names: str) -> None:
    """Let loggers that a library gave handlers of its own write as all others do."""
    for name in names:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
