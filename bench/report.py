"""What was measured, as Markdown and as a picture: ``python -m bench.report out/*.json`` tells of stored runs.

Figures are medians over the runs; ratios are taken within each run first.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import goals, peer
from bench.goals import EVENTS, GOALS, Run

STORED = Path(__file__).with_name("ratios.json")
#: Every part, as medians of three runs.
ALL_COMMAND = "make bench-all"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def found_in(runs: Sequence[Run]) -> dict[str, float]:
    """One figure a goal, by the medians of its ratios."""
    return goals.worst(goals.medians(goals.ratios(run) for run in runs))


def verdicts(runs: Sequence[Run]) -> str:
    """A line a goal: measured, met or not, and the same with task events."""
    found = found_in(runs)
    return table(
        ("", "goal", "measured", "", "with -E", "", "NVIDIA Dynamo 1.6.1"),
        [
            (goal.name, goal.wanted(), *_judged(goal, "", found), *_judged(goal, EVENTS, found), goal.peer)
            for goal in GOALS
        ],
    )


def _judged(goal: goals.Goal, mark: str, found: Mapping[str, float]) -> tuple[str, str]:
    value = found.get(goal.name + mark)
    if value is None:
        return "", "" if mark else f"see `{goal.command}`"
    return f"{value:.3f}" if goal.bound < 1 else f"{value:.2f}", goal.verdict(value)


def regressions(runs: Sequence[Run], stored: Path = STORED) -> list[str]:
    """What got worse than the stored ratios say."""
    return goals.regressions(found_in(runs), json.loads(stored.read_text())["ratios"]) if stored.exists() else []


def store(runs: Sequence[Run], path: Path = STORED) -> None:
    """Keep the ratios of these runs for later ones to be held against; those of other commands stay."""
    kept = json.loads(path.read_text())["ratios"] if path.exists() else {}
    found = {name: round(value, 4) for name, value in found_in(runs).items()}
    path.write_text(json.dumps({"machine": runs[0]["machine"], "ratios": {**kept, **found}}, indent=1) + "\n")


# -- the tables ----------------------------------------


def median_cells(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The cells, each figure the median of the runs'."""
    by_place: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for cell in (cell for run in runs for cell in run.get("cells", ())):
        place = tuple(cell[name] for name in ("path", "stages", "payload", "clients", "events"))
        by_place.setdefault(place, []).append(cell["measured"])
    return [
        {
            **dict(zip(("path", "stages", "payload", "clients", "events"), place, strict=True)),
            **{name: _median(measured, name) for name in ("p50_ms", "p95_ms", "p99_ms", "per_s")},
            "cpu_ms": {role: _median([m["cpu_ms"] for m in measured], role) for role in measured[0]["cpu_ms"]},
        }
        for place, measured in by_place.items()
    ]


def _median(found: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(one[name] for one in found)


def hops(runs: Sequence[Run]) -> str:
    """Every cell of the transport."""
    rows = []
    for cell in median_cells(runs):
        nbytes = cell["payload"]
        payload = f"{nbytes >> 20} MiB" if nbytes >> 20 else f"{nbytes >> 10} KiB"
        cpu = [f"{cell['cpu_ms'][role]:.2f}" if role in cell["cpu_ms"] else "" for role in ("client", "router")]
        cpu += [f"{cell['cpu_ms'][role]:.2f}" for role in ("workers", "broker")]
        times = [f"{cell[name]:.2f}" for name in ("p50_ms", "p95_ms", "p99_ms")]
        beside = "" if cell["events"] else peer.beside(cell["path"], cell["stages"], nbytes, cell["clients"])
        path = cell["path"] + (EVENTS if cell["events"] else "")
        rows.append((path, str(cell["stages"]), payload, str(cell["clients"]), *times, f"{cell['per_s']:.0f}"))
        rows[-1] += (*cpu, beside)
    head = ("path", "stages", "per hop", "clients", "p50", "p95", "p99", "requests/s")
    return table((*head, "CPU: client", "router", "workers", "broker", "Dynamo"), rows)


def replicas(runs: Sequence[Run]) -> str:
    """Requests a second by the number of replicas."""
    told = [run["replicas"] for run in runs if "replicas" in run]
    return table(
        ("replicas of the slowest stage", "requests/s", "over one"),
        [
            (
                str(count),
                f"{_median(told, count):.1f}",
                f"{statistics.median(one[count] / one['1'] for one in told):.2f}",
            )
            for count in told[0]
        ],
    )


def backlog(runs: Sequence[Run]) -> str:
    """What a request costs by what waits and what has finished; medians row by row."""
    rows = []
    for same in zip(*[run["backlog"] for run in runs if "backlog" in run], strict=True):
        counts = [f"{statistics.median_low([row[name] for row in same]):,}" for name in ("waiting", "finished")]
        cpu = {role: _median([row["cpu_ms"] for row in same], role) for role in same[0]["cpu_ms"]}
        rest = [f"{_median(same, name):.2f}" for name in ("submit_ms", "overview_ms")]
        total = statistics.median(sum(row["cpu_ms"].values()) for row in same)
        rows.append(
            (*counts, *[f"{ms:.2f}" for ms in cpu.values()], f"{total:.2f}", f"{_median(same, 'per_s'):.0f}", *rest)
        )
    head = ("waiting", "finished", "CPU: client", "worker", "broker", "all", "requests/s")
    return table((*head, "accepting one", "reading /metrics"), rows)


def engines(runs: Sequence[Run]) -> str:
    """The real engines' throughput."""
    told = [run["engines"] for run in runs if "engines" in run]
    pairs = (("tokens_per_s", "AR stage, tokens/s"), ("pictures_per_s", "DiT stage, pictures/s"))
    rows = []
    for name, title in pairs:
        whole, alone = (_median([one[path] for one in told], name) for path in ("omniqueue", "engine alone"))
        share = statistics.median(one["omniqueue"][name] / one["engine alone"][name] for one in told)
        rows.append((title, f"{whole:.1f}", f"{alone:.1f}", f"{share:.3f}"))
    rates = table(("16 requests at once", "omniqueue", "the engine alone", "ratio"), rows)
    names = ("start_s", "memory_gb", "per_minute_one_by_one", "per_minute_at_once", "batched")
    start_s, held, single, together, batched = (_median(told, name) for name in names)
    return (
        f"{rates}\n\nReady after {start_s:.0f} s, {held:.1f} GB. {single:.0f} pictures a minute one by one, "
        f"{together:.0f} at once. The AR stage takes for 16 at once {batched:.2f} of what they would take in a row."
    )


def speech(runs: Sequence[Run]) -> str:
    """Three stages that hand over tensors, in processes of their own and in one program."""
    told = [run["speech"] for run in runs if "speech" in run]
    rows = []
    titles = {"requests_per_s": "requests/s", "audio_s_per_s": "seconds of sound/s", "cpu_ms": "CPU, ms a request"}
    for name, title in titles.items():
        ours, native = (_median([one[path] for one in told], name) for path in (goals.OURS, goals.NATIVE))
        rows.append((title, f"{ours:.2f}", f"{native:.2f}", f"{ours / native:.3f}"))
    same, asked = (sum(one[name] for one in told) for name in ("same", "requests"))
    rates = table(("speech, 16 requests in flight", goals.OURS, f"vLLM-Omni's {goals.NATIVE}", "ratio"), rows)
    return f"{rates}\n\n{same} of {asked} files are the same bytes."


def whole(runs: Sequence[Run]) -> str:
    """All of it."""
    machine = runs[0]["machine"]
    count = "one run" if len(runs) == 1 else f"medians of {len(runs)} runs"
    parts = [f"{machine}; {count}. Milliseconds where nothing else is said.", verdicts(runs)]
    floors = [run["floor"] for run in runs if "floor" in run]
    if floors:
        copies = ", ".join(f"{n} {_median([f['copy_ms'] for f in floors], n):.3f} ms" for n in floors[0]["copy_ms"])
        parts.append(f"The floor: a raw Redis hop {_median(floors, 'hop_ms'):.3f} ms; a copy of {copies}.")
    titled = {"cells": hops, "replicas": replicas, "backlog": backlog, "engines": engines, "speech": speech}
    for name, part in titled.items():
        if any(name in run for run in runs):
            parts.append(part(runs))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.report", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="what runs have written to out/")
    parser.add_argument("--plot", type=Path, help="also draw to this file")
    parser.add_argument("--store", action="store_true", help=f"keep the ratios in {STORED.name}")
    chosen = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in chosen.runs]
    print(whole(runs))
    if chosen.plot:
        from bench import plot

        plot.draw(median_cells(runs), chosen.plot)
    if chosen.store:
        store(runs)


if __name__ == "__main__":
    main()
