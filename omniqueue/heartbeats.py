"""Who is alive: workers announce themselves, routers the topology they serve; both vanish with whoever said so."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, cast

import redis

from omniqueue import pipeline
from omniqueue.connection import reachable

#: An announcement in Redis outlives this many seconds of silence.
HEARTBEAT_TTL_S = 5.0


def hand(namespace: str, worker: str) -> str:
    """The list through which a message goes into a worker's hands."""
    return ":".join((namespace, "hand", worker))


class Heartbeats:
    """The part of the store that knows processes; it raises what the store raises."""

    client: redis.Redis
    namespace: str

    def _key(self, *parts: str) -> str:
        return ":".join((self.namespace, *parts))

    def beat(self, worker: str, facts: Mapping[str, Any]) -> None:
        """Announce a worker; it counts as alive for HEARTBEAT_TTL_S."""
        with reachable():
            pipe = self.client.pipeline(transaction=False)
            pipe.set(self._key("worker", worker), json.dumps(facts), px=int(HEARTBEAT_TTL_S * 1000))
            pipe.zadd(self._key("workers"), {worker: time.time()})
            pipe.execute()

    def retire(self, worker: str) -> None:
        """Take a worker's announcement back."""
        with reachable():
            pipe = self.client.pipeline(transaction=False)
            pipe.delete(self._key("worker", worker), self._key("control", worker), hand(self.namespace, worker))
            pipe.zrem(self._key("workers"), worker)
            pipe.execute()

    def workers(self) -> list[dict[str, Any]]:
        """The announcements of all live workers; those of dead ones are dropped on the way."""
        with reachable():
            ids = cast("list[str]", self.client.zrange(self._key("workers"), 0, -1))
            if not ids:
                return []
            texts = cast("list[str | None]", self.client.mget([self._key("worker", worker) for worker in ids]))
            dead = [worker for worker, text in zip(ids, texts, strict=True) if text is None]
            if dead:
                self.client.zrem(self._key("workers"), *dead)
                # What one had no time to take from its hand waits in the record, and is enqueued again.
                self.client.delete(*[hand(self.namespace, worker) for worker in dead])
        return [json.loads(text) for text in texts if text]

    def declare(self, pipe: pipeline.Pipeline) -> None:
        """Say which topology a live router serves, for workers to compare; holds as long as a heartbeat."""
        with reachable():
            self.client.set(self._key("pipeline", pipe.name), pipe.fingerprint, px=int(HEARTBEAT_TTL_S * 1000))

    def declared(self, pipe: pipeline.Pipeline) -> str | None:
        """The fingerprint that a live router has declared for this pipeline; None without a router."""
        with reachable():
            return cast("str | None", self.client.get(self._key("pipeline", pipe.name)))
