"""Many at once, or one alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Gate:
    """Lets many run together, or one alone; who waits to be alone keeps new ones out, so that its turn comes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._together = 0
        self._alone = False
        self._wanting = 0

    @contextlib.contextmanager
    def together(self, timeout_s: float) -> Iterator[bool]:
        """Enter beside others; False inside the block when somebody was or wanted to be alone for ``timeout_s``."""
        with self._changed:
            entered = self._changed.wait_for(lambda: not self._alone and not self._wanting, timeout_s)
            self._together += entered
        try:
            yield entered
        finally:
            with self._changed:
                self._together -= entered
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self, timeout_s: float) -> Iterator[bool]:
        """Enter when nobody else is inside; False inside the block when that took longer than ``timeout_s``."""
        with self._changed:
            self._wanting += 1
            entered = self._changed.wait_for(lambda: not self._alone and not self._together, timeout_s)
            self._wanting -= 1
            self._alone = self._alone or entered
            self._changed.notify_all()
        try:
            yield entered
        finally:
            with self._changed:
                if entered:
                    self._alone = False
                self._changed.notify_all()
