"""A claimed stage while it is in hand."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

from omniqueue import errors
from omniqueue.engines.base import StageOutput
from omniqueue.store import Claim

T = TypeVar("T")
#: Job, stage and attempt.
Key = tuple[str, int, int]


@dataclass
class Running:
    """A claimed stage in the engine."""

    claim: Claim
    #: What runs in the engine, once it has begun.
    task: asyncio.Task[None] | None = None
    #: Done once the engine has let go of every item, and not when it is only asked to.
    ended: asyncio.Future[list[StageOutput]] = field(default_factory=asyncio.Future)
    #: Why it is being stopped, once it is.
    stop: errors.EngineError | None = None
    progress: dict[int, tuple[int, int]] = field(default_factory=dict)
    moved_at: float = field(default_factory=time.monotonic)

    def let_go(self, task: asyncio.Task[None]) -> None:
        """The engine has: without an output, unless it has been told already."""
        if task.cancelled():
            self.fail(self.stop or errors.EngineDead("The engine dropped the request."))
        elif error := task.exception():
            self.fail(self.stop or error)

    def fail(self, error: BaseException) -> None:
        """End without an output, unless it has ended."""
        if not self.ended.done():
            self.ended.set_exception(error)

    def total_progress(self) -> tuple[int, int]:
        """Steps done and steps in all, over the items that told any."""
        return sum(p[0] for p in self.progress.values()), sum(p[1] for p in self.progress.values())


async def emptied(work: Awaitable[T]) -> T:
    """The result; or what it raises, whose frames then hold nothing.

    A frame may hold the task that holds the exception that holds the frame: until garbage is collected, which may be
    long, that would keep all that a stage has read, mapped.
    """
    try:
        return await work
    except BaseException as exc:
        traceback.clear_frames(exc.__traceback__)
        raise


def steps(done: float, total: float) -> tuple[int, int]:
    """Whatever an engine tells as whole numbers; what is no number is no progress."""
    try:
        return max(0, int(done)), max(0, int(total))
    except (TypeError, ValueError, OverflowError):
        return 0, 0
