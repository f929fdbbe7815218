"""What was counted and timed: for /metrics, omniqueue status and traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import redis

from omniqueue import pipeline
from omniqueue.connection import reachable
from omniqueue.overview import Overview


class Meters:
    """The part of the store that tells numbers; it raises what the store raises."""

    client: redis.Redis
    _key: Any
    _call: Any

    def overview(self, pipe: pipeline.Pipeline) -> Overview:
        """How a pipeline does, all at one moment: queues, what runs, and what was counted."""
        return Overview.parse(pipe, self._call("overview", pipe.name, *[stage.queue for stage in pipe.stages]))

    def traffic(self, amounts: Mapping[str, float] | None = None) -> dict[str, float]:
        """The requests that routers have answered, after adding ``amounts``: numbers under names of the caller's."""
        flat = self._call("traffic", *[part for pair in (amounts or {}).items() for part in pair])
        return {name: float(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}

    def trace(self, job_id: str, stage_id: int) -> tuple[str, float] | None:
        """The span of a job's request, and how long the stage that now runs had waited; None for an untraced job."""
        with reachable():
            key, names = self._key("job", job_id), ("trace", f"{stage_id}:queued", f"{stage_id}:started")
            trace, queued, started = cast("list[str | None]", self.client.hmget(key, names))
        return (trace, max(0.0, float(started or 0) - float(queued or 0))) if trace else None
