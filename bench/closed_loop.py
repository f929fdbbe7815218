"""Closed-loop clients, and the CPU that the processes behind them took."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from omniqueue import garbage

#: No request of a measurement may take longer, in seconds.
TIMEOUT_S = 120.0
#: Requests of each client, at least, before its times count.
_WARM = 3


@dataclass(frozen=True)
class Measured:
    """One cell: latencies in milliseconds, requests a second, CPU milliseconds a request by role."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    per_s: float
    requests: int
    cpu_ms: Mapping[str, float] = field(default_factory=dict)


class Cpu:
    """User and system time that processes take from now on, by role; a role is a list of process ids."""

    def __init__(self, roles: Mapping[str, Sequence[int]]) -> None:
        self._roles = roles
        self._before = {role: _cpu_s(pids) for role, pids in roles.items()}

    def taken_s(self) -> dict[str, float]:
        """Seconds by role. Children count with their parent (but not ours); those that have ended count for nothing."""
        taken = {}
        for role, pids in self._roles.items():
            before = self._before[role]
            taken[role] = sum(cpu_s - before.get(pid, 0.0) for pid, cpu_s in _cpu_s(pids).items())
        return taken


def measure(
    request: Callable[[int], None], clients: int, seconds: float, roles: Mapping[str, Sequence[int]], warm: int = 20
) -> Measured:
    """``clients`` threads, each sending its next request when the last one ended, for ``seconds`` after a warm-up.

    ``request`` gets the client's number and raises when the answer is wrong. ``roles`` are process ids by role. All
    clients have sent some requests, and have their connections, before the time of any counts.
    """
    garbage.settle()  # the clients' own pauses are not what is measured
    times: list[list[float]] = [[] for _ in range(clients)]
    faults: list[BaseException] = []
    begun: list[tuple[float, Cpu]] = []
    ready = threading.Barrier(clients, lambda: begun.append((time.monotonic(), Cpu(roles))), TIMEOUT_S)

    def client(number: int) -> None:
        mine = times[number]
        try:
            for _ in range(max(_WARM, warm // clients)):
                request(number)
            ready.wait()
            until = begun[0][0] + seconds
            while not faults and (time.monotonic() < until or not mine):
                start = time.perf_counter()
                request(number)
                mine.append(time.perf_counter() - start)
        except BaseException as exc:  # noqa: BLE001 - told by the thread that joins
            faults.append(exc)
            ready.abort()

    threads = [threading.Thread(target=client, args=(k,), daemon=True) for k in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=TIMEOUT_S)
    if faults:
        raise faults[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"A request has not ended for {TIMEOUT_S:.0f} s.")
    [(start, cpu)] = begun
    elapsed = time.monotonic() - start
    every = sorted(one for mine in times for one in mine)
    taken = {role: 1000 * cpu_s / len(every) for role, cpu_s in cpu.taken_s().items()}

    def quantile(share: float) -> float:
        return 1000 * every[min(len(every) - 1, int(share * len(every)))]

    return Measured(quantile(0.5), quantile(0.95), quantile(0.99), len(every) / elapsed, len(every), taken)


def _cpu_s(pids: Sequence[int]) -> dict[int, float]:
    found = {}
    for pid in pids:
        family = psutil.Process(pid)
        for process in (family, *([] if pid == os.getpid() else family.children(recursive=True))):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found
