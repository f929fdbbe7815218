"""One line of ``omniqueue doctor``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, and what to do about it."""

    what: str
    level: Level
    text: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        """For ``omniqueue doctor --json``."""
        return asdict(self)

    def __str__(self) -> str:
        said = f"{self.level:<7}  {self.what:<10}  {self.text}"
        return f"{said} {self.remedy}" if self.remedy else said


def ok(what: str, text: str) -> Finding:
    """All is well."""
    return Finding(what, "ok", text)


def warning(what: str, text: str, remedy: str) -> Finding:
    """It works, and something will go wrong or has."""
    return Finding(what, "warning", text, remedy)


def error(what: str, text: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(what, "error", text, remedy)
