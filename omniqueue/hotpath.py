"""What a stage worker asks of Redis for every message, on its event loop: take and claim, record.

An attempt needs two answers of Redis, and whatever they cost is the price of a hop. A call through redis-py takes 80
microseconds of CPU, and one more for each thread that work is handed to. So the worker's loop, on which the engine runs
anyway, has connections of its own: two that wait for messages, one for all else, on which calls do not wait for each
other's answers. redis-py opens them (address, login, TLS, database); after that commands are packed and answers read by
hiredis, with nothing in between. The same calls in threads, for everything else: store.py.

The claim comes with the message. A function cannot wait, so two commands are sent as one: the first waits until a
message can be moved from the queue into a list of the worker's own, and Redis does the second, which takes it from
there and claims its stage, as soon as the first is done. The worker is woken once, with both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import hiredis
import redis
import redis.asyncio.connection as opening

from omniqueue import functions, heartbeats
from omniqueue.calls import Call, Taken
from omniqueue.connection import reachable
from omniqueue.store import Store

T = TypeVar("T")
#: Called with an answer.
Hear = Callable[[Any], None]

#: What redis-py needs to know to open a connection, of all that a client was configured with.
_ADDRESS = ("host", "port", "path", "db", "username", "password", "socket_connect_timeout")
#: Error replies that are not the fault of the command, by their first word.
_ERRORS = {
    "LOADING": redis.BusyLoadingError,
    "NOPERM": redis.exceptions.NoPermissionError,
    "READONLY": redis.ReadOnlyError,
    "OOM": redis.OutOfMemoryError,
}
_NOTHING = object()


class _Wire(asyncio.Protocol):
    """An open connection: answers come in the order of the questions."""

    def __init__(self, opened: opening.AbstractConnection) -> None:
        self._reader = hiredis.Reader(encoding="utf-8", errors="strict", notEnoughData=_NOTHING)
        #: None for an answer that nobody waits for.
        self._waiting: deque[tuple[asyncio.Future[Any], Hear | None] | None] = deque()
        self._loop = asyncio.get_running_loop()
        # From here on the stream is ours, and nothing that redis-py closes when it collects its connection.
        self._stream, opened._writer = cast(asyncio.StreamWriter, opened._writer), None
        self.transport = cast(asyncio.Transport, self._stream.transport)
        self.transport.set_protocol(self)

    def ask(self, command: tuple[Any, ...], hear: Hear | None, after: tuple[Any, ...] = ()) -> asyncio.Future[Any]:
        """Send a command; its answer, or the error that Redis gave instead. ``hear`` gets the answer on arrival.

        ``after`` is a command that Redis does just before, and whose answer does not matter.
        """
        answer = self._loop.create_future()
        if self.transport.is_closing():
            answer.set_exception(redis.ConnectionError("The connection is closed."))
            return answer
        packed = hiredis.pack_command(command)
        if after:
            packed = hiredis.pack_command(after) + packed
            self._waiting.append(None)
        self._waiting.append((answer, hear))
        self.transport.write(packed)
        return answer

    def data_received(self, data: bytes) -> None:
        """Called by the loop: whatever is complete goes to who waits for it."""
        self._reader.feed(data)
        while (said := self._reader.gets()) is not _NOTHING:
            waiting = self._waiting.popleft()
            if waiting is None:
                continue
            answer, hear = waiting
            refused = isinstance(said, hiredis.ReplyError)
            if hear is not None and not refused:
                hear(said)
            if answer.done():  # nobody waits any more
                continue
            if refused:
                text = str(said)
                answer.set_exception(_ERRORS.get(text.partition(" ")[0], redis.ResponseError)(text))
            else:
                answer.set_result(said)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop: what was asked will not be answered."""
        for waiting in self._waiting:
            if waiting is not None and not waiting[0].done():
                waiting[0].set_exception(redis.ConnectionError(f"The connection was lost: {exc}."))
        self._waiting.clear()


class Link:
    """A connection that is opened when it is needed, again and again if need be."""

    def __init__(self, client: redis.Redis, timeout_s: float) -> None:
        """``timeout_s`` is how long Redis may take to answer. For one loop, on which all methods are called."""
        pool = client.connection_pool
        given = pool.connection_kwargs
        self._options = {name: given[name] for name in given if name in _ADDRESS or name.startswith("ssl_")}
        # redis-py names its classes alike for threads and for loops.
        self._kind = getattr(opening, pool.connection_class.__name__)
        self.timeout_s = timeout_s
        self._opening = asyncio.Lock()
        self._wire: _Wire | None = None
        #: By which Redis calls the connection.
        self.name: int | None = None

    async def ask(
        self, *command: Any, patience_s: float = 0.0, hear: Hear | None = None, after: tuple[Any, ...] = ()
    ) -> Any:
        """The answer to a command that may take ``patience_s`` longer than others. Raises redis-py's errors.

        ``hear`` is called with it the moment it arrives, even when nobody waits any more. ``after`` is a command that
        Redis does just before, and whose answer does not matter.
        """
        wire = self._wire
        if wire is None or wire.transport.is_closing():
            wire = await self._open()
        answer = wire.ask(command, hear, after)
        late = wire._loop.call_later(self.timeout_s + patience_s, wire.transport.abort)
        try:
            return await answer
        finally:
            late.cancel()

    async def _open(self) -> _Wire:
        async with self._opening:
            if self._wire is None or self._wire.transport.is_closing():
                # The time-out is for the login: reads of redis-py's own would wait for ever.
                opened = self._kind(**self._options, protocol=2, socket_timeout=self.timeout_s)
                await opened.connect()
                self._wire = _Wire(opened)
                self.name = await self.ask("CLIENT", "ID")
            return self._wire

    def close(self) -> None:
        """Close the connection; a later question opens it again."""
        if self._wire is not None:
            self._wire.transport.abort()


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
        command = ("FCALL", functions.name(), 0, call.operation, self._namespace, *call.args)
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
