"""A job as a Celery chain: one signature per stage, each on its stage's queue, ids only in the arguments."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from typing import Any

import celery

from omniqueue import errors, store, tasks
from omniqueue.celery_app import app
from omniqueue.pipeline import Pipeline

log = logging.getLogger(__name__)

_ARGSREPR = re.compile(r"\(([0-9a-f]+), \d+\)")


def signature(pipe: Pipeline, stage_id: int, job_id: str, priority: int = 0) -> Any:
    """The message that asks for one stage of one job."""
    stage = pipe.stage(stage_id)
    return tasks.run_stage.si(job_id, stage_id).set(
        queue=stage.queue, priority=priority, argsrepr=f"({job_id}, {stage_id})", kwargsrepr="{}"
    )


def build(pipe: Pipeline, job_id: str, first: int = 0, priority: int = 0) -> Any:
    """The chain from stage ``first`` to the last: each finished stage enqueues the next."""
    return celery.chain(*[signature(pipe, stage.stage_id, job_id, priority) for stage in pipe.stages[first:]])


def publish(pipe: Pipeline, owed: store.Owed, priority: int = 0) -> bool:
    """Enqueue what is owed of a job. False when the broker is away: the reaper then does it again."""
    try:
        build(pipe, owed.job_id, owed.stage_id, priority).apply_async(priority=priority)
    except Exception as exc:  # noqa: BLE001 - kombu raises the transport's own errors, whichever transport it is
        log.warning("action=publish_failed job=%s stage=%s error=%s", owed.job_id, owed.stage_id, exc)
        return False
    return True


def republish(pipe: Pipeline, records: store.Store, owed: store.Owed) -> bool:
    """Enqueue what is owed again, with the priority that the job was accepted with. False when the broker is away."""
    try:
        priority = records.priority(owed.job_id)
    except errors.BrokerUnavailable as exc:
        log.warning("action=publish_failed job=%s stage=%s error=%s", owed.job_id, owed.stage_id, exc)
        return False
    return publish(pipe, owed, priority)


def broker_lists(queue: str) -> list[str]:
    """The Redis lists that hold a queue: one per priority step, most urgent first."""
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        return [channel._q_for_pri(queue, step) for step in channel.priority_steps]


def jobs_of(messages: Iterable[str]) -> list[str]:
    """The job ids in raw broker messages, as :func:`signature` wrote them; "?" where there is none."""
    return [_job_of(text) for text in messages]


def _job_of(text: str) -> str:
    try:
        match = _ARGSREPR.fullmatch(json.loads(text)["headers"]["argsrepr"])
    except (ValueError, LookupError, TypeError):  # somebody else's message
        match = None
    return match[1] if match else "?"


def broker_is_redis() -> bool:
    """True when the broker's queues are Redis lists, which the reaper can look into."""
    return str(app.conf.broker_url).startswith(("redis://", "rediss://", "redis+socket://"))
