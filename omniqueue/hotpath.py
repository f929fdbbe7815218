"""What a stage worker asks of Redis for every message, on its event loop: take, claim, record.

An attempt needs three answers of Redis, and whatever they cost is the price of a hop. A call through redis-py takes 80
microseconds of CPU, and one more for each thread that work is handed to. So the worker's loop, on which the engine runs
anyway, has two connections of its own: one that waits for messages, one for all else, on which calls do not wait for
each other's answers. redis-py opens them (address, login, TLS, database); after that commands are packed and answers
read by hiredis, with nothing in between. The same calls in threads, for everything else: store.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import hiredis
import redis
import redis.asyncio.connection as opening

from omniqueue.calls import Call
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
    "READONLY": redis.ReadOnlyError,
    "OOM": redis.OutOfMemoryError,
    "NOSCRIPT": redis.exceptions.NoScriptError,
}
_NOTHING = object()


class _Wire(asyncio.Protocol):
    """An open connection: answers come in the order of the questions."""

    def __init__(self, opened: opening.AbstractConnection) -> None:
        self._reader = hiredis.Reader(encoding="utf-8", errors="strict", notEnoughData=_NOTHING)
        self._waiting: deque[tuple[asyncio.Future[Any], Hear | None]] = deque()
        self._loop = asyncio.get_running_loop()
        # From here on the stream is ours, and nothing that redis-py closes when it collects its connection.
        self._stream, opened._writer = cast(asyncio.StreamWriter, opened._writer), None
        self.transport = cast(asyncio.Transport, self._stream.transport)
        self.transport.set_protocol(self)

    def ask(self, command: tuple[Any, ...], hear: Hear | None) -> asyncio.Future[Any]:
        """Send a command; its answer, or the error that Redis gave instead. ``hear`` gets the answer on arrival."""
        answer = self._loop.create_future()
        if self.transport.is_closing():
            answer.set_exception(redis.ConnectionError("The connection is closed."))
            return answer
        self._waiting.append((answer, hear))
        self.transport.write(hiredis.pack_command(command))
        return answer

    def data_received(self, data: bytes) -> None:
        """Called by the loop: whatever is complete goes to who waits for it."""
        self._reader.feed(data)
        while (said := self._reader.gets()) is not _NOTHING:
            answer, hear = self._waiting.popleft()
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
        for answer, _ in self._waiting:
            if not answer.done():
                answer.set_exception(redis.ConnectionError(f"The connection was lost: {exc}."))
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

    async def ask(self, *command: Any, patience_s: float = 0.0, hear: Hear | None = None) -> Any:
        """The answer to a command that may take ``patience_s`` longer than others. Raises redis-py's errors.

        ``hear`` is called with it the moment it arrives, even when nobody waits any more.
        """
        wire = self._wire
        if wire is None or wire.transport.is_closing():
            wire = await self._open()
        answer = wire.ask(command, hear)
        late = wire._loop.call_later(self.timeout_s + patience_s, wire.transport.abort)
        try:
            return await answer
        finally:
            late.cancel()

    async def _open(self) -> _Wire:
        async with self._opening:
            if self._wire is None or self._wire.transport.is_closing():
                opened = self._kind(**self._options, protocol=2)
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

    def __init__(self, records: Store, timeout_s: float = 5.0) -> None:
        self._namespace, self._script, self.timeout_s = records.namespace, records.script, timeout_s
        self._calls, self._messages = Link(records.client, timeout_s), Link(records.client, timeout_s)

    async def make(self, call: Call[T]) -> T:
        """Make one of the calls of calls.py."""
        command = (0, call.operation, self._namespace, *call.args)
        with reachable():
            try:
                answer = await self._calls.ask("EVALSHA", self._script.sha, *command)
            except redis.exceptions.NoScriptError:  # Redis was restarted
                answer = await self._calls.ask("EVAL", self._script.script, *command)
        return call.read(answer)

    async def take_no_more(self) -> None:
        """End a :meth:`take` that waits; what it has been given already it returns."""
        if self._messages.name is not None:
            with reachable():
                await self._calls.ask("CLIENT", "UNBLOCK", self._messages.name)

    async def take(self, lists: Sequence[str], most: int, wait_s: float, begin: Callable[[str], None]) -> None:
        """Wait for messages, for ``wait_s``: at most ``most`` from the first of ``lists`` that has any.

        ``begin`` is called with each on arrival: a message that has been taken is never dropped on the way.
        """

        def hear(answer: Any) -> None:
            for text in answer[1] if answer else ():
                begin(text)

        with reachable():
            command = ("BLMPOP", wait_s, len(lists), *lists, "RIGHT", "COUNT", most)
            await self._messages.ask(*command, patience_s=wait_s, hear=hear)

    def close(self) -> None:
        """Close both connections."""
        self._calls.close()
        self._messages.close()
