"""A bursty day in front of the autoscaler, beside an oracle that knows the day: ``python -m bench.scaling``."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence

from omniqueue.scaling import Limits, Scaler, Seen

DAY_S = 86_400.0
#: A picture's time in a diffusion stage, and a worker's time to load, in seconds.
RUN_S, LOAD_S = 12.0, 45.0
TICK_S = 5.0
LIMITS = Limits(low=1, high=24, target_wait_s=90.0, cooldown_s=60.0)


@dataclasses.dataclass
class Outcome:
    """What a day cost and how long its jobs waited; times in seconds."""

    waits: list[float]
    replica_s: float
    #: When the number of workers was changed.
    changes: list[float]

    def within(self, target_s: float) -> float:
        """The share of jobs that waited no longer."""
        return sum(wait <= target_s for wait in self.waits) / len(self.waits)


def arrivals(seed: int, scale: float = 1.0) -> list[float]:
    """When the jobs of a day come: a swing from night to noon, and bursts of some minutes at random."""
    chance = random.Random(seed)
    bursts = [(chance.uniform(0, DAY_S), chance.uniform(300, 1800), chance.uniform(1.5, 3.0)) for _ in range(24)]
    found: list[float] = []
    at = 0.0
    most = 2.0
    while True:
        at += chance.expovariate(most * scale)
        if at >= DAY_S:
            return found
        rate = 0.25 + 0.2 * math.sin(2 * math.pi * (at / DAY_S - 0.25))
        rate *= max([1.0, *(factor for start, length, factor in bursts if start <= at < start + length)])
        if chance.random() < rate / most:
            found.append(at)


#: From a look at the stage to the number of workers.
Decide = Callable[[Seen], int]


def simulate(times: Sequence[float], decide: Decide, start: int = 1, load_s: float = LOAD_S) -> Outcome:
    """One stage whose workers take a job at a time, in order; one that is stopped ends what it has."""
    waiting: collections.deque[float] = collections.deque()
    ready: list[float] = [0.0] * start  # when each worker takes its next job
    leaving: list[float] = []
    heapq.heapify(ready)
    result = Outcome([], 0.0, [])
    arrived = done = 0
    ends: list[float] = []
    now, index = 0.0, 0
    while now < DAY_S or waiting:
        upto = now + TICK_S
        while index < len(times) and times[index] < upto:
            waiting.append(times[index])
            arrived, index = arrived + 1, index + 1
        while waiting and ready and max(ready[0], waiting[0]) < upto:
            begin = max(heapq.heappop(ready), waiting[0])
            result.waits.append(begin - waiting.popleft())
            heapq.heappush(ready, begin + RUN_S)
            heapq.heappush(ends, begin + RUN_S)
        now = upto
        while ends and ends[0] <= now:
            heapq.heappop(ends)
            done += 1
        leaving = [end for end in leaving if end > now]
        result.replica_s += TICK_S * (len(ready) + len(leaving))
        look = Seen(
            now=now, waiting=len(waiting), running=len(ends), replicas=len(ready), slots=1,
            arrived=arrived, done=done, run_s=done * RUN_S,
        )  # fmt: skip
        wanted = decide(look)
        if wanted != len(ready):
            result.changes.append(now)
        while len(ready) < wanted:
            heapq.heappush(ready, now + load_s)
        while len(ready) > wanted:
            ready.sort()
            leaving.append(ready.pop(0))  # the one that is free first
            heapq.heapify(ready)
    return result


def oracle(times: Sequence[float], target_s: float, every_s: float) -> Outcome:
    """The fewest workers of each ``every_s`` with which the jobs that come in it wait no longer than the target.

    It knows the day, so that its workers have loaded when they are needed; like all others they cost while they load
    and until their last job has ended.
    """
    plan: list[int] = []
    free: list[float] = []
    cost_s = 0.0
    for slot in range(math.ceil(DAY_S / every_s)):
        begin, end = slot * every_s, (slot + 1) * every_s
        mine = [at for at in times if begin <= at < end]
        for count in range(1, 1000):
            workers = sorted(free)[-count:] + [begin] * (count - len(free))
            heapq.heapify(workers)
            good = True
            for at in mine:
                started = max(heapq.heappop(workers), at)
                heapq.heappush(workers, started + RUN_S)
                if started - at > target_s:
                    good = False
                    break
            if good:
                stopped = sorted(free)[: max(0, len(free) - count)]
                cost_s += count * every_s + sum(max(0.0, at - begin) for at in stopped)
                cost_s += LOAD_S * max(0, count - len(free))
                free = list(workers)
                plan.append(count)
                break
    changes = [slot * every_s for slot in range(1, len(plan)) if plan[slot] != plan[slot - 1]]
    return Outcome([], cost_s, changes)


def closest(changes: Sequence[float]) -> float:
    """Seconds between the two changes that follow each other soonest."""
    return min((b - a for a, b in itertools.pairwise(changes)), default=math.inf)


def main() -> None:
    """A line for each of five days."""
    print(f"jobs of {RUN_S:g} s, workers load {LOAD_S:g} s, target wait {LIMITS.target_wait_s:g} s, "
          f"cool-down {LIMITS.cooldown_s:g} s")  # fmt: skip
    for seed in range(5):
        times = arrivals(seed)
        got = simulate(times, Scaler(LIMITS).decide)
        best = oracle(times, LIMITS.target_wait_s, LIMITS.cooldown_s)
        print(f"day {seed}: {len(times):,} jobs, {got.within(LIMITS.target_wait_s):.2%} within the target, "
              f"{got.replica_s / 3600:.1f} replica-hours, {got.replica_s / best.replica_s:.2f} of the oracle's, "
              f"{len(got.changes)} changes, at least {closest(got.changes):.0f} s apart")  # fmt: skip


if __name__ == "__main__":
    main()
