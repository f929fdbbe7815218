"""The broker messages of a chain: made once by Celery itself, then only filled in with a job's id.

A message is a pure function of the pipeline, the stage, the job and its priority, so Celery's canvas and kombu's
serializers run once for each stage and priority, and not once for each hop. What comes out is what ``apply_async`` of
the chain sends: any Celery worker takes it, and Flower shows it.
"""

from __future__ import annotations

import base64
import functools
import json
import threading
from typing import Any

import celery
import kombu
from kombu.transport import redis as redis_transport

from omniqueue import calls, tasks
from omniqueue.celery_app import app
from omniqueue.claims import Message as Message
from omniqueue.pipeline import Pipeline

#: Stands for the job's id while Celery makes the message: of the same alphabet, so that nothing quotes it.
_JOB = "f" * 32
_BODY, _TAG = "<body>", "<tag>"
#: All in-memory connections of a process share their queues.
_making = threading.Lock()


def task_id(job_id: str, stage_id: int) -> str:
    """A task is named after its job and stage, so that Flower and logs tell them."""
    return f"{job_id}-{stage_id}"


def chain(pipe: Pipeline, job_id: str, first: int = 0, priority: int = 0) -> Any:
    """The Celery chain from stage ``first`` to the last: one signature per stage, each on its stage's queue."""
    return _chain(_plan(pipe, first), job_id, priority)


def options(job_id: str, priority: int) -> dict[str, Any]:
    """What else ``apply_async`` is given: the priority of the first message, and the task that the job began with."""
    return {"priority": priority, "root_id": task_id(job_id, 0)}


def message(pipe: Pipeline, job_id: str, first: int, priority: int) -> Message:
    """What Celery would put into Redis for the chain from stage ``first``, and where."""
    place, envelope, body = _template(_plan(pipe, first), priority)
    content = base64.b64encode(body.replace(_JOB, job_id).encode()).decode()
    text = envelope.replace(_JOB, job_id).replace(_BODY, content).replace(_TAG, calls.new_id())
    return Message(place, text)


Plan = tuple[tuple[int, str], ...]


def _plan(pipe: Pipeline, first: int) -> Plan:
    return tuple((stage.stage_id, stage.queue) for stage in pipe.stages[first:])


def _chain(plan: Plan, job_id: str, priority: int) -> Any:
    return celery.chain(*[_signature(stage_id, queue, job_id, priority) for stage_id, queue in plan])


def _signature(stage_id: int, queue: str, job_id: str, priority: int) -> Any:
    return tasks.run_stage.si(job_id, stage_id).set(
        queue=queue,
        priority=priority,
        task_id=task_id(job_id, stage_id),
        argsrepr=f"({job_id}, {stage_id})",
        kwargsrepr="{}",
    )


def redis_list(queue: str, priority: int) -> str:
    """The list in which kombu's Redis transport keeps a queue's messages of one priority (0, most urgent, to 9)."""
    return f"{queue}{redis_transport.Channel.sep}{priority}" if priority else queue


@functools.cache
def _template(plan: Plan, priority: int) -> tuple[str, str, str]:
    """The list, the message and its body, with marks for what differs from job to job."""
    _, queue = plan[0]
    steps = {"priority_steps": app.conf.broker_transport_options["priority_steps"]}
    with _making, kombu.Connection("memory://", transport_options=steps) as connection:
        _chain(plan, _JOB, priority).apply_async(connection=connection, **options(_JOB, priority))
        made = connection.default_channel._queue_for(queue).get(block=False)
    body = base64.b64decode(made["body"]).decode()
    made["body"] = _BODY
    made["properties"]["delivery_tag"] = _TAG
    return redis_list(queue, priority), json.dumps(made), body
