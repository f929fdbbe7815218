"""How what a job owes gets into its queue, again if need be, and what the queues hold."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable

from omniqueue import errors, messages, store
from omniqueue.celery_app import app
from omniqueue.pipeline import Pipeline

log = logging.getLogger(__name__)

_ARGSREPR = re.compile(r"\(([0-9a-f]+), \d+\)")


def message(pipe: Pipeline, records: store.Store, owed: store.Owed, priority: int) -> messages.Message | None:
    """What the record's own function enqueues together with the change; None when the queues are not in its Redis."""
    return messages.message(pipe, owed.job_id, owed.stage_id, priority) if records.holds_queues else None


def publish(pipe: Pipeline, owed: store.Owed, priority: int = 0) -> bool:
    """Enqueue what is owed of a job through Celery. False when the broker is away: the reaper then does it again."""
    try:
        signature = messages.chain(pipe, owed.job_id, owed.stage_id, priority)
        signature.apply_async(**messages.options(owed.job_id, priority))
    except Exception as exc:  # noqa: BLE001 - kombu raises the transport's own errors, whichever transport it is
        log.warning("action=publish_failed job=%s stage=%s error=%s", owed.job_id, owed.stage_id, exc)
        return False
    return True


def republish(pipe: Pipeline, records: store.Store, owed: store.Owed) -> bool:
    """Enqueue what is owed again, with the priority that the job was accepted with. False when the broker is away."""
    try:
        priority = records.priority(owed.job_id)
        if made := message(pipe, records, owed, priority):
            records.enqueue(made)
            return True
    except errors.BrokerUnavailable as exc:
        log.warning("action=publish_failed job=%s stage=%s error=%s", owed.job_id, owed.stage_id, exc)
        return False
    return publish(pipe, owed, priority)


def broker_lists(queue: str) -> list[str]:
    """The Redis lists that hold a queue: one per priority step, most urgent first."""
    return [messages.redis_list(queue, step) for step in app.conf.broker_transport_options["priority_steps"]]


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
