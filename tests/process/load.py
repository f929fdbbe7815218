"""Closed-loop clients that count what became of each request."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType

from omniqueue import errors, store
from omniqueue.job import Job
from tests.process.cluster import PATIENCE_S, Cluster, eventually


@dataclass
class Outcome:
    """One request as its client saw it."""

    job_id: str
    prompt: str
    seconds: float
    job: Job | None
    replies: int


@dataclass
class Load:
    """``clients`` threads, each sending its next job when the last one ended; a context manager."""

    cluster: Cluster
    clients: int = 16
    timeout_s: float = 30.0
    outcomes: list[Outcome] = field(default_factory=list)
    refused: int = 0

    def __enter__(self) -> Load:
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._client, args=(k,)) for k in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(self.timeout_s + 10.0)
            assert not thread.is_alive()
        # Replies that came after their client had seen the record, or a second time.
        late = self.cluster.late_replies(*[one.job_id for one in self.outcomes])
        for one, count in zip(self.outcomes, late, strict=True):
            one.replies += count

    def completed(self) -> int:
        """Requests answered so far."""
        return len(self.outcomes)

    def wait_for(self, more: int, timeout_s: float = PATIENCE_S) -> None:
        """Until so many more requests have been answered."""
        target = self.completed() + more
        eventually(lambda: self.completed() >= target, timeout_s)

    def _client(self, number: int) -> None:
        sent = 0
        while not self._stop.is_set():
            sent += 1
            self._one(f"client {number} request {sent}")

    def _one(self, prompt: str) -> None:
        """As a client that repeats a refused request under the same key until it is accepted."""
        start = time.monotonic()
        job_id = store.new_id()
        while True:
            try:
                self.cluster.submit(prompt, job_id=job_id, timeout_s=self.timeout_s, idempotency_key=job_id)
                break
            except errors.BrokerUnavailable:
                with self._lock:
                    self.refused += 1
                if self._stop.wait(0.1) or time.monotonic() - start > self.timeout_s:
                    return
        record, replies = self._wait(job_id, start)
        outcome = Outcome(job_id, prompt, time.monotonic() - start, record, replies)
        with self._lock:
            self.outcomes.append(outcome)

    def _wait(self, job_id: str, start: float) -> tuple[Job | None, int]:
        """Until the record is terminal, or a second past the deadline."""
        replies = 0
        while time.monotonic() - start < self.timeout_s + 1.0:
            with contextlib.suppress(errors.BrokerUnavailable):
                replies += len(self.cluster.listener.replies(job_id, 0.5))
                record = self.cluster.store.job(job_id)
                if record is not None and record.state.terminal:
                    return record, replies
            if self.cluster.valkey.process is None:
                time.sleep(0.05)
        return None, replies

    # -- the sum -----------------------------------------------------------------------------------------------------

    def states(self) -> Counter[str]:
        """How many ended in each state; "lost" are those that never did."""
        return Counter(one.job.state.value if one.job else "lost" for one in self.outcomes)

    def not_succeeded(self) -> list[str]:
        """Why, for each one that did not succeed."""
        return [f"{o.job_id}: {o.job.state.value} {o.job.error}" if o.job else o.job_id for o in self._bad()]

    def _bad(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.job is None or one.job.state.value != "succeeded"]

    def answered_twice(self) -> int:
        """Requests with more than one reply."""
        return sum(one.replies > 1 for one in self.outcomes)

    def slowest_s(self) -> float:
        """The longest wait."""
        return max((one.seconds for one in self.outcomes), default=0.0)

    def attempts(self, stage_id: int) -> Counter[int]:
        """How many jobs took how many attempts at a stage."""
        return Counter(one.job.stages[stage_id].attempt for one in self.outcomes if one.job)


@dataclass
class WebLoad(Load):
    """The same through the router; a client whose connection breaks sends its request again under the same key."""

    #: Answers that were not 200, by status; connections that broke are under 0.
    repeated: Counter[int] = field(default_factory=Counter)

    def _one(self, prompt: str) -> None:
        start = time.monotonic()
        body = json.dumps({"prompt": prompt, "size": "16x16", "seed": 1, "response_format": "url"}).encode()
        key = store.new_id()
        while time.monotonic() - start < self.timeout_s + 1.0:
            status, job_id = self._send(body, key)
            if status not in (0, 503):
                break
            self.repeated[status] += 1
            time.sleep(0.1)
        outcome = Outcome(job_id, prompt, time.monotonic() - start, self._record(job_id), int(bool(job_id)))
        with self._lock:
            self.outcomes.append(outcome)

    def _send(self, body: bytes, key: str) -> tuple[int, str]:
        """Status, 0 for a broken connection, and the job's id."""
        try:
            path = "/v1/images/generations"
            status, headers, _ = self.cluster.exchange("POST", path, body, self.timeout_s, Idempotency_Key=key)
        except (OSError, http.client.HTTPException):
            return 0, ""
        return status, headers.get("X-Omniqueue-Job-Id", "")

    def _record(self, job_id: str) -> Job | None:
        try:
            return self.cluster.store.job(job_id) if job_id else None
        except errors.BrokerUnavailable:
            return None
