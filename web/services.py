"""What the endpoints share: configuration, pipelines, records, media, and the threads that start after the fork."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from typing import cast

import flask

from omniqueue import media, payloads, reaper, settings, store, tracing
from omniqueue.catalog import Catalog
from web import traces, traffic, wait

_KEY = "omniqueue"


@dataclass
class Services:
    """One per application; :meth:`start` may be called any number of times."""

    config: settings.Settings
    catalog: Catalog
    store: store.Store
    media: media.MediaStore
    payloads: payloads.PayloadStore
    waiter: wait.ReplyWaiter
    traffic: traffic.Traffic = field(default_factory=traffic.Traffic)
    started_at: float = field(default_factory=time.time)
    #: Set when the process is to end: streams end at once.
    stopping: threading.Event = field(default_factory=threading.Event)
    _pid: int = 0
    _reaper: reaper.Reaper | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def build(cls, config: settings.Settings, known: Catalog) -> Services:
        """Connect nothing yet: a router starts, and says what it misses, while Redis is away."""
        records = store.Store.from_settings(config)
        place = media.MediaStore(config.media_fs_url or settings.default_media_dir())
        shared = payloads.PayloadStore(config.payload_namespace(), config.shm_dir, config.host)
        return cls(config, known, records, place, shared, wait.ReplyWaiter(records))

    def start(self) -> None:
        """Start the threads of this process; a fork takes none along, so the process id tells whether they run."""
        if self._pid == os.getpid():
            return
        with self._lock:
            if self._pid != os.getpid():
                tracing.configure("omniqueue-router", self.config.traces)
                self.waiter.start()
                self._reaper = self._new_reaper()
                self._reaper.start()
                self.traffic.start(self.store)
                self._pid = os.getpid()

    def shut_down(self) -> None:
        """For a signal handler: streams end now, requests in hand may wait for their jobs for the grace period.

        A second call ends their wait at once; the jobs go on.
        """
        grace_s = 0.0 if self.stopping.is_set() else self.config.drain_grace_s
        self.stopping.set()
        timer = threading.Timer(grace_s, self.waiter.release)
        timer.daemon = True
        timer.start()

    def stop(self) -> None:
        """End the threads of this process."""
        with self._lock:
            self.waiter.stop()
            self.traffic.stop()
            if self._reaper is not None:
                self._reaper.stop()
            self._reaper, self._pid = None, 0

    def _new_reaper(self) -> reaper.Reaper:
        config = self.config
        records = store.Store.from_settings(config, timeout_s=5.0)
        return reaper.Reaper(records, self.catalog, self.payloads, self.media, router=True)


def attach(app: flask.Flask, services: Services) -> None:
    """Make ``services`` what :func:`current` finds, and start its threads no later than with the first request."""
    app.extensions[_KEY] = services
    app.before_request(services.start)
    traffic.attach(app, services.traffic)
    traces.attach(app)


def of(app: flask.Flask) -> Services:
    """The services of an application."""
    return cast(Services, app.extensions[_KEY])


def current() -> Services:
    """The services of the request in hand."""
    return of(flask.current_app)
