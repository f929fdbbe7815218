"""The autoscaler's policy: a bursty day against an oracle, and the rules one by one."""

from __future__ import annotations

import dataclasses

from bench import scaling as day
from omniqueue.scaling import Limits, Scaler, Seen

LIMITS = Limits(low=1, high=8, target_wait_s=60, cooldown_s=60, window_s=300)


def look(now: float, **facts: float) -> Seen:
    base = Seen(now=now, waiting=0, running=0, replicas=1, slots=1, arrived=0, done=0, run_s=0.0)
    return dataclasses.replace(base, **facts)  # type: ignore[arg-type]


def busy(now: float, every_s: float = 20.0, run_s: float = 10.0, **facts: float) -> Seen:
    """A stage to which a job comes every so many seconds, and which keeps up."""
    count = int(now / every_s)
    return look(now, running=1, arrived=count + 1, done=count, run_s=count * run_s, **facts)


def test_a_bursty_day_is_served_in_time_for_little_more_than_an_oracle_needs() -> None:
    times = day.arrivals(0)
    limits = day.LIMITS
    got = day.simulate(times, Scaler(limits).decide)
    best = day.oracle(times, limits.target_wait_s, limits.cooldown_s)
    assert len(times) > 25_000
    assert len(got.waits) == len(times)
    assert best.replica_s >= len(times) * day.RUN_S  # it pays for the work itself
    assert got.within(limits.target_wait_s) >= 0.99
    assert got.replica_s <= 1.3 * best.replica_s
    assert day.closest(got.changes) >= limits.cooldown_s
    # The day needs it: neither the fewest nor the most workers of the oracle would have done.
    assert day.simulate(times, lambda seen: 4, start=4).within(limits.target_wait_s) < 0.9


def test_a_steady_load_never_makes_it_flap() -> None:
    times = [k * 2.5 for k in range(int(day.DAY_S / 2.5))]  # 4.8 workers' work, evenly
    got = day.simulate(times, Scaler(day.LIMITS).decide)
    assert len(got.changes) <= 6
    assert not [at for at in got.changes if at > 3600]
    assert got.within(90) > 0.999


def test_limits_hold_whatever_comes() -> None:
    scaler = Scaler(LIMITS)
    assert scaler.decide(look(0, waiting=10_000, arrived=10_000, done=10, run_s=100)) == 8
    quiet = Scaler(LIMITS)
    assert {quiet.decide(look(t)) for t in range(0, 3600, 5)} == {1}


def test_before_anything_is_known_one_worker_tells_how_long_a_job_takes() -> None:
    scaler = Scaler(dataclasses.replace(LIMITS, low=0))
    assert scaler.decide(look(0, replicas=0)) == 0
    assert scaler.decide(look(5, replicas=0, waiting=50, arrived=50)) == 1


def test_with_a_low_of_zero_a_quiet_stage_goes_to_zero_and_comes_back_for_one_job() -> None:
    scaler = Scaler(dataclasses.replace(LIMITS, low=0))
    replicas, at_zero = 1, []
    for t in range(0, 1200, 5):
        last = busy(min(t, 300), replicas=replicas) if t < 300 else look(t, arrived=30, done=30, run_s=300.0)
        replicas = scaler.decide(dataclasses.replace(last, now=t, replicas=replicas))
        if replicas == 0:
            at_zero.append(t)
    assert at_zero[0] > 500  # not in the moment in which the last job has gone
    assert replicas == 0
    assert scaler.decide(look(1300, replicas=0, waiting=1, arrived=31, done=30, run_s=300.0)) == 1


def test_more_come_at_once_and_fewer_only_after_a_while() -> None:
    scaler = Scaler(LIMITS)
    for t in range(0, 600, 5):
        assert scaler.decide(busy(t, replicas=1)) == 1
    rush = busy(600, replicas=1, waiting=30)
    more = scaler.decide(rush)
    assert more >= 4
    changes = []
    for t in range(605, 2400, 5):
        wanted = scaler.decide(busy(t, replicas=more))
        if wanted != more:
            changes.append((t, wanted))
            more = wanted
    assert changes[0][0] >= 600 + 0.8 * LIMITS.window_s
    assert more <= 2


def test_there_is_one_change_in_a_cool_down_however_things_turn() -> None:
    scaler = Scaler(LIMITS)
    for t in range(0, 300, 5):
        scaler.decide(busy(t))
    assert scaler.decide(busy(300, waiting=20)) > 1
    for t in range(305, 360, 5):
        assert scaler.decide(busy(t, waiting=400, replicas=3)) == 3
    assert scaler.decide(busy(360, waiting=400, replicas=3)) == 8


def test_a_worker_that_takes_many_at_once_counts_for_many() -> None:
    def needed(slots: int) -> int:
        scaler = Scaler(LIMITS)
        return max(scaler.decide(busy(t, every_s=2.0, slots=slots, replicas=1)) for t in range(0, 600, 5))

    assert needed(1) >= 5
    assert needed(8) == 1
