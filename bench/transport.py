"""What a hop costs: ``python -m bench.transport``, everything on this machine, over loopback and unix sockets.

Side by side in one run: raw Redis (LPUSH, BRPOP in another process) and a plain copy of the payload, which are the
floor; a stock Celery chain with ``AsyncResult.get()``; omniqueue from Python; omniqueue over HTTP. Fake engines that do
no work, so that what is left is the price of orchestration, with job records, leases and an append-only Redis. Absolute
times differ from machine to machine and from minute to minute: compare within one run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import redis

from bench.closed_loop import Measured, measure
from omniqueue import chain, embedded, store
from omniqueue.child import end_all
from tests.process.cluster import Cluster, running
from web.wait import ReplyWaiter

KIB, MIB = 1 << 10, 1 << 20
STAGES, PAYLOADS, CLIENTS = (1, 2, 3), (KIB, MIB, 16 * MIB), (1, 16, 64)
SLOTS = 64
TIMEOUT_S = 120.0
JOB = {"kind": "text", "prompt": "a few words", "n": 1, "seed": 1}
ROLES = ("client", "router", "workers", "broker")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One line of the table."""

    path: str
    stages: int
    payload: int
    clients: int
    measured: Measured


def size(nbytes: int) -> str:
    """As people write it."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


# -- the floor ----------------------------------------

_ECHO = """
import sys, redis
client = redis.Redis(unix_socket_path=sys.argv[1])
while True:
    client.lpush("back", client.brpop("there")[1])
"""


def raw_hop_ms(seconds: float) -> float:
    """A message to another process and back through Redis, halved: the median of one hop."""
    with _valkey() as valkey:
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


# -- stock Celery ----------------------------------------


@contextlib.contextmanager
def _valkey() -> Iterator[embedded.EmbeddedValkey]:
    with tempfile.TemporaryDirectory(prefix="oqb-") as folder:
        valkey = embedded.EmbeddedValkey(Path(folder) / "q")
        valkey.start()
        try:
            yield valkey
        finally:
            valkey.stop()


def stock_cells(clients: Sequence[int], seconds: float) -> Iterator[Cell]:
    """Celery as it comes, with a payload of 1 KiB as the argument: what it has no shared memory for is left out."""
    with _valkey() as valkey:
        for name, database in (("BENCH_REDIS_URL", 0), ("BENCH_RESULT_URL", 1)):
            os.environ[name] = f"redis+socket://{valkey.socket}?virtual_host={database}"
        from bench import stock

        command = [sys.executable, "-m", "celery", "-A", "bench.stock", "worker", "-P", "threads", "-c", str(SLOTS)]
        workers = [
            subprocess.Popen(
                [*command, "-Q", f"stock{k}", "-n", f"stock{k}@bench", "--loglevel", "ERROR"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for k in range(max(STAGES))
        ]
        roles = {"client": [os.getpid()], "workers": [w.pid for w in workers], "broker": [_pid(valkey)]}
        payload = "x" * KIB
        try:
            for stages in STAGES:

                def request(_: int, stages: int = stages) -> None:
                    answer = stock.chain(stages, payload).apply_async().get(timeout=TIMEOUT_S)
                    if answer != payload:
                        raise ValueError("Stock Celery returned something else.")

                for count in clients:
                    yield Cell("stock Celery", stages, KIB, count, measure(request, count, seconds, roles))
        finally:
            end_all(workers, 10.0)


def _pid(valkey: embedded.EmbeddedValkey) -> int:
    if valkey.process is None:
        raise RuntimeError("the server is not running")
    return valkey.process.pid


# -- omniqueue ----------------------------------------


def deployment(stages: int, payload: int) -> dict[str, Any]:
    """Fake engines that hand on ``payload`` bytes and take no time; the last one answers with text."""
    entries: list[dict[str, Any]] = []
    for stage_id in range(stages):
        args = {"delay_s": 0, "payload_bytes": payload if stage_id < stages - 1 else 0}
        sources = {"input_sources": [stage_id - 1]} if stage_id else {}
        entries.append({"stage_id": stage_id, "engine": "fake", "max_num_seqs": SLOTS, "engine_args": args, **sources})
    entries[-1] |= {"final_output": True, "final_output_type": "text"}
    return {"pipeline": "bench", "max_queue": 1000, "request_timeout_s": TIMEOUT_S, "stages": entries}


def our_cells(stages: int, payload: int, clients: Sequence[int], seconds: float, events: bool) -> Iterator[Cell]:
    """One deployment, from Python and over HTTP."""
    with running(deployment(stages, payload)) as cluster:
        cluster.loglevel = "WARNING"
        options = ("-E",) if events else ()
        workers = [cluster.worker(stage_id, *options, ready=False) for stage_id in range(stages)]
        for worker in workers:
            cluster.wait_ready(worker)
        router = cluster.router()
        pids = {"workers": [worker.pid for worker in workers], "broker": [_pid(cluster.valkey)]}
        ours = {"client": [os.getpid()], **pids}
        for count in clients:
            with python_client(cluster) as request:
                yield Cell("Python", stages, payload, count, measure(request, count, seconds, ours))
        for count in clients:
            request = HttpClients(cluster.port)
            roles = {**ours, "router": [router.pid]}
            yield Cell("HTTP", stages, payload, count, measure(request, count, seconds, roles))


@contextlib.contextmanager
def python_client(cluster: Cluster) -> Iterator[Any]:
    """Submit and wait, as the router does."""
    waiter = ReplyWaiter(cluster.store)
    waiter.start()

    def request(_: int) -> None:
        job_id = store.new_id()
        message = chain.message(cluster.pipe, cluster.store, store.Owed(job_id, 0), 0)
        with waiter.expect(job_id) as waiting:
            cluster.store.submit(cluster.pipe, JOB, job_id=job_id, reply_to=waiter.reply_to, message=message)
            record = waiter.wait(waiting, TIMEOUT_S)
        if record.result is None or record.result["data"][0]["text"] != JOB["prompt"]:
            raise ValueError(f"Not what was asked: {record}")

    try:
        yield request
    finally:
        waiter.stop()


class HttpClients:
    """A connection a client, kept open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._mine = threading.local()
        message = {"role": "user", "content": JOB["prompt"]}
        self._body = json.dumps({"messages": [message], "seed": 1}).encode()

    def __call__(self, _: int) -> None:
        """One chat completion. Raises ValueError for another answer than the prompt."""
        if not hasattr(self._mine, "connection"):
            self._mine.connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        connection = self._mine.connection
        connection.request("POST", "/v1/chat/completions", self._body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        body = json.loads(answer.read())
        if answer.status != 200 or body["choices"][0]["message"]["content"] != JOB["prompt"]:
            raise ValueError(f"Not what was asked: {answer.status} {body}")


# -- the table ----------------------------------------

HEAD = (
    f"{'path':13} {'stages':>6} {'payload':>8} {'clients':>7} {'p50':>9} {'p95':>9} {'p99':>9} {'per s':>8}   "
    "CPU per request (ms): " + ", ".join(ROLES)
)


def line(cell: Cell) -> str:
    """A line of the table."""
    m = cell.measured
    cpu = "  ".join(f"{m.cpu_ms[role]:6.2f}" if role in m.cpu_ms else "     -" for role in ROLES)
    return (
        f"{cell.path:13} {cell.stages:6} {size(cell.payload):>8} {cell.clients:7} {m.p50_ms:9.2f} {m.p95_ms:9.2f} "
        f"{m.p99_ms:9.2f} {m.per_s:8.1f}   {cpu}"
    )


def ratios(cells: Sequence[Cell], hop_ms: float, copy_16_ms: float) -> dict[str, float]:
    """What can be compared between machines: each figure over what stood beside it in the same run."""
    at = {(c.path, c.stages, c.payload, c.clients): c.measured for c in cells}

    def added_ms(payload: int) -> float:
        """What one more stage costs one client, by the median."""
        return (at["Python", 3, payload, 1].p50_ms - at["Python", 1, payload, 1].p50_ms) / 2

    stock = at["stock Celery", 3, KIB, 64].per_s
    tails = [c.measured.p99_ms / c.measured.p50_ms for c in cells if c.path != "stock Celery" and c.clients == 64]
    return {
        "an added stage at 1 KiB, in raw Redis hops": added_ms(KIB) / hop_ms,
        "an added stage at 16 MiB, in copies of 16 MiB": added_ms(16 * MIB) / copy_16_ms,
        "an added stage at 1 MiB beyond one at 1 KiB, in ms": added_ms(MIB) - added_ms(KIB),
        "3 stages, 64 clients: Python over stock Celery": at["Python", 3, KIB, 64].per_s / stock,
        "3 stages, 64 clients: HTTP over stock Celery": at["HTTP", 3, KIB, 64].per_s / stock,
        "the largest p99 over p50 at 64 clients": max(tails),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.transport", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=1.5, help="how long each cell is measured (default: 1.5)")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    parser.add_argument("-E", "--events", action="store_true", help="workers send task events, as Flower wants them")
    chosen = parser.parse_args(arguments)
    hop, copies = raw_hop_ms(chosen.seconds), {size(n): copy_ms(n) for n in PAYLOADS}
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    print(
        f"floor: a raw Redis hop {hop:.3f} ms; a copy of " + ", ".join(f"{n} {ms:.3f} ms" for n, ms in copies.items())
    )
    print(HEAD, flush=True)
    cells: list[Cell] = []

    def tell(found: Iterator[Cell]) -> None:
        for cell in found:
            cells.append(cell)
            print(line(cell), flush=True)

    tell(stock_cells(CLIENTS, chosen.seconds))
    for stages in STAGES:
        for payload in PAYLOADS if stages > 1 else PAYLOADS[:1]:
            tell(our_cells(stages, payload, CLIENTS, chosen.seconds, chosen.events))
    # With one stage nothing is handed on: the payload makes no difference.
    cells += [
        dataclasses.replace(c, payload=n) for c in cells if c.stages == 1 and c.path == "Python" for n in PAYLOADS[1:]
    ]
    told = ratios(cells, hop, copies[size(16 * MIB)])
    print()
    for name, value in told.items():
        print(f"{value:8.2f}  {name}")
    if chosen.json:
        facts = {"hop_ms": hop, "copy_ms": copies, "ratios": told, "cells": [dataclasses.asdict(c) for c in cells]}
        chosen.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
