"""Celery's consumer of a stage: takes messages as intake.py does, and comes back soon after its broker does."""

from __future__ import annotations

import functools
from typing import Any

from celery.worker import consumer

from workers import stage_worker
from workers.intake import Intake

#: Pause between two attempts to reach the broker, in seconds.
RETRY_S = 1.0


class Consumer(consumer.Consumer):  # type: ignore[misc]
    """Tries again once a second; Celery's own pauses grow to half a minute, in which a stage would stand still."""

    def start(self) -> None:
        """Consume, until the worker ends; a broker that is not the Redis of the records is left to kombu."""
        host = stage_worker.host()
        if host.store.holds_queues:
            self.app.amqp.Consumer = functools.partial(Intake, worker=self, host=host)
        super().start()

    def ensure_connected(self, conn: Any) -> Any:
        """Connect, trying for ever; a SIGTERM ends it."""
        conn.ensure_connection = functools.partial(
            conn.ensure_connection, interval_start=RETRY_S, interval_step=0, interval_max=RETRY_S
        )
        return super().ensure_connected(conn)
