"""The floor on this machine: a message through raw Redis, and a plain copy of a payload."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from bench.closed_loop import measure
from omniqueue import embedded
from omniqueue.child import end_all

_ECHO = """
import sys, redis
client = redis.Redis(unix_socket_path=sys.argv[1])
while True:
    client.lpush("back", client.brpop("there")[1])
"""


@contextlib.contextmanager
def server() -> Iterator[embedded.EmbeddedValkey]:
    """A Valkey of its own, as omniqueue starts it."""
    with tempfile.TemporaryDirectory(prefix="oqb-") as folder:
        valkey = embedded.EmbeddedValkey(Path(folder) / "q")
        valkey.start()
        try:
            yield valkey
        finally:
            valkey.stop()


def pid(valkey: embedded.EmbeddedValkey) -> int:
    """Its process. Raises RuntimeError when it has none."""
    if valkey.process is None:
        raise RuntimeError("the server is not running")
    return valkey.process.pid


def hop_ms(seconds: float) -> float:
    """LPUSH to another process that blocks in BRPOP, and back, halved: the median of one hop."""
    with server() as valkey:
        echo = subprocess.Popen([sys.executable, "-c", _ECHO, str(valkey.socket)])
        client = redis.Redis(unix_socket_path=str(valkey.socket))
        try:

            def there_and_back(_: int) -> None:
                client.lpush("there", "x")
                client.brpop(["back"])

            return measure(there_and_back, 1, seconds, {}).p50_ms / 2
        finally:
            end_all([echo], 5.0)


def copy_ms(nbytes: int) -> float:
    """Copying so many bytes within one process's memory, which is warm: the median of twenty."""
    source, target = bytearray(os.urandom(nbytes)), bytearray(nbytes)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - start)
    return 1000 * sorted(times)[10]
