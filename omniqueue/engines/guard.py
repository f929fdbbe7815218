"""Ends an engine's processes when their worker is gone: ``python -m omniqueue.engines.guard PID:TIME ...``

A worker that is killed, or leaves because its engine hangs, has no time to end them, and they would keep the
accelerator's memory from the worker that replaces it. The worker holds the other end of this process's standard input,
and never writes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

import psutil


def name(process: psutil.Process) -> str:
    """A process that no later one can be taken for: process ids are used again."""
    return f"{process.pid}:{process.create_time()!r}"


def end(names: Sequence[str]) -> None:
    """Kill these processes, and what they have started, if they still run."""
    for text in names:
        pid, _, created = text.partition(":")
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(int(pid))
            if root.create_time() == float(created):
                for process in [*root.children(recursive=True), root]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end(sys.argv[1:])
