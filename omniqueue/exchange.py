"""What a router asks of Redis for every request: jobs go out, and what became of them comes back.

Request threads that each asked for themselves would wait twice, and wake each other for the interpreter's lock. Here a
thread leaves its call and waits for its job; one loop sends what all of them have left in one go, hears which jobs have
ended and reads their records. The same calls in threads, for everything else: store.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import redis

from omniqueue import errors, functions, job
from omniqueue.calls import Call
from omniqueue.connection import reachable
from omniqueue.link import Hear, Link
from omniqueue.store import Store


class Exchange:
    """The calls of one router process. It is made on the loop that its coroutines are for."""

    def __init__(self, records: Store, reply_to: str) -> None:
        """``reply_to`` names the process in the records of its jobs."""
        self.timeout_s = records.timeout_s
        self._store, self._replies = records, records.reply_key(reply_to)
        self._calls, self._listening = (Link(records.client, self.timeout_s) for _ in range(2))
        self._loop = asyncio.get_running_loop()
        #: What is to be asked, who hears the answer, and since when it waits (monotonic, in seconds).
        self._left: deque[tuple[Call[Any], Hear, float]] = deque()
        #: The loop knows that something was left.
        self._told = False
        self._some = asyncio.Event()
        self._sending = self._loop.create_task(self._send_for_ever())

    def send(self, call: Call[Any], hear: Hear) -> None:
        """Make a call soon; from any thread. ``hear`` is called on the loop, with the answer or an exception.

        Raises RuntimeError when the loop is closed.
        """
        self._left.append((call, hear, time.monotonic()))
        if not self._told:
            self._told = True
            self._loop.call_soon_threadsafe(self._some.set)

    async def _send_for_ever(self) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            self._told = False  # before anything is taken: of what is left from here on, the loop is told again
            questions = []
            while self._left:
                call, hear, since = self._left.popleft()
                if time.monotonic() - since > self.timeout_s:  # nobody waits for it any more
                    hear(errors.BrokerUnavailable())
                else:
                    command = functions.command(self._store.namespace, call.operation, *call.args)
                    questions.append((command, functools.partial(_in_time, hear)))
            if questions:
                await self._calls.ask_all(questions)

    async def replies(self, wait_s: float, most: int = 256) -> list[str]:
        """Ids of jobs that ended; waits at most ``wait_s``. Raises BrokerUnavailable."""
        command = ("BLMPOP", wait_s, 1, self._replies, "LEFT", "COUNT", most)
        with reachable():
            answer = await self._listening.ask(*command, patience_s=wait_s)
        return answer[1] if answer else []

    async def records(self, job_ids: Sequence[str]) -> list[dict[str, str]]:
        """The job's own fields of each record, for ``Job.from_hash``; none of one that is gone.

        Raises BrokerUnavailable.
        """
        with reachable():
            found = await self._calls.answers([("HMGET", self._store.record_key(one), *job.FIELDS) for one in job_ids])
        return [
            {name: text for name, text in zip(job.FIELDS, texts, strict=True) if text is not None} for texts in found
        ]

    async def close(self) -> None:
        """Close the connections."""
        self._sending.cancel()
        self._calls.close()
        self._listening.close()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sending


def _in_time(hear: Hear, answer: Any) -> None:
    """What took too long is not asked again: that would take as long."""
    hear(errors.BrokerUnavailable() if isinstance(answer, redis.TimeoutError) else answer)
