"""How a request waits for its job: one thread per process reads the replies and wakes whoever waits.

A reply is a hint. The job record is the truth, so a waiter whose reply was lost (Redis restarted, the list expired) is
woken too, by a look at the records of all that wait, twice a second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from omniqueue import errors, job, store

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
    #: The terminal record, if it was read for this one.
    record: job.Job | None = None


class ReplyWaiter:
    """The waiting requests of one process."""

    def __init__(self, records: store.Store) -> None:
        """``records`` answers quickly or fails; the blocking reads use a store of their own."""
        self._store = records
        self._waiting: dict[str, set[Waiting]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._reply_to = ""
        self._released = False

    @property
    def reply_to(self) -> str:
        """The name under which replies reach this process; made after the fork, so that no two share one."""
        return self._reply_to

    def start(self) -> None:
        """Start the thread, in a process that has none."""
        self._reply_to = f"{socket.gethostname()}.{os.getpid()}.{store.new_id()[:12]}"
        self._stop = threading.Event()
        threading.Thread(target=self._loop, args=(self._stop,), name="replies", daemon=True).start()

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

    def wait(self, waiting: Waiting, timeout_s: float, left: Callable[[], bool] = lambda: False) -> job.Job:
        """The job's record once it is terminal; ``left`` tells whether nobody wants it any more.

        Raises JobFailed when the record has vanished, JobExpired after ``timeout_s``, ClientLeft, ShuttingDown.
        """
        waiting.submitted = True
        deadline = time.monotonic() + timeout_s
        while (remaining_s := deadline - time.monotonic()) > 0:
            if not waiting.woken.wait(min(remaining_s, RECHECK_S)):
                if left():
                    raise ClientLeft(f"The client of job {waiting.job_id} closed its connection.")
                continue
            waiting.woken.clear()
            record = waiting.record or self._ended(waiting.job_id)
            if record is not None:
                return record
            if self._released:
                raise ShuttingDown(waiting.job_id)
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

    def _loop(self, stop: threading.Event) -> None:
        listener = store.Store.listener(self._store)
        checked_at = time.monotonic()
        while not stop.is_set():
            try:
                self._wake(listener.replies(self._reply_to, RECHECK_S))
                if time.monotonic() - checked_at >= RECHECK_S:
                    checked_at = time.monotonic()
                    self._recheck()
            except errors.BrokerUnavailable:
                stop.wait(_RETRY_S)
            except Exception:  # a waiter that dies would leave every request to its deadline
                log.exception("action=replies_failed")
                stop.wait(_RETRY_S)

    def _recheck(self) -> None:
        """Wake those whose job is terminal or gone although no reply said so."""
        with self._lock:
            known = {job_id for job_id, all_of_it in self._waiting.items() if any(one.submitted for one in all_of_it)}
        if known:
            self._wake(known - self._store.running(known))

    def _wake(self, job_ids: Iterable[str]) -> None:
        """Wake who waits for these jobs; records are read here, all at once, and not by each thread for itself."""
        with self._lock:
            known = {job_id: self._waiting[job_id] for job_id in job_ids if job_id in self._waiting}
            whole = [job_id for job_id, who in known.items() if not all(waiting.follows for waiting in who)]
        records: dict[str, job.Job] = {}
        try:
            records = self._store.ended(whole) if whole else {}
        except Exception as exc:  # noqa: BLE001 - each looks for itself then: one bad record is nobody else's fault
            log.warning("action=records_not_read jobs=%s error=%s", len(whole), exc)
        with self._lock:
            for job_id in known:
                for waiting in self._waiting.get(job_id, ()):
                    waiting.record = records.get(job_id)
                self._set(job_id)

    def _set(self, job_id: str) -> None:
        for waiting in self._waiting.get(job_id, ()):
            waiting.woken.set()
