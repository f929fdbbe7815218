"""A child process that is kept running, and how several are ended together."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from omniqueue import embedded

#: Two equal signals closer together than this may arrive as one, in seconds.
_APART_S = 0.3


@dataclass
class Child:
    """A process that is kept running."""

    name: str
    command: list[str]
    log: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    retry_at: float = 0.0
    started_at: float = 0.0
    #: Whether this process was seen ready: what then ended it was the work, not its start.
    well: bool = False

    def start(self) -> None:
        """Start, with its output appended to its log."""
        self.started_at, self.well = time.monotonic(), False
        with open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A session of its own: the terminal's Ctrl-C goes to us, and we stop the parts in order.
                start_new_session=True,
                preexec_fn=embedded.die_with_parent,
            )

    def ended(self) -> int | None:
        """The exit status, or None while it runs."""
        return self.process.poll() if self.process is not None else None

    def tail(self, lines: int = 15) -> str:
        """The end of the log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


def end_all(processes: list[subprocess.Popen[bytes]], patience_s: float, hurry: threading.Event | None = None) -> None:
    """SIGTERM, a second one half-way or once in a ``hurry`` (hand work back), SIGKILL at the end of their patience."""
    start = time.monotonic()
    waiting = [process for process in processes if process.poll() is None]
    for share, number in ((0.0, signal.SIGTERM), (0.5, signal.SIGTERM), (1.0, signal.SIGKILL)):
        while waiting and time.monotonic() - start < share * patience_s:
            if share < 1.0 and hurry is not None and hurry.is_set() and time.monotonic() - start > _APART_S:
                break
            time.sleep(0.05)
            waiting = [process for process in waiting if process.poll() is None]
        for process in waiting:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
    for process in waiting:
        process.wait()
