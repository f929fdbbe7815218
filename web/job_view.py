"""A job's record as the object that clients see."""

from __future__ import annotations

from typing import Any

from omniqueue import errors, job
from omniqueue.pipeline import Pipeline
from web import files, openai_format, submission
from web.services import Services


def of(services: Services, record: job.Job) -> dict[str, Any]:
    """The job object; times are Unix seconds by Redis's clock."""
    pipe = _pipeline(services, record)
    here = record.stages[record.stage]
    ended = record.state.terminal
    return {
        "id": record.id,
        "object": "job",
        "type": record.request.get("kind"),
        "status": record.state.value,
        "pipeline": record.pipeline,
        "model": record.request.get("model"),
        "user": record.request.get("user"),
        "priority": record.priority,
        "created_at": record.created_at,
        "deadline": record.deadline,
        "finished_at": record.finished_at,
        "stage": None if ended else stage_now(here, _name(pipe, here.stage_id)),
        "position": _position(services, pipe, record),
        "progress": progress(record),
        "stages": [stage(one, _name(pipe, one.stage_id)) for one in record.stages],
        "result": _result(services, record),
        **(submission.warnings(pipe, record) if pipe else {}),
        "error": openai_format.job_error(record) if ended and record.state is not job.JobState.SUCCEEDED else None,
    }


def stage_now(record: job.StageRecord, name: str | None) -> dict[str, Any]:
    """Where a live job is."""
    return {"stage_id": record.stage_id, "name": name, "state": record.state}


def stage(record: job.StageRecord, name: str | None) -> dict[str, Any]:
    """One stage: its state ("waiting" until it is reached), its attempts, its times and what it was run with."""
    done, total = record.progress
    return {
        "stage_id": record.stage_id,
        "name": name,
        "state": record.state or "waiting",
        "attempt": record.attempt,
        "failures": record.failures,
        "worker": record.worker,
        "queued_at": record.queued_at,
        "started_at": record.started_at,
        "ended_at": record.ended_at,
        "wait_s": _between(record.queued_at, record.started_at),
        "run_s": _between(record.started_at, record.ended_at),
        "progress": {"done": done, "total": total} if total else None,
        "params": record.params,
    }


def progress(record: job.Job) -> float:
    """0 to 1: stages done, and the share of steps of the one that runs."""
    if record.state is job.JobState.SUCCEEDED:
        return 1.0
    return round(sum(_share(one) for one in record.stages) / len(record.stages), 4)


def _share(record: job.StageRecord) -> float:
    if record.state == "done":
        return 1.0
    done, total = record.progress
    # Only "done" is all of it: a stage whose steps are over still has its output to store.
    return min(0.99, done / total) if total and record.state == "running" else 0.0


def _between(start: float | None, end: float | None) -> float | None:
    """Seconds; None while either is missing, or belongs to an earlier attempt than the other."""
    return round(end - start, 6) if start is not None and end is not None and end >= start else None


def _pipeline(services: Services, record: job.Job) -> Pipeline | None:
    """None for a job of a pipeline that this router no longer serves."""
    try:
        return services.catalog.named(record.pipeline)
    except errors.NotFound:
        return None


def _name(pipe: Pipeline | None, stage_id: int) -> str | None:
    return pipe.stages[stage_id].name if pipe is not None and stage_id < len(pipe.stages) else None


def _position(services: Services, pipe: Pipeline | None, record: job.Job) -> int | None:
    """Jobs ahead in the queue of the stage it waits for; None when it does not wait."""
    here = record.stages[record.stage]
    if record.state.terminal or here.state != "queued" or pipe is None or here.stage_id >= len(pipe.stages):
        return None
    return services.store.position(pipe.stages[here.stage_id].queue, record.id)


def _result(services: Services, record: job.Job) -> dict[str, Any] | None:
    """The result with URLs in place of file names."""
    if record.result is None:
        return None
    data = []
    for entry in record.result.get("data", ()):
        shown = {key: value for key, value in entry.items() if key != "file"}
        data.append({"url": files.url(services, entry["file"]), **shown} if "file" in entry else shown)
    return {**record.result, "data": data}
