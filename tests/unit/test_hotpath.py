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

from omniqueue import calls, embedded, errors, functions, messages, store
from omniqueue.hotpath import HotPath
from omniqueue.link import Link
from omniqueue.pipeline import Pipeline
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


@pytest.fixture
def pipe() -> Pipeline:
    return support.pipeline(2)


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
    made = HotPath(records, "w")
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
            with pytest.raises(redis.ResponseError, match="Function not found"):
                await link.ask("FCALL", "none", 0)
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
                with pytest.raises(redis.TimeoutError):
                    await link.ask("PING")
                with pytest.raises((redis.ConnectionError, redis.TimeoutError)):  # nor is there a new connection
                    await link.ask("PING")
            finally:
                process.send_signal(signal.SIGCONT)
            assert await link.ask("PING") == "PONG"

    run(work)


def test_a_login_that_is_never_answered_ends_with_the_time_out() -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def work() -> None:
        server = await asyncio.start_server(mute, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, linked(store.connect(f"redis://127.0.0.1:{port}/1", 0.1), 0.1) as link:
            with pytest.raises(redis.TimeoutError):
                await link.ask("PING")

    run(work)


def test_a_server_that_leaves_at_the_login_is_asked_again_and_again() -> None:
    came = []

    async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(await reader.read(10_000))
        writer.write(b"+OK\r\n" * 8)
        await writer.drain()
        writer.transport.abort()

    async def work() -> None:
        server = await asyncio.start_server(rude, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, linked(store.connect(f"redis://127.0.0.1:{port}/1", 5.0), 5.0) as link:
            for number in range(1, 6):
                with pytest.raises((redis.ConnectionError, redis.TimeoutError, OSError)):
                    await link.ask("PING")
                assert len(came) >= number

    run(work)


def test_a_function_that_is_missing_again_once_it_is_loaded_is_a_redis_that_is_away(
    records: store.Store, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "name", lambda: "not_what_is_loaded")
    monkeypatch.setattr(
        functions, "library", lambda: "#!lua name=other\nredis.register_function('other', function() end)"
    )
    call = calls.claim(pipe, "a" * 32, 0, "w")

    async def work() -> None:
        async with hot_path(records) as hot:
            with pytest.raises(errors.BrokerUnavailable, match="functions"):
                await hot.make(call)

    run(work)
    with pytest.raises(errors.BrokerUnavailable, match="functions"):
        records.cancel("a" * 32)


@pytest.mark.parametrize("less", ["-@dangerous", "-client"])
def test_a_user_who_may_not_end_a_wait_waits_it_out(own: embedded.EmbeddedValkey, less: str) -> None:
    admin = store.connect(own.url, 5.0)
    rights = ("on", ">word", "~*", "&*", "+@all", less)
    admin.execute_command("ACL", "SETUSER", "worker", *rights)  # type: ignore[no-untyped-call]
    records = store.Store(store.connect(f"{own.url}&username=worker&password=word", 5.0))

    async def work() -> None:
        async with hot_path(records) as hot:
            waiting = asyncio.ensure_future(hot.listen(["later"], 0.5, print))
            await blocked(store.Store(admin))
            await hot.take_no_more()
            await waiting

    run(work)


def test_a_restarted_redis_is_reached_again_and_gets_the_function_again(own: embedded.EmbeddedValkey) -> None:
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


def lists_of(pipe: Pipeline, records: store.Store) -> list[str]:
    return [f"{records.namespace}:{name}" for name in ("urgent", "later")]


def put(pipe: Pipeline, records: store.Store, name: str, stage_id: int = 0, message_of: str | None = None) -> str:
    """Submit a job and put its first stage's message into a list, or the message of another job."""
    job_id = support.submit(records, pipe)
    text = messages.message(pipe, message_of or job_id, stage_id, 0).text
    records.client.lpush(name, text)
    return job_id


def test_messages_come_with_their_claims_most_urgent_first_oldest_first_and_at_most_so_many(
    records: store.Store, pipe: Pipeline
) -> None:
    urgent, later = lists_of(pipe, records)
    jobs = [put(pipe, records, later), put(pipe, records, urgent), put(pipe, records, urgent)]
    expected = [jobs[1], jobs[2], jobs[0]]

    async def work() -> None:
        async with hot_path(records) as hot:
            begun: list[list[calls.Taken]] = []
            call = calls.take(pipe, 0, "w", 2, [urgent, later])
            for count in (2, 1, 0):
                assert len(await hot.take(call, begun.append, None, 0.0)) == count
            taken = [three for some in begun for three in some]
            assert [job_id for _, job_id, _ in taken] == expected
            for text, job_id, claim in taken:
                assert isinstance(claim, store.Claim)
                assert (claim.job_id, claim.attempt) == (job_id, 1)
                assert messages.task_id(job_id, 0) in text
                assert await hot.make(calls.finish(claim, None, {}, None, None)) == "next"

    run(work)


def test_a_wait_ends_with_a_message_and_its_claim_and_leaves_nothing_in_the_hand(
    records: store.Store, pipe: Pipeline
) -> None:
    urgent, later = lists_of(pipe, records)

    async def work() -> None:
        async with hot_path(records) as hot:
            begun: list[list[calls.Taken]] = []
            call = calls.take(pipe, 0, "w", 2, [urgent, later])
            assert await hot.take(call, begun.append, urgent, 0.05) == []
            waiting = asyncio.ensure_future(hot.take(call, begun.append, urgent, 50.0))
            await blocked(records)
            job_id = put(pipe, records, urgent)
            [(_, taken, claim)] = await waiting
            assert (taken, isinstance(claim, store.Claim)) == (job_id, True)
            assert not records.client.exists(f"{records.namespace}:hand:w")
            records.client.lpush(
                f"{records.namespace}:hand:w", messages.message(pipe, put(pipe, records, "x"), 0, 0).text
            )
            assert len(await hot.take(call, begun.append, None, 0.0)) == 1  # left there by a Redis that was killed

    run(work)


@pytest.mark.parametrize(
    "text",
    ["", "no JSON", '{"headers": {}}', "another task", "another stage", "an eta", "expires"],
)
def test_a_message_that_is_not_the_stages_comes_without_a_job(records: store.Store, pipe: Pipeline, text: str) -> None:
    urgent, _ = lists_of(pipe, records)
    job_id = support.submit(records, pipe)
    mine = messages.message(pipe, job_id, 0, 0).text
    texts = {
        "another task": mine.replace("omniqueue.run_stage", "theirs.run_stage"),
        "another stage": messages.message(pipe, job_id, 1, 0).text,
        "an eta": mine.replace('"eta": null', '"eta": "2030-01-01T00:00:00"'),
        "expires": mine.replace('"expires": null', '"expires": "2030-01-01T00:00:00"'),
    }
    records.client.lpush(urgent, texts.get(text, text), mine)

    async def work() -> None:
        async with hot_path(records) as hot:
            begun: list[list[calls.Taken]] = []
            call = calls.take(pipe, 0, "w", 2, [urgent])
            first, second = await hot.take(call, begun.append, None, 0.0)
            assert first == (texts.get(text, text), "", "")
            assert second[1] == job_id

    run(work)


def test_why_a_stage_cannot_be_claimed_comes_with_its_message(records: store.Store, pipe: Pipeline) -> None:
    urgent, _ = lists_of(pipe, records)
    over, running, nobodys = (put(pipe, records, urgent) for _ in range(3))
    mine = put(pipe, records, urgent)
    records.client.lpush(urgent, messages.message(pipe, mine, 0, 0).text)  # a doubled message
    records.cancel(over)
    assert isinstance(records.claim(pipe, running, 0, "another"), store.Claim)
    records.client.delete(f"{records.namespace}:job:{nobodys}")

    async def work() -> None:
        async with hot_path(records) as hot:
            begun: list[list[calls.Taken]] = []
            taken = await hot.take(calls.take(pipe, 0, "w", 8, [urgent]), begun.append, None, 0.0)
            assert [claim for _, _, claim in taken[:3]] == ["over", "busy", "gone"]
            assert isinstance(taken[3][2], store.Claim)
            assert taken[4][1:] == (mine, "busy")

    run(work)


def test_what_a_worker_never_heard_of_is_owed_again_and_what_it_holds_is_not(
    records: store.Store, pipe: Pipeline
) -> None:
    urgent, _ = lists_of(pipe, records)
    held, unheard = put(pipe, records, urgent), put(pipe, records, urgent)
    asked = support.submit(records, pipe)
    call = calls.take(pipe, 0, "w", 8, [urgent])
    [(_, _, claim), _] = call.read(records._call(call.operation, *call.args))
    assert isinstance(claim, store.Claim)
    other = records.claim(pipe, asked, 0, "w")  # by a call of its own, whose answer is asked for again
    assert isinstance(other, store.Claim)
    assert records.unheard(pipe.name, "another", []) == []
    assert records.unheard(pipe.name, "w", [claim]) == [store.Owed(unheard, 0)]
    job = records.job(unheard)
    assert job is not None
    assert (job.stages[0].state, job.stages[0].failures) == ("queued", 0)
    assert {records.job(one).stages[0].state for one in (held, asked)} == {"running"}  # type: ignore[union-attr]
    again = records.claim(pipe, unheard, 0, "w")
    assert isinstance(again, store.Claim)
    assert again.attempt == 2


def test_a_message_can_be_listened_for_without_a_claim_most_urgent_first(records: store.Store) -> None:
    urgent, later = f"{records.namespace}:urgent", f"{records.namespace}:later"
    records.client.lpush(later, "c")
    records.client.lpush(urgent, *"ab")

    async def work() -> None:
        async with hot_path(records) as hot:
            heard: list[str] = []
            for expected in ("a", "ab", "abc", "abc"):
                await hot.listen([urgent, later], 0.05, heard.append)
                assert "".join(heard) == expected

    run(work)


async def blocked(records: store.Store, connections: int = 1) -> None:
    """Until so many connections wait for a list."""
    while records.client.info("clients")["blocked_clients"] < connections:  # type: ignore[index]
        await asyncio.sleep(0.01)


def test_a_message_that_comes_when_its_taker_has_gone_is_begun_all_the_same(
    records: store.Store, pipe: Pipeline
) -> None:
    urgent, later = lists_of(pipe, records)

    async def work() -> None:
        async with hot_path(records) as hot:
            heard: list[str] = []
            begun: list[list[calls.Taken]] = []
            call = calls.take(pipe, 0, "w", 1, [urgent])
            waiting = [
                asyncio.ensure_future(hot.take(call, begun.append, urgent, 50.0)),
                asyncio.ensure_future(hot.listen([later], 50.0, heard.append)),
            ]
            await blocked(records, 2)
            for one in waiting:
                one.cancel()
            job_id = put(pipe, records, urgent)
            records.client.lpush(later, "late")
            while not (heard and begun):
                await asyncio.sleep(0.01)
            assert (heard, begun[0][0][1]) == (["late"], job_id)

    run(work)


def test_a_wait_for_messages_ends_at_once_when_no_more_are_wanted(records: store.Store, pipe: Pipeline) -> None:
    urgent, later = lists_of(pipe, records)

    async def work() -> None:
        async with hot_path(records) as hot:
            await hot.take_no_more()  # nobody has asked yet
            heard: list[str] = []
            begun: list[list[calls.Taken]] = []
            call = calls.take(pipe, 0, "w", 1, [urgent])
            waiting = asyncio.gather(
                hot.take(call, begun.append, urgent, 50.0),
                hot.listen([later], 50.0, heard.append),
            )
            await blocked(records, 2)
            await hot.take_no_more()
            await waiting
            assert (heard, begun) == ([], [[]])

    start = time.monotonic()
    run(work)
    assert time.monotonic() - start < 50.0
