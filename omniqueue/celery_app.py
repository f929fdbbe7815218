"""The one Celery app and every broker setting, each with its why."""

from __future__ import annotations

from typing import Any

import celery
import msgspec
from celery import signals
from kombu import serialization
from kombu.transport import redis as redis_transport
from kombu.utils import json as kombu_json

from omniqueue import logs, settings

_settings = settings.load()

app = celery.Celery("omniqueue", broker=_settings.celery_broker(), include=["omniqueue.tasks"])
# In every thread: Celery keeps the current app per thread, and the router and the reaper publish from many.
app.set_default()

app.conf.update(
    # JSON only: a pickle from the broker would run code.
    task_serializer="json",
    accept_content=["json"],
    # Results live in the job record; a result backend would cost more than the hop itself and leave keys behind.
    task_ignore_result=True,
    # Threads share one engine, which batches them; a fork would break CUDA and load the model once per child.
    worker_pool="threads",
    # Late acknowledgement with a multiplier of 1 reserves nothing beyond what runs, so an idle replica never starves.
    task_acks_late=True,
    worker_prefetch_multiplier=1,
    broker_transport_options={
        # The job record re-enqueues what is lost, in seconds. Kombu's own bookkeeping of un-acked messages costs 17 %
        # of a hop, runs long tasks twice, and its restore path kills the worker when Redis restarts.
        "ack_emulation": False,
        # Each priority its own list; kombu's default folds ten into four.
        "priority_steps": list(range(10)),
        # redis-py's default is 5 s, which would cut the blocking read of an idle queue.
        "socket_timeout": 30,
        "socket_connect_timeout": 2,
        "socket_keepalive": True,
        "health_check_interval": 25,
    },
    # A worker outlives its broker: it tries again for ever, once a second.
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_connection_timeout=2,
    worker_consumer="workers.consumer:Consumer",
    worker_cancel_long_running_tasks_on_connection_loss=False,
    # Publishing fails fast: the record says that the work is owed, and the reaper publishes again.
    task_publish_retry=False,
    # The next stage of a job waits with the priority of the first; Celery drops it otherwise.
    task_inherit_parent_priority=True,
    broker_pool_limit=64,
    # Names in Flower are short, and prompts never show: arguments are ids (see chain.py).
    worker_send_task_events=False,
    worker_hijack_root_logger=False,
    worker_redirect_stdouts=False,
    worker_log_color=False,
)

# When a connection closes, kombu gives un-acked messages back; while Redis is away it pickles them into a file in the
# temporary folder instead, one more with each outage. The job record knows what is owed.
redis_transport.Channel.do_restore = False


def _loads(text: str | bytes) -> Any:
    """Kombu's JSON, in C: its own calls a Python function for every object, which costs more than receiving a message.

    Raises ValueError for what is not JSON.
    """
    marker = b"__type__" if isinstance(text, bytes) else "__type__"
    if marker in text:  # type: ignore[operator]  # what kombu marked, such as a date in the answer to an inspection
        return kombu_json.loads(text)
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as exc:
        raise ValueError(str(exc)) from exc


redis_transport.loads = _loads
serialization.register("json", kombu_json.dumps, _loads, "application/json", "utf-8")


def publish_only(config: settings.Settings) -> None:
    """In a process that never consumes: publishing fails as fast as the records do, should the broker hang."""
    app.conf.broker_url = config.celery_broker()
    app.conf.broker_transport_options = {
        **app.conf.broker_transport_options,
        "socket_timeout": config.redis_timeout_s,
        "socket_connect_timeout": config.redis_timeout_s,
    }


@signals.setup_logging.connect  # type: ignore[untyped-decorator]
def _configure_logs(loglevel: int, logfile: str | None, **_: Any) -> None:
    """In place of Celery's own handlers and formats."""
    logs.configure(_settings.log_format, loglevel, logfile)


@signals.celeryd_init.connect  # type: ignore[untyped-decorator]
def _configure_worker(instance: Any, conf: Any, options: dict[str, Any], **_: Any) -> None:
    """Turn ``celery worker -Q stage0`` into a stage's worker: its engine, its concurrency."""
    from workers import stage_worker

    stage_worker.configure(app, conf, options)
