"""A stage worker's pulse: announces it, prolongs its leases, hears what to stop, and notices a dead or hung engine."""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from omniqueue import errors, room, store
from workers.host import StageHost

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
#: Exit status of a process whose engine is dead, hung or did not load in time (EX_SOFTWARE): restart it.
EXIT_ENGINE = 70


class OwnClock:
    """Seconds that this process was awake: a stop (SIGSTOP, a suspended machine) is no hang."""

    def __init__(self, longest_s: float = 2 * INTERVAL_S) -> None:
        self._longest_s = longest_s
        self._awake_s = 0.0
        self._read_at = time.monotonic()

    def now(self) -> float:
        """Read about every INTERVAL_S; of a longer gap between two readings only ``longest_s`` count."""
        at = time.monotonic()
        self._awake_s += min(at - self._read_at, self._longest_s)
        self._read_at = at
        return self._awake_s


class Pulse:
    """Two daemon threads: one beats, one listens for stops, so that a cancel need not wait for the next beat."""

    def __init__(self, host: StageHost, file: str | None = None) -> None:
        """``file`` is touched with each beat, whether or not Redis answers."""
        self.host = host
        self._file = Path(file) if file else None
        self._phase, self._detail = "loading", ""
        self._started_at = time.time()
        self._stop = threading.Event()
        self._told = time.monotonic()
        self._clock = OwnClock()
        self._moved: tuple[float, float] | None = None
        self._health: Future[None] | None = None
        self._asked_at = 0.0
        self._beats = threading.Thread(target=self._beat_loop, name="pulse", daemon=True)
        self._controls = threading.Thread(target=self._control_loop, name="control", daemon=True)

    def start(self) -> None:
        """Begin to announce the worker as loading."""
        self._beats.start()
        self._controls.start()

    def report(self, phase: str) -> None:
        """An engine's loading phase, with the time since start."""
        self._detail = phase
        log.warning("action=loading stage=%s elapsed_s=%.1f phase=%s", self.host.stage.queue, self._elapsed(), phase)

    def ready(self) -> None:
        """From now on the worker counts as a live replica; Celery says it again after each reconnection."""
        if self._phase != "loading":
            return
        self._phase, self._detail = "ready", ""
        self._beat_once()
        log.warning("action=ready stage=%s elapsed_s=%.1f", self.host.stage.queue, self._elapsed())

    def draining(self) -> None:
        """The worker takes no more work."""
        self._phase = "draining"

    def refused(self, why: str) -> None:
        """The worker cannot serve; the announcement stays until it expires."""
        self._stop.set()
        self._phase, self._detail = "refused", why
        self._beat_once()

    def stop(self) -> None:
        """Stop beating and take the announcement back; the listener ends by itself within its second."""
        self._stop.set()
        self._beats.join(timeout=3.0)
        try:
            self.host.store.retire(self.host.worker)
        except errors.BrokerUnavailable:
            log.info("action=retire_failed worker=%s", self.host.worker)

    def load_took_too_long(self) -> None:
        """The start-up deadline has passed: leave, saying in which phase."""
        log.critical(
            "action=load_timeout stage=%s elapsed_s=%.0f phase=%s", self.host.stage.queue, self._elapsed(), self._detail
        )
        os._exit(EXIT_ENGINE)

    def _elapsed(self) -> float:
        return time.monotonic() - self._told

    def facts(self) -> dict[str, Any]:
        """The announcement: who this is and what it does now."""
        host = self.host
        return {
            "worker": host.worker,
            "pipeline": host.pipe.name,
            "fingerprint": host.pipe.fingerprint,
            "stage_id": host.stage.stage_id,
            "queue": host.stage.queue,
            "host": host.payloads.host,
            "pid": os.getpid(),
            "started_at": self._started_at,
            "phase": self._phase,
            "detail": self._detail,
            "concurrency": host.stage.max_num_seqs,
            "running": len(host.held()),
            # For the clocks of hosts to be compared.
            "told_at": time.time(),
            "shm": room.facts(host.payloads),
        }

    def _beat_loop(self) -> None:
        # Several beats to a lease, so that one that comes late does not cost it.
        while not self._stop.wait(min(INTERVAL_S, self.host.pipe.lease_s / 4)):
            self._touch()
            self._beat_once()
            self._check_engine()

    def _touch(self) -> None:
        try:
            if self._file is not None:
                self._file.touch()
        except OSError as exc:
            log.warning("action=touch_failed file=%s error=%s", self._file, exc.strerror)

    def _beat_once(self) -> None:
        try:
            self.host.store.beat(self.host.worker, self.facts())
            for key in self.host.store.renew(self.host.held(), self.host.pipe.lease_s):
                self.host.stop(key, errors.Stopped())
        except errors.BrokerUnavailable:
            log.warning("action=beat_failed worker=%s", self.host.worker)
        except Exception:  # a pulse that dies would look like a dead worker
            log.exception("action=beat_failed worker=%s", self.host.worker)

    def _check_engine(self) -> None:
        if self._phase == "loading":
            return
        now = self._clock.now()
        moved_at = self.host.moved_at()
        if moved_at is None:
            self._moved = None
        elif self._moved is None or self._moved[0] != moved_at:
            self._moved = moved_at, now
        elif now - self._moved[1] > self.host.pipe.hang_timeout_s:
            self._leave(f"no progress for {now - self._moved[1]:.0f} s while holding work")
        if self.host.dead.is_set():
            self._leave("the engine is dead")
        self._check_health(now)

    def _check_health(self, now: float) -> None:
        """Ask without waiting: an engine that is slow to answer must not keep the leases from being prolonged."""
        if self._health is None:
            self._health, self._asked_at = self.host.ask_health(), now
        if not self._health.done():
            if now - self._asked_at > self.host.pipe.hang_timeout_s:
                self._leave(f"its health check has not answered for {now - self._asked_at:.0f} s")
            return
        health, self._health = self._health, None
        if not health.cancelled() and isinstance(error := health.exception(), errors.EngineDead):
            self._leave(error.message)

    def _leave(self, why: str) -> None:
        """Exit, for a supervisor to restart; what runs here is owed again once its lease lapses."""
        log.critical("action=engine_lost stage=%s worker=%s why=%s", self.host.stage.queue, self.host.worker, why)
        self.host.surrender()
        os._exit(EXIT_ENGINE)

    def _control_loop(self) -> None:
        listener = store.Store.listener(self.host.store)
        while not self._stop.is_set():
            try:
                for key in listener.controls(self.host.worker, timeout_s=1.0):
                    self.host.stop(key, errors.Stopped())
            except errors.BrokerUnavailable:
                self._stop.wait(0.5)
            except Exception:  # as above
                log.exception("action=control_failed worker=%s", self.host.worker)
                self._stop.wait(0.5)
