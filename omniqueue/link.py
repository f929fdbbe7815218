"""A connection to Redis on an event loop: commands go out without waiting for each other's answers.

A call through redis-py takes 80 microseconds of CPU and more, and one more wait for each. redis-py opens the connection
(address, login, TLS, database); after that commands are packed and answers read by hiredis, with nothing in between.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis
import redis
import redis.asyncio.connection as opening

#: Called with an answer.
Hear = Callable[[Any], None]
#: A command, and who is called with its answer or with the error that came instead.
Question = tuple[tuple[Any, ...], Hear]

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
        #: None for an answer that nobody waits for; one without a future hears errors as well.
        self._waiting: deque[tuple[asyncio.Future[Any] | None, Hear | None] | None] = deque()
        self._loop = asyncio.get_running_loop()
        self._late = False
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

    async def answer(
        self, command: tuple[Any, ...], timeout_s: float, hear: Hear | None = None, after: tuple[Any, ...] = ()
    ) -> Any:
        """As :meth:`ask`, and wait. Raises redis-py's errors; after ``timeout_s`` the connection is closed."""
        answer = self.ask(command, hear, after)
        late = self._loop.call_later(timeout_s, self.give_up)
        try:
            return await answer
        finally:
            late.cancel()

    def ask_all(self, questions: Sequence[Question], timeout_s: float) -> None:
        """Send many commands at once."""
        packed = b"".join([hiredis.pack_command(command) for command, _ in questions])
        if self.transport.is_closing():
            for _, hear in questions:
                hear(redis.ConnectionError("The connection is closed."))
            return
        late = self._loop.call_later(timeout_s, self.give_up)
        *others, (_, last) = questions

        def hear_last(said: Any) -> None:
            late.cancel()
            last(said)

        self._waiting.extend((None, hear) for _, hear in others)
        self._waiting.append((None, hear_last))
        self.transport.write(packed)

    def data_received(self, data: bytes) -> None:
        """Called by the loop: whatever is complete goes to who waits for it."""
        self._reader.feed(data)
        while (said := self._reader.gets()) is not _NOTHING:
            waiting = self._waiting.popleft()
            if waiting is not None:
                self._answer(*waiting, _error(str(said)) if isinstance(said, hiredis.ReplyError) else said)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop: what was asked will not be answered."""
        kind = redis.TimeoutError if self._late else redis.ConnectionError
        lost, self._waiting = self._waiting, deque()
        for waiting in lost:
            if waiting is not None:
                self._answer(*waiting, kind(f"The connection was lost: {exc}."))

    @staticmethod
    def _answer(answer: asyncio.Future[Any] | None, hear: Hear | None, said: Any) -> None:
        refused = isinstance(said, redis.RedisError)
        if hear is not None and (answer is None or not refused):
            hear(said)
        if answer is None or answer.done():  # nobody waits, or not any more
            return
        if refused:
            answer.set_exception(said)
        else:
            answer.set_result(said)

    def give_up(self) -> None:
        """Redis took too long: close the connection."""
        self._late = True
        self.transport.abort()


def _error(text: str) -> redis.RedisError:
    kind: type[redis.RedisError] = _ERRORS.get(text.partition(" ")[0], redis.ResponseError)
    return kind(text)


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
        #: By which Redis calls the connection, if it tells.
        self.name: int | None = None

    async def ask(
        self, *command: Any, patience_s: float = 0.0, hear: Hear | None = None, after: tuple[Any, ...] = ()
    ) -> Any:
        """The answer to a command that may take ``patience_s`` longer than others. Raises redis-py's errors.

        ``hear`` is called with it the moment it arrives, even when nobody waits any more. ``after`` is a command that
        Redis does just before, and whose answer does not matter.
        """
        wire = await self._opened()
        return await wire.answer(command, self.timeout_s + patience_s, hear, after)

    async def ask_all(self, questions: Sequence[Question]) -> None:
        """Send many commands at once; returns when they are sent. Whatever goes wrong is told to those who listen."""
        try:
            (await self._opened()).ask_all(questions, self.timeout_s)
        except Exception as exc:  # noqa: BLE001 - they would wait for ever
            for _, hear in questions:
                hear(exc)

    async def answers(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answers to many commands sent at once. Raises redis-py's errors, the first one."""
        heard: list[Any] = []
        done = asyncio.get_running_loop().create_future()

        def hear(said: Any) -> None:
            heard.append(said)
            if len(heard) == len(commands) and not done.done():
                done.set_result(None)

        if commands:
            await self.ask_all([(command, hear) for command in commands])
            await done
        for said in heard:
            if isinstance(said, Exception):
                raise said
        return heard

    async def _opened(self) -> _Wire:
        if self._wire is not None and not self._wire.transport.is_closing():
            return self._wire
        async with self._opening:
            if self._wire is None or self._wire.transport.is_closing():
                # The time-out is for the login: reads of redis-py's own would wait for ever.
                opened = self._kind(**self._options, protocol=2, socket_timeout=self.timeout_s)
                await opened.connect()
                wire, self.name = _Wire(opened), None
                with contextlib.suppress(redis.exceptions.NoPermissionError):
                    self.name = await wire.answer(("CLIENT", "ID"), self.timeout_s)
                self._wire = wire
            return self._wire

    def close(self) -> None:
        """Close the connection; a later question opens it again."""
        if self._wire is not None:
            self._wire.transport.abort()
