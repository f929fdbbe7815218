"""How many more messages a worker may begin: as many as its engine has room for."""

from __future__ import annotations

import asyncio
from typing import Any

Attempt = asyncio.Task[Any]


class Seats:
    """The attempts that a worker has begun. While an outcome is recorded, the engine has room for another request.

    Of those that are recorded there are at most as many as the engine has room for: should recording be slow, nothing
    piles up. For coroutines of one event loop.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._seated: set[Attempt] = set()
        self._leaving: set[Attempt] = set()
        #: Set whenever there may be more room.
        self.changed = asyncio.Event()

    def take(self, attempt: Attempt) -> None:
        """An attempt begins."""
        self._seated.add(attempt)

    def let_go(self, attempt: Attempt | None) -> None:
        """The engine has done with it; one that has no seat here is ignored."""
        if attempt in self._seated:
            self._seated.remove(attempt)
            self._leaving.add(attempt)
            self.changed.set()

    def leave(self, attempt: Attempt) -> None:
        """It is over."""
        self._seated.discard(attempt)
        self._leaving.discard(attempt)
        self.changed.set()

    def taken(self) -> bool:
        """Whether any attempt has begun that the engine has not done with."""
        return bool(self._seated)

    def free(self) -> int:
        """How many may begin now."""
        return self._count - len(self._seated) - max(0, len(self._leaving) - self._count)
