"""The processes an engine starts: found when it has started, and gone when it is closed.

Python's own resource tracker is not one of them: it serves every user of shared memory and semaphores in this process
and ends with it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker

import psutil

from omniqueue.engines import guard

#: A guard that has nothing left to end is gone as soon as it has read that; it may only just have started, in seconds.
_GUARD_PATIENCE_S = 10.0


class ChildProcesses:
    """Children of this process that appeared inside :meth:`record`, and whatever those start later."""

    def __init__(self) -> None:
        self._roots: list[psutil.Process] = []
        self._guards: list[subprocess.Popen[bytes]] = []

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Take the children that appear in the block as the engine's, also when it raises."""
        before = set(psutil.Process().children())
        try:
            yield
        finally:
            mine = [child for child in psutil.Process().children() if child not in before]
            self._roots += mine
            self._guard([child for child in mine if child.pid != _tracker_pid()])

    def _guard(self, processes: list[psutil.Process]) -> None:
        names = []
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(guard.name(process))
        if names:
            command = [sys.executable, "-m", "omniqueue.engines.guard", *names]
            # A session of its own: a Ctrl-C at the terminal is for the worker, which ends its engine in order.
            self._guards.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))

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
        for watching in self._guards:
            _dismiss(watching)
        self._guards.clear()
        return [process.pid for process in stuck]


def _dismiss(watching: subprocess.Popen[bytes]) -> None:
    if watching.stdin is not None:
        watching.stdin.close()
    try:
        watching.wait(_GUARD_PATIENCE_S)
    except subprocess.TimeoutExpired:
        watching.kill()
        watching.wait()


def _tracker_pid() -> int | None:
    pid: int | None = getattr(resource_tracker._resource_tracker, "_pid", None)
    return pid
