"""Celery's consumer, which comes back soon after its broker does."""

from __future__ import annotations

import functools
from typing import Any

from celery.worker import consumer

#: Pause between two attempts to reach the broker, in seconds.
RETRY_S = 1.0


class Consumer(consumer.Consumer):  # type: ignore[misc]
    """Tries again once a second; Celery's own pauses grow to half a minute, in which a stage would stand still."""

    def ensure_connected(self, conn: Any) -> Any:
        """Connect, trying for ever; a SIGTERM ends it."""
        conn.ensure_connection = functools.partial(
            conn.ensure_connection, interval_start=RETRY_S, interval_step=0, interval_max=RETRY_S
        )
        return super().ensure_connected(conn)
