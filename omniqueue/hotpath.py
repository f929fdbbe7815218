"""What a stage worker asks of Redis for every message, on its event loop: take and claim, record.

An attempt needs two answers of Redis, and whatever they cost is the price of a hop. A call through redis-py takes 80
microseconds of CPU, and one more for each thread that work is handed to. So the worker's loop, on which the engine runs
anyway, has connections of its own (link.py): two that wait for messages, one for all else. The same calls in threads,
for everything else: store.py.

The claim comes with the message. A function cannot wait, so two commands are sent as one: the first waits until a
message can be moved from the queue into a list of the worker's own, and Redis does the second, which takes it from
there and claims its stage, as soon as the first is done. The worker is woken once, with both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis

from omniqueue import functions, heartbeats
from omniqueue.calls import Call, Taken
from omniqueue.connection import reachable
from omniqueue.link import Link
from omniqueue.store import Store

T = TypeVar("T")


class HotPath:
    """A store's calls on one event loop. Every method raises BrokerUnavailable when Redis is away."""

    def __init__(self, records: Store, worker: str, timeout_s: float = 5.0) -> None:
        self._namespace, self.timeout_s = records.namespace, timeout_s
        self._hand = heartbeats.hand(records.namespace, worker)
        self._links = [Link(records.client, timeout_s) for _ in range(3)]
        self._calls, self._taking, self._listening = self._links

    async def make(self, call: Call[T]) -> T:
        """Make one of the calls of calls.py."""
        with reachable():
            return call.read(await self._ask(self._calls, call))

    async def _ask(self, link: Link, call: Call[Any], **options: Any) -> Any:
        command = functions.command(self._namespace, call.operation, *call.args)
        try:
            return await link.ask(*command, **options)
        except redis.ResponseError as error:
            if not functions.missing(error):
                raise
        await link.ask("FUNCTION", "LOAD", "REPLACE", functions.library())
        return await link.ask(*command, hear=options.get("hear"))

    async def take(
        self, call: Call[list[Taken]], begin: Callable[[list[Taken]], None], queue: str | None, wait_s: float
    ) -> list[Taken]:
        """Make a call that takes messages; if a list ``queue`` is given, wait for one there first, for ``wait_s``.

        ``begin`` is called with the answer on arrival: a message that has been taken is never dropped on the way.
        """
        taken: list[Taken] = []

        def hear(answer: Any) -> None:
            taken.extend(call.read(answer))
            begin(taken)

        after = ("BLMOVE", queue, self._hand, "RIGHT", "LEFT", wait_s) if queue else ()
        with reachable():
            await self._ask(self._taking, call, patience_s=wait_s, hear=hear, after=after)
        return taken

    async def listen(self, lists: Sequence[str], wait_s: float, begin: Callable[[str], None]) -> None:
        """Wait for a message, for ``wait_s``: one from the first of ``lists`` that has any, with no claim.

        ``begin`` is called with it on arrival: a message that has been taken is never dropped on the way.
        """

        def hear(answer: Any) -> None:
            for text in answer[1] if answer else ():
                begin(text)

        with reachable():
            command = ("BLMPOP", wait_s, len(lists), *lists, "RIGHT")
            await self._listening.ask(*command, patience_s=wait_s, hear=hear)

    async def take_no_more(self) -> None:
        """End a :meth:`take` and a :meth:`listen` that wait; what they have been given already they return."""
        await self.look_again()
        await self.listen_no_more()

    async def look_again(self) -> None:
        """End a :meth:`take` that waits."""
        await self._unblock(self._taking)

    async def listen_no_more(self) -> None:
        """End a :meth:`listen` that waits."""
        await self._unblock(self._listening)

    async def _unblock(self, link: Link) -> None:
        # A user of Redis without the right to: the wait then ends by itself.
        if link.name is not None:
            with reachable(), contextlib.suppress(redis.exceptions.NoPermissionError):
                await self._calls.ask("CLIENT", "UNBLOCK", link.name)

    def close(self) -> None:
        """Close all connections."""
        for link in self._links:
            link.close()
