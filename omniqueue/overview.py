"""How a pipeline does at one moment: its queues, what runs, and the counters that records.lua keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omniqueue.pipeline import Pipeline, Stage


@dataclass(frozen=True)
class Histogram:
    """Durations counted by size."""

    #: Upper bound in seconds as written ("0.5", "inf"), and how many were at most that long: cumulative.
    buckets: tuple[tuple[str, int], ...]
    #: Seconds in all.
    sum: float

    @property
    def count(self) -> int:
        """How many there were."""
        return self.buckets[-1][1] if self.buckets else 0

    @property
    def mean_s(self) -> float | None:
        """Seconds on average; None before the first."""
        return self.sum / self.count if self.count else None


@dataclass(frozen=True, kw_only=True)
class StageOverview:
    """One stage."""

    stage: Stage
    #: Jobs in its queue, and for how many seconds the oldest has waited.
    waiting: int
    oldest_wait_s: float
    #: Jobs that a worker has claimed.
    running: int
    #: How long attempts that ended had waited, and how long those that are done ran.
    wait: Histogram
    run: Histogram
    #: Ended attempts: done, cancelled, expired, handed_back, or the code of the failure.
    ends: Mapping[str, int]
    #: What attempts that are done used: tokens, pictures, payload bytes.
    used: Mapping[str, float]

    @property
    def failures(self) -> dict[str, int]:
        """Attempts that count as failures, by code."""
        return {end: count for end, count in self.ends.items() if end not in _NO_FAILURE}


#: Ends of an attempt for which nobody is to blame.
_NO_FAILURE = frozenset({"done", "cancelled", "expired", "handed_back"})


@dataclass(frozen=True, kw_only=True)
class Overview:
    """One pipeline."""

    pipeline: Pipeline
    #: Redis's clock, Unix seconds.
    now: float
    #: Jobs accepted and not finished.
    live: int
    #: Jobs accepted and ended, by state.
    counts: Mapping[str, int]
    stages: tuple[StageOverview, ...]

    @classmethod
    def parse(cls, pipe: Pipeline, answer: Sequence[Any]) -> Overview:
        """Read what the operation of that name returns."""
        now, live, counts, meters, leases, queues, bounds = answer
        told = dict(zip(meters[::2], map(float, meters[1::2]), strict=True))
        held = Counter(entry.rpartition(":")[2] for entry in leases)
        return cls(
            pipeline=pipe,
            now=float(now),
            live=live,
            counts=dict(zip(counts[::2], map(int, counts[1::2]), strict=True)),
            stages=tuple(
                StageOverview(
                    stage=stage,
                    waiting=waiting,
                    oldest_wait_s=max(0.0, float(now) - float(since)) if since else 0.0,
                    running=held[str(stage.stage_id)],
                    **_counted(_under(told, f"{stage.stage_id}:"), bounds),
                )
                for stage, (waiting, since) in zip(pipe.stages, queues, strict=True)
            ),
        )


def _counted(told: Mapping[str, float], bounds: Sequence[str]) -> dict[str, Any]:
    """The counters of one stage, by the names in records.lua."""
    return {
        "wait": _histogram(_under(told, "wait:"), bounds),
        "run": _histogram(_under(told, "run:"), bounds),
        "ends": {end: int(count) for end, count in _under(told, "end:").items()},
        "used": _under(told, "use:"),
    }


def _under(told: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in told.items() if name.startswith(prefix)}


def _histogram(told: Mapping[str, float], bounds: Sequence[str]) -> Histogram:
    so_far, buckets = 0, []
    for bound in bounds:
        so_far += int(told.get(bound, 0))
        buckets.append((bound, so_far))
    return Histogram(tuple(buckets), told.get("sum", 0.0))
