"""How a request submits its job and waits for it: one thread per process asks Redis for all of them (exchange.py).

A reply is a hint. The job record is the truth, so a waiter whose reply was lost (Redis restarted, the list expired) is
woken too, by a look at the records of all that wait, twice a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from omniqueue import errors, job, store
from omniqueue.calls import Call
from omniqueue.exchange import Exchange

log = logging.getLogger(__name__)

#: How often the records of all waiting jobs are looked at, in seconds; also the longest wait for a reply at once.
RECHECK_S = 0.5
#: Pause before Redis is asked again after it did not answer, in seconds.
_RETRY_S = 0.2


class ShuttingDown(errors.NotReady):
    """The router is shutting down while the request waits; its job goes on."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"The router is shutting down; job {job_id} goes on: GET /v1/jobs/{job_id} tells its end.")


class ClientLeft(errors.JobCancelled):
    """The client closed its connection before the answer."""


@dataclass(eq=False)
class Waiting:
    """Somebody who waits for a job; several may wait for the same one."""

    job_id: str
    woken: threading.Event = field(default_factory=threading.Event)
    #: True once the record must exist, so that its absence means something.
    submitted: bool = False
    #: Wants to hear whatever is said of the job while it runs, and reads the record itself.
    follows: bool = False
    #: The job's record as Redis keeps it, if it was read for this one.
    fields: Mapping[str, str] = field(default_factory=dict)
    #: The submission, if it was left to be sent, and when (monotonic, in seconds).
    call: Call[store.Submission] | None = None
    sent_at: float = 0.0
    #: What came instead of a plain yes.
    refusal: Any = None

    def told(self, answer: Any) -> None:
        """Called with the answer to the submission, or with the error that came instead."""
        if isinstance(answer, list) and answer[0] == "ok":
            self.submitted = True
        else:
            self.refusal = answer
            self.woken.set()

    def record(self) -> job.Job | None:
        """The record that was read, if it is terminal."""
        fields, self.fields = self.fields, {}
        if not fields.get("state") or not job.JobState(fields["state"]).terminal:
            return None
        self.submitted = True
        return job.Job.from_hash(self.job_id, fields)


class ReplyWaiter:
    """The waiting requests of one process."""

    def __init__(self, records: store.Store) -> None:
        """``records`` answers quickly or fails."""
        self._store = records
        self._waiting: dict[str, set[Waiting]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._reply_to = ""
        self._released = False
        self._exchange: Exchange | None = None

    @property
    def reply_to(self) -> str:
        """The name under which replies reach this process; made after the fork, so that no two share one."""
        return self._reply_to

    def start(self) -> None:
        """Start the thread, in a process that has none."""
        self._reply_to = f"{socket.gethostname()}.{os.getpid()}.{store.new_id()[:12]}"
        self._stop = threading.Event()
        serve = self._serve(self._stop)
        threading.Thread(target=asyncio.run, args=(serve,), name="replies", daemon=True).start()

    def stop(self) -> None:
        """Let the thread end, within its wait for a reply."""
        self._stop.set()

    # -- the waiting side --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def expect(self, job_id: str) -> Iterator[Waiting]:
        """Register before the job is submitted: a fast answer must find somebody waiting."""
        waiting = Waiting(job_id)
        with self._lock:
            self._waiting.setdefault(job_id, set()).add(waiting)
            if self._released:
                waiting.woken.set()
        try:
            yield waiting
        finally:
            with self._lock:
                others = self._waiting[job_id]
                others.discard(waiting)
                if not others:
                    del self._waiting[job_id]

    def submit(self, waiting: Waiting, call: Call[store.Submission]) -> store.Submission:
        """Have a new job submitted, and do not wait for it: what Redis has against it is raised by :meth:`wait`.

        Not for what may have been submitted before.
        """
        waiting.call, waiting.sent_at = call, time.monotonic()
        try:
            if self._exchange is None:
                raise RuntimeError("The thread does not run.")
            self._exchange.send(call, waiting.told)
        except RuntimeError as exc:
            waiting.told(exc)
        return store.Submission(waiting.job_id, existing=False)

    def _settle(self, waiting: Waiting, call: Call[store.Submission]) -> None:
        """Raise why there is no job; what went wrong on the way to Redis is tried again at once, and waited for."""
        refusal, waiting.refusal = waiting.refusal, None
        if isinstance(refusal, errors.BrokerUnavailable):
            raise refusal
        if isinstance(refusal, Exception):
            self._store.make(call)
        else:
            call.read(refusal)
        waiting.submitted = True

    def wait(self, waiting: Waiting, timeout_s: float, left: Callable[[], bool] = lambda: False) -> job.Job:
        """The job's record once it is terminal; ``left`` tells whether nobody wants it any more.

        Raises JobFailed when the record has vanished, JobExpired after ``timeout_s``, ClientLeft, ShuttingDown,
        and what a submission raises if it was left to :meth:`submit`.
        """
        waiting.submitted = waiting.submitted or waiting.call is None
        deadline = time.monotonic() + timeout_s
        while (remaining_s := deadline - time.monotonic()) > 0:
            if not waiting.woken.wait(min(remaining_s, RECHECK_S)):
                if waiting.submitted and left():
                    raise ClientLeft(f"The client of job {waiting.job_id} closed its connection.")
                if not waiting.submitted and time.monotonic() - waiting.sent_at > self._store.timeout_s:
                    raise errors.BrokerUnavailable()
                continue
            waiting.woken.clear()
            if waiting.refusal is not None and waiting.call is not None:
                self._settle(waiting, waiting.call)
            record = waiting.record() or (self._ended(waiting.job_id) if waiting.submitted else None)
            if record is not None:
                return record
            if self._released and waiting.submitted:
                raise ShuttingDown(waiting.job_id)
            if self._released:
                raise errors.NotReady("The router is shutting down and Redis has not answered; send the request again.")
        raise errors.JobExpired(f"Job {waiting.job_id} did not end within its time limit.")

    def hear(self, waiting: Waiting, timeout_s: float) -> job.Job | None:
        """Wait until something is said of a job that goes on, or for ``timeout_s``; its record once it is terminal.

        Raises JobFailed when the record has vanished, ShuttingDown.
        """
        waiting.submitted = waiting.follows = True
        if not waiting.woken.wait(timeout_s):
            return None
        waiting.woken.clear()
        record = None
        with contextlib.suppress(errors.BrokerUnavailable):
            # Said often, so the whole record is read only when it has to be.
            if waiting.job_id not in self._store.running([waiting.job_id]):
                record = self._ended(waiting.job_id)
        if record is None and self._released:
            raise ShuttingDown(waiting.job_id)
        return record

    def _ended(self, job_id: str) -> job.Job | None:
        """The record if it is terminal; while Redis is away nothing is known, and the next look wakes us again."""
        try:
            record = self._store.job(job_id)
        except errors.BrokerUnavailable:
            return None
        if record is None:
            raise errors.JobFailed(
                f"Redis lost the record of job {job_id} (restarted without persistence, or the job was deleted); "
                "send the request again."
            )
        return record if record.state.terminal else None

    def release(self) -> None:
        """End every wait, now and from now on: the process is to leave."""
        with self._lock:
            self._released = True
            for job_id in self._waiting:
                self._set(job_id)

    # -- the waking side ---------------------------------------------------------------------------------------------

    async def _serve(self, stop: threading.Event) -> None:
        exchange = self._exchange = Exchange(self._store, self._reply_to)
        checked_at = time.monotonic()
        while not stop.is_set():
            await self._surely(self._listen(exchange))
            if time.monotonic() - checked_at >= RECHECK_S:
                checked_at = time.monotonic()
                await self._surely(self._recheck(exchange))
        self._exchange = None
        await exchange.close()

    @staticmethod
    async def _surely(step: Awaitable[None]) -> None:
        """A step that may fail: a thread that dies would leave every request to its deadline."""
        try:
            await step
        except errors.BrokerUnavailable:
            await asyncio.sleep(_RETRY_S)
        except Exception:
            log.exception("action=replies_failed")
            await asyncio.sleep(_RETRY_S)

    async def _listen(self, exchange: Exchange) -> None:
        await self._wake(exchange, await exchange.replies(RECHECK_S))

    async def _recheck(self, exchange: Exchange) -> None:
        """Wake those whose job is terminal or gone although no reply said so."""
        with self._lock:
            known = {job_id for job_id, all_of_it in self._waiting.items() if any(one.submitted for one in all_of_it)}
        if known:
            await self._wake(exchange, known - await asyncio.to_thread(self._store.running, known))

    async def _wake(self, exchange: Exchange, job_ids: Iterable[str]) -> None:
        """Wake who waits for these jobs; their records are asked for here, all at once, and not by each for itself."""
        with self._lock:
            known = {job_id: self._waiting[job_id] for job_id in job_ids if job_id in self._waiting}
            whole = [job_id for job_id, who in known.items() if not all(waiting.follows for waiting in who)]
        records: dict[str, Mapping[str, str]] = {}
        try:
            records = dict(zip(whole, await exchange.records(whole), strict=True))
        except Exception as exc:  # noqa: BLE001 - each looks for itself then
            log.warning("action=records_not_read jobs=%s error=%s", len(whole), exc)
        with self._lock:
            for job_id in known:
                for waiting in self._waiting.get(job_id, ()):
                    waiting.fields = records.get(job_id, {})
                self._set(job_id)

    def _set(self, job_id: str) -> None:
        for waiting in self._waiting.get(job_id, ()):
            waiting.woken.set()
