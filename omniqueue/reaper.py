"""What brings lost work back: lapsed leases, lost messages, passed deadlines, leftover payloads, outdated results.

Every worker and every router runs one; for each duty one of them at a time leads.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time

from omniqueue import catalog, chain, errors, job, media, payloads, store
from omniqueue.pipeline import Pipeline

log = logging.getLogger(__name__)

INTERVAL_S = 0.5
#: How long a leader may be silent before another process takes over.
LEAD_TTL_S = 2.0
#: How long a published message may be on its way before it counts as lost.
MESSAGE_GRACE_S = 2.0
SWEEP_INTERVAL_S = 2.0
#: How long one pass may go on forgetting old jobs: more than a busy router makes in the time from pass to pass.
FORGET_S = 0.3


class Reaper:
    """A daemon thread; a pass that fails is logged and tried again."""

    def __init__(
        self,
        records: store.Store,
        pipelines: catalog.Catalog,
        payload_store: payloads.PayloadStore | None = None,
        media_store: media.MediaStore | None = None,
        *,
        router: bool = False,
    ) -> None:
        """Without ``payload_store`` nothing is swept. A ``router``'s topology is the one that workers must have."""
        self.store, self.catalog = records, pipelines
        self.payloads, self.media, self.router = payload_store, media_store, router
        self._me = f"{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="reaper", daemon=True)
        self._swept_at = 0.0
        #: When Redis was last seen away, on the monotonic clock.
        self._away_at = float("-inf")
        self._lists: dict[str, list[str]] = {}

    def start(self) -> None:
        """Begin; call after a fork."""
        self._thread.start()

    def stop(self) -> None:
        """End, waiting for the pass in progress."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _loop(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            try:
                self.once()
            except errors.BrokerUnavailable:
                self._away_at = time.monotonic()  # nothing can be owed or swept while the records cannot be read
            except Exception:  # a reaper that dies would lose work silently
                log.exception("action=reaper_failed")

    def once(self) -> None:
        """One pass over every duty that this process leads."""
        for pipe in self.catalog.pipelines:
            if self.router:
                self.store.declare(pipe)
            if self.store.lead(f"reap:{pipe.name}", self._me, LEAD_TTL_S):
                self._bring_back(pipe)
                self._forget()
        if self.payloads is not None:
            self.payloads.trim()
        if self.payloads is not None and time.monotonic() - self._swept_at >= SWEEP_INTERVAL_S:
            self._swept_at = time.monotonic()
            if self.store.lead(f"sweep:{self.payloads.host}", self._me, SWEEP_INTERVAL_S * 2):
                for name in self.payloads.sweep(self.store.running):
                    log.info("action=swept payload=%s", name)

    def _bring_back(self, pipe: Pipeline) -> None:
        # While Redis was away no worker could prolong its lease, so none is to blame for a lapse until all had time to.
        back_s = time.monotonic() - self._away_at
        owed = self.store.reap(pipe.name, grace_s=pipe.lease_s if back_s < pipe.lease_s else 0.0)
        for stage in pipe.stages:
            owed += self.store.lost(stage.queue, self._oldest(stage.queue), MESSAGE_GRACE_S)
        for one in owed:
            log.warning("action=enqueued_again job=%s stage=%s", one.job_id, one.stage_id)
            chain.republish(pipe, self.store, one)

    def _oldest(self, queue: str) -> list[str]:
        if not chain.broker_is_redis():
            return ["?"]  # cannot look inside: only what has waited long counts as lost
        if queue not in self._lists:
            self._lists[queue] = chain.broker_lists(queue)
        return chain.jobs_of(self.store.oldest_messages(self._lists[queue]))

    def _forget(self) -> None:
        until = time.monotonic() + FORGET_S
        while (outdated := self.store.outdated()) and time.monotonic() < until:
            for job_id in outdated:
                self._forget_job(job_id)

    def _forget_job(self, job_id: str) -> None:
        record = self.store.job(job_id)
        if record is not None and self.media is not None:
            try:  # the files first: once the record is gone, nobody would know of them
                self.media.remove(record.result)
                self.media.remove_attempts(job_id, range(1, _untold_attempts(record)))
            except (OSError, errors.OmniqueueError) as exc:
                log.warning("action=files_left_behind job=%s error=%s", job_id, exc)
        self.store.delete(job_id)


def _untold_attempts(record: job.Job) -> int:
    """One above the last attempt that may have stored files which the result does not name: workers get killed."""
    last = record.stages[-1].attempt
    return last if record.result else last + 1
