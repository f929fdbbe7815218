"""What omniqueue costs: ``python -m bench``, everything on this machine, over loopback and unix sockets.

Side by side in one run: raw Redis and a plain copy, which are the floor; a stock Celery chain; omniqueue from Python
and over HTTP, without and with task events; replicas of a sleeping stage; a worker with 64 running requests. The other
``--parts`` (backlog, engines, speech) take minutes more and stand by themselves. Absolute times differ from machine to
machine and from minute to minute: compare within one run. The status is 1 when a ratio got worse than
bench/ratios.json says.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import backlog, engines, floor, overhead, replicas, report, speech, transport
from bench.goals import ENGINES_COMMAND, QUEUE_COMMAND, SPEECH_COMMAND, TOLERANCE

Found = dict[str, Any]


def _floor(seconds: float) -> Found:
    copies = {transport.size(nbytes): floor.copy_ms(nbytes) for nbytes in transport.PAYLOADS}
    return {"hop_ms": floor.hop_ms(seconds), "copy_ms": copies}


def measure_transport(seconds: float) -> Found:
    """The floor and every cell; the floor is measured before and after, and the mean of both counts."""
    before = _floor(seconds)
    print(transport.HEAD, flush=True)
    cells = []
    for cell in transport.cells(seconds):
        cells.append(dataclasses.asdict(cell))
        print(transport.line(cell), flush=True)
    after = _floor(seconds)
    copies = {name: (ms + after["copy_ms"][name]) / 2 for name, ms in before["copy_ms"].items()}
    return {"floor": {"hop_ms": (before["hop_ms"] + after["hop_ms"]) / 2, "copy_ms": copies}, "cells": cells}


def measure_replicas(seconds: float) -> Found:
    """Requests a second by replicas; three times as long, since one replica ends ten a second."""
    rates = replicas.per_s(3 * seconds)
    print("replicas of the slowest stage: " + ", ".join(f"{n}: {rate:.1f}/s" for n, rate in rates.items()), flush=True)
    return {"replicas": rates}


def measure_overhead(seconds: float) -> Found:
    """A worker with 64 running requests."""
    shares = overhead.core_shares(3 * seconds)
    print("64 running requests: " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items()), flush=True)
    return {"overhead": shares}


def measure_backlog(seconds: float) -> Found:
    """The table of queue lengths."""
    rows = []
    for row in backlog.rows(4 * seconds):
        rows.append(dataclasses.asdict(row))
        print(
            f"{row.waiting:8,} waiting, {row.finished:8,} finished: {row.total_ms:.2f} ms of CPU a request", flush=True
        )
    return {"backlog": rows}


def measure_engines(seconds: float) -> Found:
    """Real engines through omniqueue and alone."""
    return {"engines": engines.throughput()}


def measure_speech(seconds: float) -> Found:
    """Three stages that hand over tensors, through omniqueue and in one program."""
    return {"speech": speech.throughput()}


#: In the order in which they run.
PARTS: dict[str, Callable[[float], Found]] = {
    "transport": measure_transport,
    "replicas": measure_replicas,
    "overhead": measure_overhead,
    "backlog": measure_backlog,
    "engines": measure_engines,
    "speech": measure_speech,
}
#: What ends within five minutes.
SHORT = ("transport", "replicas", "overhead")


def machine() -> str:
    """Where it was measured."""
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def one_run(parts: Sequence[str], seconds: float) -> Found:
    """Every part once, as it will be read from JSON."""
    start = time.monotonic()
    found: Found = {"machine": machine(), "load_before": os.getloadavg()[0]}
    for part in parts:
        found |= PARTS[part](seconds)
    found["took_s"] = round(time.monotonic() - start, 1)
    again: Found = json.loads(json.dumps(found))
    return again


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1, help="medians of so many runs (default: 1)")
    parser.add_argument("--seconds", type=float, default=1.2, help="how long a cell is measured (default: 1.2)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=SHORT, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of JSON, tables and plot (default: out)")
    parser.add_argument("--store", action="store_true", help="keep the ratios for later runs to be held against")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    name = "bench" if chosen.parts == SHORT else "bench-" + "-".join(chosen.parts)
    runs = []
    for number in range(1, chosen.runs + 1):
        runs.append(one_run(chosen.parts, chosen.seconds))
        path = chosen.out / f"{name}-{number}.json"
        path.write_text(json.dumps(runs[-1], indent=1))
        print(f"run {number} of {chosen.runs}: {runs[-1]['took_s']:.0f} s, {path}", flush=True)
    (chosen.out / f"{name}.md").write_text(report.whole(runs))
    if "transport" in chosen.parts:
        from bench import plot

        plot.draw(report.median_cells(runs), chosen.out / f"{name}.png")
    print(
        f"\n{report.verdicts(runs)}\n\n{chosen.out}/{name}.md has every table; {QUEUE_COMMAND} (queues of 100,000 jobs)"
    )
    print(f"and {ENGINES_COMMAND} and {SPEECH_COMMAND} (real engines) take longer than fits here,")
    print(f"{report.ALL_COMMAND} runs all of it thrice.")
    worse = report.regressions(runs)
    for sentence in worse:
        print(f"WORSE by more than {TOLERANCE:.0%} than bench/ratios.json: {sentence}")
    if worse and chosen.runs < 3:
        print("One run on a busy machine proves little: try --runs 3.")
    if chosen.store:
        report.store(runs)
    return 1 if worse and not chosen.store else 0


if __name__ == "__main__":
    sys.exit(main())
