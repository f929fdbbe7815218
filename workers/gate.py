"""Many at once, or one alone: for coroutines of one event loop."""

from __future__ import annotations

import asyncio


class Gate:
    """Lets many run together, or one alone; who waits to be alone keeps new ones out, so that its turn comes."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._together = 0
        self._alone = False
        self._wanting = 0

    async def enter(self, alone: bool, timeout_s: float) -> bool:
        """Enter beside others, or when nobody else is inside; False when that took longer than ``timeout_s``.

        Beside others only while nobody is or wants to be alone. Who has entered must leave.
        """
        self._wanting += alone
        try:
            entered = self._open(alone) or await self._until(alone, timeout_s)
        finally:
            self._wanting -= alone
        if entered and alone:
            self._alone = True
        elif entered:
            self._together += 1
        elif alone:
            self._tell()
        return entered

    @property
    def closed(self) -> bool:
        """Whether somebody is or wants to be alone."""
        return self._alone or self._wanting > 0

    def leave(self, alone: bool) -> None:
        """Leave as entered."""
        if alone:
            self._alone = False
        else:
            self._together -= 1
        self._tell()

    def _open(self, alone: bool) -> bool:
        return not (self._alone or self._together) if alone else not self.closed

    async def _until(self, alone: bool, timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not self._open(alone):
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - loop.time())
            except asyncio.TimeoutError:
                return self._open(alone)
        return True

    def _tell(self) -> None:
        """Wake all that wait; each looks again."""
        self._changed.set()
        self._changed = asyncio.Event()
