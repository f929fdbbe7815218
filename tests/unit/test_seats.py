"""Seats: room for as many as the engine takes, and as many more whose outcome is being recorded."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from workers.seats import Seats


def test_room_is_the_engines_and_what_is_recorded_is_bounded() -> None:
    async def play() -> list[int]:
        seats, free = Seats(2), []
        attempts = [asyncio.ensure_future(asyncio.sleep(0)) for _ in range(4)]
        free.append(seats.free())
        for attempt in attempts[:2]:
            seats.take(attempt)
        free.append(seats.free())
        for attempt in attempts[:2]:
            seats.let_go(attempt)
        free.append(seats.free())
        for attempt in attempts[2:]:
            seats.take(attempt)
            seats.let_go(attempt)
        free.append(seats.free())
        seats.leave(attempts[0])
        free.append(seats.free())
        seats.leave(attempts[1])
        free.append(seats.free())
        await asyncio.gather(*attempts)
        return free

    assert asyncio.run(play()) == [2, 0, 2, 0, 1, 2]


def test_who_waits_for_room_is_woken_by_each_change() -> None:
    async def play() -> None:
        seats = Seats(1)
        attempt = asyncio.ensure_future(asyncio.sleep(0))
        changes: dict[str, Callable[[], None]] = {
            "let go": functools.partial(seats.let_go, attempt),
            "over": functools.partial(seats.leave, attempt),
            "asked to look": seats.wake,
        }
        for change in changes.values():
            seats.take(attempt)
            waiting = asyncio.ensure_future(seats.change())
            await asyncio.sleep(0)
            change()
            await asyncio.wait_for(waiting, 10)
        seats.let_go(None)
        await attempt

    asyncio.run(play())
