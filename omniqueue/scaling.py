"""How many workers a stage should have, from what it has seen: a pure function of time and counters, for autoscale.py.

Enough to keep up with what arrives, and to work off what waits before it has waited for too long. More at once, when
that is needed; fewer only when fewer would have been enough for a while. At most one change in a cool-down.
"""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass, field

#: How busy workers may be kept: the queue in front of workers that are always busy grows without end.
_BUSY = 0.95
#: The share of the target wait in which what waits should be gone, and up to which waiting is no reason for more.
_CLEAR = 0.8
_CALM = 0.25
#: How long fewer workers must have been enough, as a share of the window.
_CALM_WINDOW = 0.8


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an operator asks of one stage; times in seconds."""

    low: int = 1
    high: int = 1
    target_wait_s: float = 30.0
    cooldown_s: float = 60.0
    #: Arrivals are counted over this long.
    window_s: float = 300.0


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One look at a stage; counters only grow."""

    now: float
    waiting: int
    running: int
    #: Workers that are there, those that load included.
    replicas: int
    #: Jobs that one worker takes at once.
    slots: int
    #: Jobs that have come to the stage, and jobs done with the seconds that they ran.
    arrived: int
    done: int
    run_s: float


@dataclass
class Scaler:
    """The memory of one stage."""

    limits: Limits
    _looks: collections.deque[Seen] = field(default_factory=collections.deque)
    _needs: collections.deque[tuple[float, int]] = field(default_factory=collections.deque)
    _changed_at: float = float("-inf")

    def decide(self, seen: Seen) -> int:
        """How many workers there should be now; another number than ``seen.replicas`` is a change."""
        self._remember(seen)
        if seen.now - self._changed_at < self.limits.cooldown_s:
            return seen.replicas
        lately = [need for _, need in self._needs]
        target = self._within(max(lately) if max(lately) < seen.replicas else max(lately[-1], seen.replicas))
        if target < seen.replicas and seen.now - self._looks[0].now < _CALM_WINDOW * self.limits.window_s:
            return seen.replicas  # too soon to say
        if target != seen.replicas:
            self._changed_at = seen.now
        return target

    def _remember(self, seen: Seen) -> None:
        window_s = self.limits.window_s
        self._looks.append(seen)
        while len(self._looks) > 2 and seen.now - self._looks[1].now >= window_s:
            self._looks.popleft()
        self._needs.append((seen.now, self._need(seen)))
        while seen.now - self._needs[0][0] > _CALM_WINDOW * window_s:
            self._needs.popleft()

    def _within(self, count: int) -> int:
        return max(self.limits.low, min(self.limits.high, count))

    def _need(self, seen: Seen) -> int:
        """Workers for what arrives, and for what waits to be gone in time."""
        first = self._looks[0]
        if not seen.waiting and not seen.running and seen.arrived == first.arrived:
            return 0
        run_s = self._run_s(seen)
        if run_s is None:  # nothing is known yet: one worker will tell
            return max(1, seen.replicas)
        passed = seen.now - first.now
        steady = (seen.arrived - first.arrived) / passed * run_s / (seen.slots * _BUSY) if passed else 0.0
        # Seconds that a worker, and that all workers, would need for what waits.
        work_s = seen.waiting * run_s / seen.slots
        calm_s = _CALM * self.limits.target_wait_s * max(1, seen.replicas)
        return max(1, math.ceil(steady + max(0.0, work_s - calm_s) / (_CLEAR * self.limits.target_wait_s)))

    def _run_s(self, seen: Seen) -> float | None:
        """Seconds that a job runs, on average over the window, or over all time when none ended in it."""
        first = self._looks[0]
        if seen.done > first.done:
            return (seen.run_s - first.run_s) / (seen.done - first.done)
        return seen.run_s / seen.done if seen.done else None
