"""The deployments that are measured: fake engines, real Valkey, workers and router; and who asks them."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.closed_loop import TIMEOUT_S
from omniqueue import calls, chain, store
from omniqueue.calls import Call
from tests.process.cluster import Cluster, Process
from web.wait import ReplyWaiter

_ANSWER = re.compile(
    rb"HTTP/1.1 (?P<status>\d+) .*?\r\nContent-Length: (?P<length>\d+)\r\n.*?\r\n\r\n(?P<body>.*)", re.DOTALL
)
#: Requests that a stage may run at once.
SLOTS = 64
JOB = {"kind": "text", "prompt": "a few words", "n": 1, "seed": 1}


def stages(*engine_args: dict[str, Any], slots: Sequence[int] = (), **top: Any) -> dict[str, Any]:
    """A stage config of fake engines in a row; the last one answers with text. ``slots``: max_num_seqs by stage."""
    entries: list[dict[str, Any]] = []
    for stage_id, args in enumerate(engine_args):
        sources = {"input_sources": [stage_id - 1]} if stage_id else {}
        width = slots[stage_id] if slots else SLOTS
        entries.append({"stage_id": stage_id, "engine": "fake", "max_num_seqs": width, "engine_args": args, **sources})
    entries[-1] |= {"final_output": True, "final_output_type": "text"}
    return {"pipeline": "bench", "max_queue": 1000, "request_timeout_s": TIMEOUT_S, **top, "stages": entries}


def start_workers(cluster: Cluster, *options: str) -> list[Process]:
    """A worker a stage, all ready."""
    cluster.loglevel = "WARNING"
    workers = [cluster.worker(stage.stage_id, *options, ready=False) for stage in cluster.pipe.stages]
    for worker in workers:
        cluster.wait_ready(worker)
    return workers


def submission(cluster: Cluster, reply_to: str, job_id: str) -> Call[store.Submission]:
    """The call that accepts a job, as the router makes it."""
    message = chain.message(cluster.pipe, cluster.store, store.Owed(job_id, 0), 0)
    return calls.submit(cluster.pipe, JOB, job_id=job_id, reply_to=reply_to, message=message)


def submit(cluster: Cluster, reply_to: str) -> str:
    """Accept one job; returns its id."""
    job_id = store.new_id()
    cluster.store.make(submission(cluster, reply_to, job_id))
    return job_id


@contextlib.contextmanager
def python_client(cluster: Cluster) -> Iterator[Callable[[int], None]]:
    """Submit and wait, as the router does for every request."""
    waiter = ReplyWaiter(cluster.store)
    waiter.start()

    def request(_: int) -> None:
        job_id = store.new_id()
        with waiter.expect(job_id) as waiting:
            waiter.submit(waiting, submission(cluster, waiter.reply_to, job_id))
            record = waiter.wait(waiting, TIMEOUT_S)
        if record.result is None or record.result["data"][0]["text"] != JOB["prompt"]:
            raise ValueError(f"Not what was asked: {record}")

    try:
        yield request
    finally:
        waiter.stop()


class HttpClients:
    """A connection a client, kept open.

    Its request is made once and its answer read by the length that it says: what is measured shares the machine with
    its client, and Python's own ``http.client`` takes twice as much.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._mine = threading.local()
        message = {"role": "user", "content": JOB["prompt"]}
        body = json.dumps({"messages": [message], "seed": 1})
        head = f"Host: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        self._request = f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n{body}".encode()

    def __call__(self, _: int) -> None:
        """One chat completion. Raises ValueError for another answer than the prompt."""
        if not hasattr(self._mine, "connection"):
            self._mine.connection = socket.create_connection(("127.0.0.1", self._port), timeout=TIMEOUT_S)
        connection = self._mine.connection
        connection.sendall(self._request)
        answer = b""
        while not (parts := _ANSWER.match(answer)) or len(parts["body"]) < int(parts["length"]):
            received = connection.recv(65536)
            if not received:
                raise ValueError(f"The answer ended too soon: {answer!r}")
            answer += received
        said = json.loads(parts["body"])
        if parts["status"] != b"200" or said["choices"][0]["message"]["content"] != JOB["prompt"]:
            raise ValueError(f"Not what was asked: {answer!r}")
