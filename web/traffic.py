"""Requests by route and status: counted in memory and added to Redis once a second, so all routers tell the same."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import flask

from omniqueue import errors, logs, store

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
#: Upper bounds of the buckets that durations are counted in, in seconds.
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, float("inf"))
#: What a client may send as a method is not for it to choose: each value is a time series.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


@dataclass
class RouteTraffic:
    """What was answered on one route."""

    method: str
    route: str
    #: Answers by status.
    statuses: dict[str, int] = field(default_factory=dict)
    #: Answers by the upper bound of the bucket that their duration fell into; not cumulative.
    durations: dict[float, int] = field(default_factory=dict)
    #: Seconds in all.
    sum_s: float = 0.0


class Traffic:
    """The requests that this process has answered and not yet told."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._untold: collections.Counter[str] = collections.Counter()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """One answer; ``seconds`` until its first byte was ready."""
        name = f"{method if method in _METHODS else 'other'} {route}"
        bound = next(bound for bound in BOUNDS if seconds <= bound)
        told = {f"{name} {status}": 1, f"{name} <={bound:g}": 1, f"{name} sum": seconds}
        with self._lock:
            for key, amount in told.items():
                self._untold[key] += amount  # type: ignore[assignment]

    def tell(self, records: store.Store) -> dict[str, float]:
        """Add to Redis what is new, and return the sums of all routers. Raises BrokerUnavailable; nothing is lost."""
        with self._lock:
            amounts, self._untold = self._untold, collections.Counter()
        try:
            return records.traffic(amounts)
        except BaseException:
            with self._lock:
                for key, amount in amounts.items():
                    self._untold[key] += amount
            raise

    def start(self, records: store.Store) -> None:
        """Tell once a second from now on; call after a fork."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._loop, args=(records,), name="traffic", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tell what is left, and end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _loop(self, records: store.Store) -> None:
        while True:
            last = self._stop.wait(INTERVAL_S)
            try:
                if self._untold:
                    self.tell(records)
            except errors.BrokerUnavailable:
                log.info("action=traffic_kept")
            except Exception:  # a thread that dies would stop counting
                log.exception("action=traffic_failed")
            if last:
                return


def parse(sums: Mapping[str, float]) -> Iterable[RouteTraffic]:
    """The sums by route."""
    routes: dict[str, RouteTraffic] = {}
    for key, amount in sorted(sums.items()):
        name, _, what = key.rpartition(" ")
        method, _, route = name.partition(" ")
        one = routes.setdefault(name, RouteTraffic(method, route))
        if what == "sum":
            one.sum_s = amount
        elif what.startswith("<="):
            one.durations[float(what[2:])] = int(amount)
        else:
            one.statuses[what] = int(amount)
    return routes.values()


def attach(app: flask.Flask, traffic: Traffic) -> None:
    """Count every answer of the application."""

    def begin() -> None:
        logs.now_about()
        flask.g.begun_at = time.monotonic()

    def end(response: flask.Response) -> flask.Response:
        rule = flask.request.url_rule
        seconds = time.monotonic() - flask.g.get("begun_at", time.monotonic())
        traffic.count(flask.request.method, rule.rule if rule else "other", response.status_code, seconds)
        return response

    app.before_request(begin)
    app.after_request(end)
