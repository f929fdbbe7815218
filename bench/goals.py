"""What the measurements have to show: ratios to what stood beside them in the same run, goals, and regressions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
#: What speech is measured of, by name: all of omniqueue, and vLLM-Omni's own engine for a pipeline.
OURS, NATIVE = "omniqueue", "AsyncOmni"
#: Marks the figure with task events.
EVENTS = " -E"
#: A ratio that is worse than the stored one by more than this share is told.
TOLERANCE = 0.15


@dataclass(frozen=True)
class Goal:
    """A bound for one figure; ``name`` says the unit."""

    name: str
    bound: float
    at_least: bool = False
    #: The peer's figure, as text.
    peer: str = ""
    #: The command that measures it.
    command: str = "make bench"

    def met(self, value: float) -> bool:
        """Whether the figure is within the bound."""
        return value >= self.bound if self.at_least else value <= self.bound

    def verdict(self, value: float) -> str:
        """Met, or missed by how much."""
        if self.met(value):
            return "met"
        share = abs(value - self.bound) / self.bound
        return f"missed by {share:.1%}" if share < 1 else f"missed: {value / self.bound:.1f} times the goal"

    def wanted(self) -> str:
        """The bound as people write it."""
        return f"{'at least' if self.at_least else 'at most'} {self.bound:g}"


HOP = "an added stage at 1 KiB and one client, in raw Redis hops"
MIB_MORE = "an added stage at 1 MiB beyond one at 1 KiB, in ms"
COPIES = "an added stage at 16 MiB, in plain copies of 16 MiB"
PYTHON = "3 stages, 64 clients: Python over the stock chain, requests/s"
HTTP = "3 stages, 64 clients: HTTP over the stock chain, requests/s"
TAIL = "p99 over p50 at 64 clients, in the worst cell"
TWO, EIGHT = "two replicas of the slowest stage over one, requests/s", "eight replicas over one, requests/s"
OVERHEAD = "a core's share of a worker with 64 running requests, beyond its engine's own"
WAITING = "CPU per request with 100,000 jobs waiting over 10"
FINISHED = "CPU per request with 100,000 jobs finished over none"
TOKENS = "tokens/s of the AR stage at 16 requests, over the engine alone"
PICTURES = "pictures/s of the DiT stage at 16 requests, over the engine alone"
SPEECH = "speech of three stages, 16 requests in flight, over vLLM-Omni in one program, requests/s"

QUEUE_COMMAND, ENGINES_COMMAND, SPEECH_COMMAND = "make bench-queue", "make bench-engines", "make bench-speech"

GOALS = (
    Goal(HOP, 7, peer="17"),
    Goal(MIB_MORE, 1.0, peer="3.4"),
    Goal(COPIES, 2.5, peer="17"),
    Goal(PYTHON, 6, at_least=True, peer="4.4"),
    Goal(HTTP, 4.5, at_least=True, peer="3.8"),
    Goal(TAIL, 2.5, peer="4.6"),
    Goal(TWO, 1.95, at_least=True),
    Goal(EIGHT, 7.5, at_least=True),
    Goal(OVERHEAD, 0.05),
    # "Does not grow": within what two measurements of the same thing differ by.
    Goal(WAITING, 1 + TOLERANCE, command=QUEUE_COMMAND),
    Goal(FINISHED, 1 + TOLERANCE, command=QUEUE_COMMAND),
    Goal(TOKENS, 0.97, at_least=True, command=ENGINES_COMMAND),
    Goal(PICTURES, 0.97, at_least=True, command=ENGINES_COMMAND),
    Goal(SPEECH, 1.0, at_least=True, command=SPEECH_COMMAND),
)

Run = Mapping[str, Any]
#: A ratio belongs to a goal, and to a cell where the goal is about the worst of many.
Key = tuple[str, str]


def ratios(run: Run) -> dict[Key, float]:
    """Every ratio that one run tells, each figure over what stood beside it in that run."""
    found: dict[Key, float] = {}
    if "cells" in run:
        found |= _of_cells(run)
    if "replicas" in run:
        rates = {int(count): rate for count, rate in run["replicas"].items()}
        found |= {(TWO, ""): rates[2] / rates[1], (EIGHT, ""): rates[8] / rates[1]}
    if "overhead" in run:
        found[OVERHEAD, ""] = run["overhead"]["worker"] - run["overhead"]["engine alone"]
    if "backlog" in run:
        cost = [sum(row["cpu_ms"].values()) for row in run["backlog"]]
        found |= {(WAITING, ""): cost[-2] / cost[0], (FINISHED, ""): cost[-1] / cost[0]}
    if "engines" in run:
        for name, what in ((TOKENS, "tokens_per_s"), (PICTURES, "pictures_per_s")):
            found[name, ""] = run["engines"]["omniqueue"][what] / run["engines"]["engine alone"][what]
    if "speech" in run:
        found[SPEECH, ""] = run["speech"][OURS]["requests_per_s"] / run["speech"][NATIVE]["requests_per_s"]
    return found


def _of_cells(run: Run) -> dict[Key, float]:
    cells = {(c["path"], c["stages"], c["payload"], c["clients"], c["events"]): c["measured"] for c in run["cells"]}
    stock = cells["stock Celery", 3, KIB, 64, False]["per_s"]
    found: dict[Key, float] = {}
    for events, mark in ((False, ""), (True, EVENTS)):

        def added_ms(payload: int, events: bool = events) -> float:
            """What one more stage costs one client, by the median; the first one has no payload to hand on."""
            three, one = cells["Python", 3, payload, 1, events], cells["Python", 1, KIB, 1, events]
            return float(three["p50_ms"] - one["p50_ms"]) / 2

        found[HOP + mark, ""] = added_ms(KIB) / run["floor"]["hop_ms"]
        found[MIB_MORE + mark, ""] = added_ms(MIB) - added_ms(KIB)
        found[COPIES + mark, ""] = added_ms(16 * MIB) / run["floor"]["copy_ms"]["16 MiB"]
        found[PYTHON + mark, ""] = cells["Python", 3, KIB, 64, events]["per_s"] / stock
        found[HTTP + mark, ""] = cells["HTTP", 3, KIB, 64, events]["per_s"] / stock
    for (path, stages, payload, clients, events), measured in cells.items():
        if clients == 64 and path != "stock Celery":
            where = f"{path}, {stages} stages, {payload // KIB} KiB"
            found[TAIL + (EVENTS if events else ""), where] = measured["p99_ms"] / measured["p50_ms"]
    return found


def medians(runs: Iterable[Mapping[Key, float]]) -> dict[Key, float]:
    """The median of each ratio over the runs that tell it."""
    told = list(runs)
    return {key: statistics.median(one[key] for one in told if key in one) for one in told for key in one}


def worst(found: Mapping[Key, float]) -> dict[str, float]:
    """One figure a goal: of the cells of a goal about all of them, the worst."""
    bad: dict[str, float] = {}
    for (name, _), value in found.items():
        bad[name] = max(value, bad[name]) if name in bad else value
    return bad


def regressions(found: Mapping[str, float], stored: Mapping[str, float]) -> list[str]:
    """A sentence for each figure that got worse by more than TOLERANCE of the stored one."""
    told = []
    for goal in GOALS:
        for name in (goal.name, goal.name + EVENTS):
            if name not in found or name not in stored:
                continue
            # A difference may be near nothing, of which no share can be told; then the goal is the measure.
            scale = goal.bound if name.startswith((MIB_MORE, OVERHEAD)) else abs(stored[name])
            worse = (stored[name] - found[name] if goal.at_least else found[name] - stored[name]) / scale
            if worse > TOLERANCE:
                told.append(f"{name}: {found[name]:.2f}, was {stored[name]:.2f} ({worse:.0%} worse)")
    return told
