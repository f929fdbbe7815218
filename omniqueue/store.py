"""Job records, leases and replies in Redis. Keys are named here, in records.lua and in heartbeats.py, nowhere else."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import redis

from omniqueue import calls, functions, settings
from omniqueue.calls import digest as digest
from omniqueue.calls import new_id as new_id
from omniqueue.claims import Claim as Claim
from omniqueue.claims import Message as Message
from omniqueue.claims import Owed as Owed
from omniqueue.claims import Submission as Submission
from omniqueue.connection import connect as connect
from omniqueue.connection import reachable
from omniqueue.heartbeats import Heartbeats
from omniqueue.job import Job, JobState
from omniqueue.meters import Meters

#: An engine may say why at any length; a record stays small.
_REASON_CHARS = 4000

P = ParamSpec("P")
T = TypeVar("T")


def _at_once(made: Callable[P, calls.Call[T]]) -> Callable[Concatenate[Store, P], T]:
    """One of the calls of calls.py as a method that makes it."""

    @functools.wraps(made)
    def method(self: Store, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.make(made(*args, **kwargs))

    return cast("Callable[Concatenate[Store, P], T]", method)


class Store(Heartbeats, Meters):
    """All that is kept in Redis, for one namespace. Every method raises BrokerUnavailable when Redis is away."""

    def __init__(self, client: redis.Redis, namespace: str = "oq", *, holds_queues: bool = False) -> None:
        """``holds_queues``: Celery's queues are in this Redis too, so a record and its message can change as one."""
        self.client, self.namespace, self.holds_queues = client, namespace, holds_queues

    @classmethod
    def from_settings(cls, config: settings.Settings, timeout_s: float | None = None) -> Store:
        """A store as the environment says; ``timeout_s`` bounds every command."""
        client = connect(config.redis_url, timeout_s or config.redis_timeout_s)
        return cls(client, config.namespace, holds_queues=not config.broker_url)

    @classmethod
    def listener(cls, other: Store) -> Store:
        """A store for blocking reads, on connections of its own: its time-out exceeds the longest wait."""
        kwargs = {**other.client.connection_pool.connection_kwargs, "socket_timeout": 30.0}
        pool = redis.ConnectionPool(other.client.connection_pool.connection_class, **kwargs)
        return cls(redis.Redis(connection_pool=pool), other.namespace, holds_queues=other.holds_queues)

    @property
    def timeout_s(self) -> float:
        """How long Redis may take to answer."""
        return float(self.client.connection_pool.connection_kwargs["socket_timeout"])

    def make(self, call: calls.Call[T]) -> T:
        """Make one of the calls of calls.py."""
        return call.read(self._call(call.operation, *call.args))

    def _call(self, operation: str, *args: Any) -> list[Any]:
        with reachable():
            try:
                return cast("list[Any]", self.client.fcall(functions.name(), 0, operation, self.namespace, *args))
            except redis.ResponseError as error:
                if not functions.missing(error):
                    raise
            self.client.function_load(functions.library(), replace=True)
            return cast("list[Any]", self.client.fcall(functions.name(), 0, operation, self.namespace, *args))

    def record_key(self, job_id: str) -> str:
        """The hash that a job is kept in."""
        return self._key("job", job_id)

    def reply_key(self, reply_to: str) -> str:
        """The list in which a router process is told of its jobs."""
        return self._key("reply", reply_to)

    def ping(self) -> None:
        """Raise BrokerUnavailable unless Redis answers."""
        with reachable():
            self.client.ping()

    # -- a job's life ------------------------------------------------------------------------------------------------

    submit = _at_once(calls.submit)
    claim = _at_once(calls.claim)
    finish = _at_once(calls.finish)

    def renew(self, held: Iterable[tuple[Claim, tuple[int, int]]], lease_s: float) -> set[tuple[str, int, int]]:
        """Prolong leases and record progress. Returns (job, stage, attempt) of those that must stop."""
        flat: list[Any] = []
        for claim, (done, total) in held:
            flat += [claim.job_id, claim.stage_id, claim.attempt, f"{done}/{total}"]
        stop = set()
        for start in range(0, len(flat), 1024):
            for text in self._call("renew", lease_s, *flat[start : start + 1024]):
                job_id, stage, attempt = text.rsplit(":", 2)
                stop.add((job_id, int(stage), int(attempt)))
        return stop

    def unheard(self, pipeline_name: str, worker: str, held: Iterable[Claim]) -> list[Owed]:
        """After a lost connection: what ``worker`` got with its messages and does not hold. It is owed again."""
        members = [f"{claim.job_id}:{claim.stage_id}" for claim in held]
        return [Owed.parse(text) for text in self._call("unheard", worker, pipeline_name, *members)]

    def enqueue(self, message: Message) -> None:
        """Put a message into its queue."""
        with reachable():
            self.client.lpush(message.list, message.text)

    def fail(
        self, claim: Claim, code: str, reason: str, *, retry: bool, counted: bool = True, param: str | None = None
    ) -> str:
        """End an attempt without a result. Returns queued (owed again), stale, failed, cancelled or expired.

        ``param`` is the request's field at fault, where the engine names one.
        """
        reason = reason[:_REASON_CHARS].encode(errors="replace").decode()
        flags = ["1" if flag else "0" for flag in (retry, counted)]
        return str(
            self._call("fail", claim.job_id, claim.stage_id, claim.attempt, code, reason, *flags, param or "")[0]
        )

    def say(self, claim: Claim, pieces: Iterable[Mapping[str, Any]]) -> None:
        """Add pieces of text that a stage is writing, if the claim still holds, and wake the router that waits."""
        texts = [json.dumps(piece, separators=(",", ":")) for piece in pieces]
        self._call("say", claim.job_id, claim.stage_id, claim.attempt, *texts)

    def said(self, job_id: str, after: str = "-") -> list[tuple[str, dict[str, Any]]]:
        """The pieces said since the one with the id ``after``, each with its id; old ones may be gone."""
        start = after if after == "-" else f"({after}"
        with reachable():
            found = cast("list[tuple[str, dict[str, str]]]", self.client.xrange(self._key("said", job_id), start, "+"))
        return [(name, json.loads(fields["piece"])) for name, fields in found]

    def cancel(self, job_id: str) -> str:
        """Ask for a job's end. Returns gone, cancelling (a worker must confirm) or the state it is now in."""
        return str(self._call("cancel", job_id)[0])

    def delete(self, job_id: str) -> tuple[str, Mapping[str, Any] | None]:
        """Forget a finished job. Returns gone, live or deleted, and the result whose files have to go."""
        answer = self._call("delete", job_id)
        return answer[0], json.loads(answer[1]) if len(answer) > 1 and answer[1] else None

    # -- what the reaper asks ----------------------------------------------------------------------------------------

    def reap(self, pipeline_name: str, limit: int = 200, grace_s: float = 0.0) -> list[Owed]:
        """End all that is past its deadline; stages whose lease lapsed ``grace_s`` ago are owed again, and returned.

        Redis is held up for ``limit`` jobs at a time, and no more than that many leases are looked at in one call.
        """
        late, *owed = self._call("reap", pipeline_name, limit, grace_s)
        while int(late) == limit:
            late, *more = self._call("reap", pipeline_name, limit, grace_s)
            owed += more
        return [Owed.parse(text) for text in owed]

    def lost(self, queue: str, oldest: Iterable[str], grace_s: float = 2.0, limit: int = 200) -> list[Owed]:
        """Stages that wait in vain: their message is not in the queue.

        ``oldest`` are the jobs of the oldest message in each of the queue's lists: what was published before those and
        still waits has lost its message.
        """
        return [Owed.parse(text) for text in self._call("lost", queue, grace_s, limit, *oldest)]

    def outdated(self, limit: int = 200) -> list[str]:
        """Ids of finished jobs whose time to live has passed."""
        return [str(job_id) for job_id in self._call("outdated", limit)]

    def lead(self, what: str, holder: str, ttl_s: float) -> bool:
        """True while ``holder`` is the one process that does ``what``."""
        key = self._key("lead", what)
        with reachable():
            if self.client.set(key, holder, nx=True, px=int(ttl_s * 1000)):
                return True
            if self.client.get(key) == holder:
                self.client.pexpire(key, int(ttl_s * 1000))
                return True
            return False

    # -- reading -----------------------------------------------------------------------------------------------------

    def job(self, job_id: str) -> Job | None:
        """The record, or None."""
        with reachable():
            fields = cast("dict[str, str]", self.client.hgetall(self.record_key(job_id)))
        return Job.from_hash(job_id, fields) if fields.get("state") else None

    def _records(self, ids: Sequence[str]) -> list[Job | None]:
        """Many records in one round trip; None for those that are gone."""
        pipe = self.client.pipeline(transaction=False)
        for job_id in ids:
            pipe.hgetall(self.record_key(job_id))
        hashes = cast("list[dict[str, str]]", pipe.execute())
        return [Job.from_hash(i, h) if h.get("state") else None for i, h in zip(ids, hashes, strict=True)]

    def jobs(self, pipeline_name: str, limit: int, bound: float | None = None, *, ascending: bool = False) -> list[Job]:
        """The newest jobs first, or the oldest; ``bound`` is a creation time to begin at, inclusive to the microsecond.

        Times in the index may differ from those in the record by a rounding, so a page's last job may come again.
        """
        key, edge = self._key("jobs", pipeline_name), "-inf" if ascending else "+inf"
        if bound is not None:
            edge = f"{bound - 2e-6:.7f}" if ascending else f"{bound + 2e-6:.7f}"
        with reachable():
            if ascending:
                ids = cast("list[str]", self.client.zrangebyscore(key, edge, "+inf", start=0, num=limit))
            else:
                ids = cast("list[str]", self.client.zrevrangebyscore(key, edge, "-inf", start=0, num=limit))
            records = self._records(ids)
            if gone := [job_id for job_id, record in zip(ids, records, strict=True) if record is None]:
                self.client.zrem(key, *gone)  # records that went by their backstop
        return [record for record in records if record is not None]

    def running(self, job_ids: Iterable[str]) -> set[str]:
        """Those of ``job_ids`` that are not terminal."""
        ids = list(job_ids)
        with reachable():
            pipe = self.client.pipeline(transaction=False)
            for job_id in ids:
                pipe.hget(self.record_key(job_id), "state")
            states = pipe.execute()
        return {i for i, state in zip(ids, states, strict=True) if state and not JobState(state).terminal}

    def position(self, queue: str, job_id: str) -> int | None:
        """How many jobs will be taken from ``queue`` before this one; None when it does not wait there."""
        with reachable():
            return cast("int | None", self.client.zrank(self._key("order", queue), job_id))

    def priority(self, job_id: str) -> int:
        """The priority a job was accepted with: 0 (most urgent, also for a job that is gone) to 9."""
        with reachable():
            return int(cast("str | None", self.client.hget(self.record_key(job_id), "priority")) or 0)

    def waiting(self, queue: str) -> tuple[int, float]:
        """How many jobs wait in ``queue``, and for how long the oldest has, in seconds."""
        key = self._key("wait", queue)
        with reachable():
            count = self.client.zcard(key)
            oldest = cast("list[tuple[str, float]]", self.client.zrange(key, 0, 0, withscores=True))
            seconds, micros = self.client.time()
        return count, max(0.0, seconds + micros / 1e6 - oldest[0][1]) if oldest else 0.0

    def live(self, pipeline_name: str) -> int:
        """Jobs accepted and not finished."""
        with reachable():
            return self.client.zcard(self._key("live", pipeline_name))

    def counts(self, pipeline_name: str) -> dict[str, int]:
        """Jobs accepted and ended so far, by state."""
        with reachable():
            fields = cast("dict[str, str]", self.client.hgetall(self._key("count", pipeline_name)))
        return {name: int(value) for name, value in fields.items()}

    # -- replies and control: lists, since a subscription loses what is said while it reconnects -----------------------

    def replies(self, reply_to: str, timeout_s: float, most: int = 256) -> list[str]:
        """Ids of jobs that ended, for the process ``reply_to``; waits at most ``timeout_s``."""
        return self._pop(self.reply_key(reply_to), timeout_s, most)

    def controls(self, worker: str, timeout_s: float) -> set[tuple[str, int, int]]:
        """(job, stage, attempt) that ``worker`` must stop; waits at most ``timeout_s``."""
        stop = set()
        for text in self._pop(self._key("control", worker), timeout_s, 256):
            _, job_id, stage, attempt = text.split(":")
            stop.add((job_id, int(stage), int(attempt)))
        return stop

    def _pop(self, key: str, timeout_s: float, most: int) -> list[str]:
        with reachable():
            answer = self.client.blmpop(timeout_s, 1, key, direction="LEFT", count=most)
        return cast("list[str]", cast("Sequence[Any]", answer)[1]) if answer else []

    def oldest_messages(self, lists: Iterable[str]) -> list[str]:
        """The raw broker message that is taken next from each non-empty list."""
        with reachable():
            pipe = self.client.pipeline(transaction=False)
            for name in lists:
                pipe.lindex(name, -1)
            return [text for text in pipe.execute() if text is not None]
