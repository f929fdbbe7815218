"""/health, /ready and /v1/queues: is the router alive, could a job be done now, and what waits where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import flask

from omniqueue import errors
from omniqueue.pipeline import Pipeline, Stage
from web import answers, openai_format, openapi
from web.services import current

blueprint = flask.Blueprint("health", __name__)

Announcement = Mapping[str, Any]


@blueprint.get("/health")
def health() -> flask.Response:
    """The process answers; nothing else is asked, since a restart would not bring Redis back."""
    return openai_format.reply({"status": "ok"})


@blueprint.get("/ready")
def ready() -> flask.Response:
    """200 when every stage of every pipeline has a live replica; 503 and why otherwise."""
    services = current()
    try:
        workers = services.store.workers()
    except errors.BrokerUnavailable as exc:
        problem = openai_format.of_error(errors.BrokerUnavailable("Redis does not answer, so no stage can be seen."))
        body = {"status": "not_ready", "reasons": [problem.message], "pipelines": [], **problem.body()}
        return openai_format.reply(body, exc.status)
    pipelines = [_pipeline(pipe, workers) for pipe in services.catalog.pipelines]
    reasons = [f"{pipe['pipeline']}: {reason}" for pipe in pipelines for reason in pipe["reasons"]]
    if all(pipe["ready"] for pipe in pipelines):
        return openai_format.reply({"status": "ready", "reasons": reasons, "pipelines": pipelines})
    problem = openai_format.of_error(errors.NotReady(" ".join(reasons)))
    return openai_format.reply(
        {"status": "not_ready", "reasons": reasons, "pipelines": pipelines, **problem.body()}, problem.status
    )


@blueprint.get("/v1/queues")
def queues() -> flask.Response:
    """Every stage's queue, from the records and the workers' heartbeats."""
    services = current()
    workers = services.store.workers()
    data = []
    for pipe in services.catalog.pipelines:
        for stage in pipe.stages:
            live = live_replicas(pipe, stage, workers)
            waiting, oldest_s = services.store.waiting(stage.queue)
            data.append(
                {
                    "object": "queue",
                    "queue": stage.queue,
                    "pipeline": pipe.name,
                    "stage_id": stage.stage_id,
                    "name": stage.name,
                    "waiting": waiting,
                    "oldest_wait_s": round(oldest_s, 3),
                    "running": sum(int(worker["running"]) for worker in _of(stage, workers)),
                    "replicas": len(live),
                    "capacity": sum(int(worker["concurrency"]) for worker in live),
                }
            )
    return openai_format.reply({"object": "list", "data": data})


def _of(stage: Stage, workers: Sequence[Announcement]) -> list[Announcement]:
    """By queue: that is what binds a worker to a stage, whatever it believes the pipeline to be."""
    return [worker for worker in workers if worker["queue"] == stage.queue]


def live_replicas(pipe: Pipeline, stage: Stage, workers: Sequence[Announcement]) -> list[Announcement]:
    """The workers that would do this stage of this pipeline now."""
    return [w for w in _of(stage, workers) if w["phase"] == "ready" and w["fingerprint"] == pipe.fingerprint]


def _pipeline(pipe: Pipeline, workers: Sequence[Announcement]) -> dict[str, Any]:
    stages = [_stage(pipe, stage, workers) for stage in pipe.stages]
    return {
        "pipeline": pipe.name,
        "models": list(pipe.served_model_names),
        "ready": all(stage["ready"] for stage in stages),
        "reasons": [stage["reason"] for stage in stages if stage["reason"]],
        "stages": stages,
    }


def _stage(pipe: Pipeline, stage: Stage, workers: Sequence[Announcement]) -> dict[str, Any]:
    mine = _of(stage, workers)
    live = live_replicas(pipe, stage, workers)
    shown = ("worker", "host", "pid", "phase", "detail", "concurrency", "running", "started_at")
    return {
        "stage_id": stage.stage_id,
        "name": stage.name,
        "queue": stage.queue,
        "ready": bool(live),
        "ready_replicas": len(live),
        "replicas": [{key: worker.get(key) for key in shown} for worker in mine],
        "reason": _reason(pipe, stage, mine, live),
    }


def _reason(pipe: Pipeline, stage: Stage, mine: Sequence[Announcement], live: Sequence[Announcement]) -> str | None:
    """One sentence: what a stage lacks, or which of its workers is useless; None when all is well."""
    where = f"Stage {stage.stage_id} ({stage.name})"
    others = [worker for worker in mine if worker not in live and worker["phase"] != "draining"]
    useless = "; ".join(_useless(pipe, worker) for worker in others)
    if live:
        wrong = [worker for worker in mine if worker["fingerprint"] != pipe.fingerprint]
        return f"{where} has workers that cannot serve it: {useless}." if wrong else None
    if not mine:
        return f"{where} has no worker; start one with: celery -A omniqueue worker -Q {stage.queue}."
    return f"{where} has no ready worker: {useless or 'all of them are shutting down'}."


def _useless(pipe: Pipeline, worker: Announcement) -> str:
    """Why one worker does not count."""
    if worker["fingerprint"] != pipe.fingerprint:
        return (
            f"{worker['worker']} serves another topology than the router ({worker['pipeline']} {worker['fingerprint']} "
            f"there, {pipe.name} {pipe.fingerprint} here), start it with the router's stage config"
        )
    detail = f" ({worker['detail']})" if worker.get("detail") else ""
    return f"{worker['worker']} is {worker['phase']}{detail}"


operations = (
    openapi.Operation(
        method="GET", path="/health", summary="The process answers", responses={200: answers.Health}, public=True
    ),
    openapi.Operation(
        method="GET",
        path="/ready",
        summary="Could a job be done now, and why not",
        responses={200: answers.Ready, 503: answers.NotReady},
    ),
    openapi.Operation(method="GET", path="/v1/queues", summary="What waits where", responses={200: answers.Queues}),
)
