"""``omniqueue status``: each stage's queue, workers and rates, and which stage holds its pipeline back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omniqueue.catalog import Catalog
from omniqueue.overview import Overview, StageOverview
from omniqueue.store import Store

Worker = Mapping[str, Any]

_COLUMNS = (
    "pipeline",
    "stage",
    "name",
    "workers",
    "waiting",
    "oldest",
    "running",
    "done",
    "failed",
    "/min",
    "takes",
)
#: A wait that is worth a word, in seconds.
_LONG_S = 5.0


@dataclass(frozen=True)
class Status:
    """One look at a deployment."""

    overviews: tuple[Overview, ...]
    workers: tuple[Worker, ...]

    def of(self, stage: StageOverview) -> list[Worker]:
        """The workers that have announced themselves for a stage."""
        return [worker for worker in self.workers if worker["queue"] == stage.stage.queue]

    def slots(self, stage: StageOverview) -> int:
        """How many jobs its ready workers take at once."""
        return sum(int(worker["concurrency"]) for worker in self.of(stage) if worker["phase"] == "ready")


def look(known: Catalog, records: Store) -> Status:
    """Raises BrokerUnavailable."""
    return Status(tuple(records.overview(pipe) for pipe in known.pipelines), tuple(records.workers()))


def _rate(now: Overview, stage: StageOverview, before: Status | None) -> float | None:
    """Jobs a minute that the stage has done since the last look."""
    for earlier in before.overviews if before else ():
        if earlier.pipeline.name == now.pipeline.name and now.now > earlier.now:
            old = next(s for s in earlier.stages if s.stage.stage_id == stage.stage.stage_id)
            return 60 * (stage.ends.get("done", 0) - old.ends.get("done", 0)) / (now.now - earlier.now)
    return None


def as_text(status: Status, before: Status | None = None) -> str:
    """A table with a row per stage, jobs by state, workers that do not serve, and what to do first."""
    rows = [_COLUMNS, *(_row(status, o, s, before) for o in status.overviews for s in o.stages)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for overview in status.overviews:
        ended = ", ".join(f"{overview.counts.get(s, 0)} {s}" for s in ("succeeded", "failed", "cancelled", "expired"))
        lines += ["", f"{overview.pipeline.name}: {overview.live} in hand; {ended}"]
        if advice := _advice(status, overview):
            lines.append(advice)
    for worker in status.workers:
        if worker["phase"] != "ready":
            detail = f": {worker['detail']}" if worker["detail"] else ""
            lines.append(f"{worker['worker']} is {worker['phase']}{detail}")
    return "\n".join(lines)


def _row(status: Status, overview: Overview, stage: StageOverview, before: Status | None) -> tuple[str, ...]:
    rate = _rate(overview, stage, before)
    return (
        overview.pipeline.name,
        str(stage.stage.stage_id),
        stage.stage.name,
        _phases(status.of(stage)),
        str(stage.waiting),
        _seconds(stage.oldest_wait_s if stage.waiting else None),
        f"{stage.running}/{status.slots(stage)}",
        str(stage.ends.get("done", 0)),
        str(sum(stage.failures.values())),
        "-" if rate is None else f"{rate:.1f}",
        _seconds(stage.run.mean_s),
    )


def _phases(workers: Sequence[Worker]) -> str:
    """As in: 2 ready, 1 loading."""
    counts = Counter(str(worker["phase"]) for worker in workers)
    order = sorted(counts, key=lambda phase: (phase != "ready", phase))
    return ", ".join(f"{counts[phase]} {phase}" for phase in order) or "-"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def holds_back(status: Status, overview: Overview) -> StageOverview | None:
    """The stage that the others wait for: without a worker, or else the one whose oldest job has waited longest."""
    waiting = [stage for stage in overview.stages if stage.waiting]
    alone = [stage for stage in waiting if not status.slots(stage)]
    long = [stage for stage in waiting if stage.oldest_wait_s > _LONG_S]
    return max(alone or long, key=lambda stage: stage.oldest_wait_s, default=None)


def _advice(status: Status, overview: Overview) -> str | None:
    stage = holds_back(status, overview)
    if stage is None:
        return None
    what = "add a worker" if status.slots(stage) else "it has no worker that is ready; start one"
    return (
        f"Stage {stage.stage.stage_id} ({stage.stage.name}) holds it back: {stage.waiting} wait, the oldest for "
        f"{_seconds(stage.oldest_wait_s)}; {what}: celery -A omniqueue worker -Q {stage.stage.queue}"
    )


def as_json(status: Status) -> dict[str, Any]:
    """The same as data; rates are left to whoever looks twice."""
    return {
        "pipelines": [
            {
                "pipeline": overview.pipeline.name,
                "now": overview.now,
                "live": overview.live,
                "counts": dict(overview.counts),
                "holds_back": held.stage.stage_id if (held := holds_back(status, overview)) else None,
                "stages": [_stage_json(status, stage) for stage in overview.stages],
            }
            for overview in status.overviews
        ],
        "workers": [dict(worker) for worker in status.workers],
    }


def _stage_json(status: Status, stage: StageOverview) -> dict[str, Any]:
    return {
        "stage_id": stage.stage.stage_id,
        "name": stage.stage.name,
        "queue": stage.stage.queue,
        "workers": dict(Counter(str(worker["phase"]) for worker in status.of(stage))),
        "waiting": stage.waiting,
        "oldest_wait_s": round(stage.oldest_wait_s, 3),
        "running": stage.running,
        "slots": status.slots(stage),
        "ends": dict(stage.ends),
        "used": dict(stage.used),
        "mean_wait_s": stage.wait.mean_s,
        "mean_run_s": stage.run.mean_s,
    }
