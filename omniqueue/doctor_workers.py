"""The doctor's look at the workers, by their announcements: all stages there, same topology, memory and clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omniqueue import room
from omniqueue.doctor_redis import SKEW_S
from omniqueue.finding import Finding, error, ok, warning
from omniqueue.heartbeats import HEARTBEAT_TTL_S
from omniqueue.payloads import PayloadStore
from omniqueue.pipeline import Pipeline, Stage

Worker = Mapping[str, Any]


def stages(pipelines: tuple[Pipeline, ...], workers: Sequence[Worker]) -> Iterator[Finding]:
    """A worker that can serve, for every stage."""
    for pipe in pipelines:
        for stage in pipe.stages:
            yield _stage(pipe, stage, [w for w in workers if w["queue"] == stage.queue], bool(workers))


def _stage(pipe: Pipeline, stage: Stage, mine: Sequence[Worker], any_at_all: bool) -> Finding:
    where = f"{pipe.name}, stage {stage.stage_id} ({stage.name})"
    start = f"Start one: celery -A omniqueue worker -Q {stage.queue}."
    for worker in mine:
        if worker["fingerprint"] != pipe.fingerprint:
            return error(
                "workers",
                f"{where}: {worker['worker']} serves another topology ({worker['fingerprint']}, not "
                f"{pipe.fingerprint}).",
                "Start it with the stage config that the router has.",
            )
    ready = [worker for worker in mine if worker["phase"] == "ready"]
    if ready:
        return ok("workers", f"{where}: {len(ready)} ready.")
    if mine:
        phase = "; ".join(f"{w['worker']} is {w['phase']}" + (f" ({w['detail']})" if w["detail"] else "") for w in mine)
        level = error if any(worker["phase"] == "refused" for worker in mine) else warning
        return level("workers", f"{where} has no worker that is ready: {phase}.", "Its log says more.")
    # Where nothing runs yet, nothing is broken.
    return (error if any_at_all else warning)("workers", f"{where} has no worker.", start)


def memory(pipelines: tuple[Pipeline, ...], workers: Sequence[Worker], shared: PayloadStore) -> Iterator[Finding]:
    """Whether the workers of each pipeline see one and the same payload folder, and agree on its host's name."""
    for pipe in pipelines:
        queues = {stage.queue for stage in pipe.stages}
        mine = [worker for worker in workers if worker["queue"] in queues and worker.get("shm")]
        if len(pipe.stages) < 2 or not mine:
            continue
        yield _memory(pipe, mine, shared)


def _memory(pipe: Pipeline, mine: Sequence[Worker], shared: PayloadStore) -> Finding:
    first = mine[0]
    for other in mine[1:]:
        pair = f"{first['worker']} and {other['worker']}"
        same_memory, same_name = first["shm"]["id"] == other["shm"]["id"], first["host"] == other["host"]
        if not same_memory:
            return error(
                "sharing",
                f"{pipe.name}: {pair} do not share their payload folder ({first['shm']['folder']}), so one cannot read "
                "what the other writes.",
                "Mount one tmpfs into all of them (docker: one volume at /dev/shm), and keep a pipeline's stages on "
                "one host.",
            )
        if not same_name:
            return error(
                "sharing",
                f"{pipe.name}: {pair} share their payload folder, but call their host {first['host']} and "
                f"{other['host']}, so one refuses what the other writes.",
                "Give all of them the same OMNIQUEUE_HOST.",
            )
    if first["host"] == shared.host and first["shm"]["id"] != room.identity(shared.directory):
        return error(
            "sharing",
            f"{pipe.name}: its workers use another payload folder than this process, which also calls its host "
            f"{shared.host}; a router here could not hand them a picture.",
            "Mount the same tmpfs here, or set OMNIQUEUE_SHM_DIR alike.",
        )
    return ok("sharing", f"{pipe.name}: {len(mine)} worker{'s' * (len(mine) > 1)} share one payload folder.")


def clocks(workers: Sequence[Worker], now: float) -> Iterator[Finding]:
    """Each host's clock against ``now``, which is Redis's; an announcement may be as old as it lives."""
    off: dict[str, float] = {}
    for worker in workers:
        behind_s = now - worker.get("told_at", now)
        if not -SKEW_S <= behind_s <= HEARTBEAT_TTL_S + SKEW_S:
            off[worker["host"]] = behind_s
    for host, behind_s in off.items():
        text = f"The clock of {host} is about {abs(behind_s):.0f} s {'behind' if behind_s > 0 else 'ahead of'} Redis's."
        yield warning("clock", text, "Let all hosts keep time by NTP.")
