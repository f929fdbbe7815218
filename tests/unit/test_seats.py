"""Seats: room for as many as the engine takes, and as many more whose outcome is being recorded."""

from __future__ import annotations

import asyncio

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


def test_each_change_is_told() -> None:
    async def play() -> None:
        seats = Seats(1)
        attempt = asyncio.ensure_future(asyncio.sleep(0))
        for change in (seats.let_go, seats.leave):
            seats.take(attempt)
            assert seats.taken()
            seats.changed.clear()
            change(attempt)
            assert seats.changed.is_set()
            assert not seats.taken()
        seats.let_go(None)
        await attempt

    asyncio.run(play())
