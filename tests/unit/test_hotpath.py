"""The worker's own connections: answers in order, deadlines, and a Redis that restarts or says no."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from omniqueue import calls, embedded, errors, store
from omniqueue.hotpath import HotPath, Link
from tests.unit import support


@pytest.fixture
def own() -> Iterator[embedded.EmbeddedValkey]:
    """A server that the test may stop."""
    with tempfile.TemporaryDirectory(prefix="oq-") as folder:
        server = embedded.EmbeddedValkey(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.stop()


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


@asynccontextmanager
async def linked(client: redis.Redis, timeout_s: float = 5.0) -> AsyncIterator[Link]:
    link = Link(client, timeout_s)
    try:
        yield link
    finally:
        link.close()
        await asyncio.sleep(0)


@asynccontextmanager
async def hot_path(records: store.Store) -> AsyncIterator[HotPath]:
    made = HotPath(records)
    try:
        yield made
    finally:
        made.close()
        await asyncio.sleep(0)


def test_many_questions_at_once_get_their_own_answers(records: store.Store) -> None:
    async def work() -> None:
        async with linked(records.client) as link:
            asked = [link.ask("ECHO", f"{number} ü {'x' * number}") for number in range(0, 20_000, 97)]
            answers = await asyncio.gather(*asked)
            assert answers == [f"{number} ü {'x' * number}" for number in range(0, 20_000, 97)]

    run(work)


def test_an_answer_that_nobody_waits_for_any_more_disturbs_no_other(records: store.Store) -> None:
    async def work() -> None:
        async with linked(records.client) as link:
            await link.ask("PING")
            given_up = asyncio.ensure_future(link.ask("ECHO", "first"))
            kept = asyncio.ensure_future(link.ask("ECHO", "second"))
            await asyncio.sleep(0)
            given_up.cancel()
            assert await kept == "second"

    run(work)


def test_what_redis_refuses_is_raised_and_the_connection_serves_on(records: store.Store) -> None:
    async def work() -> None:
        async with linked(records.client) as link:
            with pytest.raises(redis.ResponseError, match="wrong number of arguments"):
                await link.ask("GET")
            with pytest.raises(redis.exceptions.NoScriptError):
                await link.ask("EVALSHA", "0" * 40, 0)
            assert await link.ask("PING") == "PONG"

    run(work)


def test_a_redis_that_hangs_is_unavailable_after_the_time_out_and_reached_again_later(
    own: embedded.EmbeddedValkey,
) -> None:
    assert own.process is not None
    process = own.process

    async def work() -> None:
        async with linked(store.connect(own.url, 0.3), 0.3) as link:
            assert await link.ask("PING") == "PONG"
            process.send_signal(signal.SIGSTOP)
            try:
                with pytest.raises(redis.ConnectionError):
                    await link.ask("PING")
                with pytest.raises((redis.ConnectionError, redis.TimeoutError)):  # nor is there a new connection
                    await link.ask("PING")
            finally:
                process.send_signal(signal.SIGCONT)
            assert await link.ask("PING") == "PONG"

    run(work)


def test_a_restarted_redis_is_reached_again_and_gets_the_script_again(own: embedded.EmbeddedValkey) -> None:
    records = store.Store(store.connect(own.url, 5.0))
    pipe = support.pipeline(1)

    async def work() -> None:
        async with hot_path(records) as hot:
            assert await hot.make(calls.claim(pipe, "a" * 32, 0, "w")) == "gone"
            own.stop()
            with pytest.raises(errors.BrokerUnavailable):
                await hot.make(calls.claim(pipe, "a" * 32, 0, "w"))
            own.start()
            job_id = support.submit(records, pipe)
            records.client.script_flush()
            claim = await hot.make(calls.claim(pipe, job_id, 0, "w", alone=True))
            assert isinstance(claim, store.Claim)
            assert await hot.make(calls.finish(claim, None, {}, {"kind": "text", "data": []})) == "succeeded"

    run(work)


def test_messages_are_taken_from_the_most_urgent_list_first_oldest_first_and_at_most_so_many(
    records: store.Store,
) -> None:
    urgent, later = f"{records.namespace}:urgent", f"{records.namespace}:later"
    records.client.lpush(later, "c", "d")
    records.client.lpush(urgent, *"abcde")

    async def work() -> None:
        async with hot_path(records) as hot:
            taken: list[str] = []
            for expected in ("abc", "abcde", "abcdecd", "abcdecd"):
                await hot.take([urgent, later], 3, 0.05, taken.append)
                assert "".join(taken) == expected

    run(work)


def test_a_message_that_comes_when_its_taker_has_gone_is_begun_all_the_same(records: store.Store) -> None:
    name = f"{records.namespace}:queue"

    async def work() -> None:
        async with hot_path(records) as hot:
            taken: list[str] = []
            waiting = asyncio.ensure_future(hot.take([name], 1, 50.0, taken.append))
            while not records.client.info("clients")["blocked_clients"]:  # type: ignore[index]
                await asyncio.sleep(0.01)
            waiting.cancel()
            records.client.lpush(name, "late")
            while not taken:
                await asyncio.sleep(0.01)
            assert taken == ["late"]

    run(work)


def test_a_wait_for_messages_ends_at_once_when_no_more_are_wanted(records: store.Store) -> None:
    async def work() -> None:
        async with hot_path(records) as hot:
            await hot.take_no_more()  # nobody has asked yet
            none, taken = [f"{records.namespace}:none"], list[str]()
            await hot.take(none, 1, 0.01, taken.append)
            waiting = asyncio.ensure_future(hot.take(none, 1, 50.0, taken.append))
            while not records.client.info("clients")["blocked_clients"]:  # type: ignore[index]
                await asyncio.sleep(0.01)
            await hot.take_no_more()
            await waiting
            assert taken == []

    start = time.monotonic()
    run(work)
    assert time.monotonic() - start < 50.0
