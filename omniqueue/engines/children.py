"""The processes an engine starts: found when it has started, and gone when it is closed.

Python's own resource tracker is not one of them: it serves every user of shared memory and semaphores in this process
and ends with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from multiprocessing import resource_tracker

import psutil


class ChildProcesses:
    """Children of this process that appeared inside :meth:`record`, and whatever those start later."""

    def __init__(self) -> None:
        self._roots: list[psutil.Process] = []

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Take the children that appear in the block as the engine's, also when it raises."""
        before = set(psutil.Process().children())
        try:
            yield
        finally:
            self._roots += [child for child in psutil.Process().children() if child not in before]

    def alive(self) -> list[psutil.Process]:
        """The engine's processes that still run."""
        found: dict[int, psutil.Process] = {}
        for root in self._roots:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in [root, *root.children(recursive=True)]:
                    if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                        found[process.pid] = process
        found.pop(_tracker_pid() or 0, None)
        return list(found.values())

    def end(self, patience_s: float) -> list[int]:
        """Wait for the engine's processes, kill those that stay, and return the pids of the killed."""
        processes = self.alive()
        _, stuck = psutil.wait_procs(processes, timeout=patience_s)
        for process in stuck:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(stuck, timeout=patience_s)
        return [process.pid for process in stuck]


def _tracker_pid() -> int | None:
    pid: int | None = getattr(resource_tracker._resource_tracker, "_pid", None)
    return pid
