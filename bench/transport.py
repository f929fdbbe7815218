"""What a hop costs: stock Celery, omniqueue from Python and omniqueue over HTTP, without and with task events (-E).

Fake engines that do no work, so that what is left is the price of orchestration, with job records, leases, counters and
an append-only Redis.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

from bench import deployment, floor
from bench.closed_loop import TIMEOUT_S, Measured, measure
from omniqueue.child import end_all
from tests.process.cluster import running

KIB, MIB = 1 << 10, 1 << 20
STAGES, PAYLOADS, CLIENTS = (1, 2, 3), (KIB, MIB, 16 * MIB), (1, 16, 64)
STOCK, PYTHON, HTTP = "stock Celery", "Python", "HTTP"
ROLES = ("client", "router", "workers", "broker")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One line of the table."""

    path: str
    stages: int
    #: Bytes that each stage but the last hands on.
    payload: int
    clients: int
    #: Whether the workers send task events.
    events: bool
    measured: Measured


def size(nbytes: int) -> str:
    """As people write it."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def _long(clients: int, seconds: float) -> float:
    """Twice as long with most clients: one pause of the machine falls on all that is in flight, and p99 is a goal."""
    return 2 * seconds if clients == max(CLIENTS) else seconds


def stock_cells(stages: int, seconds: float) -> Iterator[Cell]:
    """Celery as it comes, with a payload of 1 KiB as the argument: it has no shared memory for more."""
    with floor.server() as valkey:
        for name, database in (("BENCH_REDIS_URL", 0), ("BENCH_RESULT_URL", 1)):
            os.environ[name] = f"redis+socket://{valkey.socket}?virtual_host={database}"
        # An app keeps the servers that it was made with; each of ours is a new one.
        stock = importlib.reload(importlib.import_module("bench.stock"))
        command = [sys.executable, "-m", "celery", "-A", "bench.stock", "worker", "-P", "threads"]
        command += ["-c", str(deployment.SLOTS), "--loglevel", "ERROR"]
        workers = [
            subprocess.Popen(
                [*command, "-Q", f"stock{k}", "-n", f"stock{k}@bench"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for k in range(stages)
        ]
        roles = {"client": [os.getpid()], "workers": [w.pid for w in workers], "broker": [floor.pid(valkey)]}
        payload = "x" * KIB
        try:

            def request(_: int) -> None:
                answer = stock.chain(stages, payload).apply_async().get(timeout=TIMEOUT_S)
                if answer != payload:
                    raise ValueError("Stock Celery returned something else.")

            for count in CLIENTS:
                yield Cell(STOCK, stages, KIB, count, False, measure(request, count, _long(count, seconds), roles))
        finally:
            end_all(workers, 10.0)


def our_cells(stages: int, payload: int, clients: Sequence[int], seconds: float, events: bool) -> Iterator[Cell]:
    """One deployment, from Python and over HTTP."""
    engines = [{"delay_s": 0, "payload_bytes": payload} for _ in range(stages - 1)] + [{"delay_s": 0}]
    with running(deployment.stages(*engines)) as cluster:
        workers = deployment.start_workers(cluster, *(("-E",) if events else ()))
        router = cluster.router()
        ours = {
            "client": [os.getpid()],
            "workers": [worker.pid for worker in workers],
            "broker": [floor.pid(cluster.valkey)],
        }
        with deployment.python_client(cluster) as request:
            for count in clients:
                measured = measure(request, count, _long(count, seconds), ours)
                yield Cell(PYTHON, stages, payload, count, events, measured)
        over_http = deployment.HttpClients(cluster.port)
        roles = {**ours, "router": [router.pid]}
        for count in clients:
            measured = measure(over_http, count, _long(count, seconds), roles)
            yield Cell(HTTP, stages, payload, count, events, measured)


def cells(seconds: float) -> Iterator[Cell]:
    """Every cell; stock Celery just before ours of as many stages, and each deployment without events before with them.

    With one stage nothing is handed on, so the payload makes no difference. Events are a cost per hop and not per byte:
    with them larger payloads are measured for three stages only.
    """
    for stages in STAGES:
        yield from stock_cells(stages, seconds)
        for payload in PAYLOADS if stages > 1 else PAYLOADS[:1]:
            yield from our_cells(stages, payload, CLIENTS, seconds, events=False)
            if payload == KIB or stages == max(STAGES):
                yield from our_cells(stages, payload, CLIENTS, seconds, events=True)


HEAD = (
    f"{'path':13} {'events':6} {'stages':>6} {'payload':>8} {'clients':>7} {'p50':>9} {'p95':>9} {'p99':>9} "
    f"{'per s':>8}   CPU per request (ms): {', '.join(ROLES)}"
)


def line(cell: Cell) -> str:
    """A line of the table as it is measured."""
    m = cell.measured
    cpu = "  ".join(f"{m.cpu_ms[role]:6.2f}" if role in m.cpu_ms else "     -" for role in ROLES)
    return (
        f"{cell.path:13} {'-E' if cell.events else '':6} {cell.stages:6} {size(cell.payload):>8} {cell.clients:7} "
        f"{m.p50_ms:9.2f} {m.p95_ms:9.2f} {m.p99_ms:9.2f} {m.per_s:8.1f}   {cpu}"
    )
