"""What happens to requests when processes die: ``python -m bench.chaos [--seconds 30] [--stages 2,3]``.

16 clients, fake stages of 20 ms with 64 KiB between them, real Valkey, real Celery workers, the real router. One line a
scenario; the status is 1 when a target is missed. Everything runs on this machine, over loopback and unix sockets.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from bench.chaos_scenarios import LEASE_S, SCENARIOS, TIMEOUT_S, Bench, Row
from tests.process.cluster import config, eventually, running

LEFTOVERS_WITHIN_S = 15.0
COLUMNS = (30, 6, 8, 8, 6, 6, 6, 9, 9)


def line(row: Row) -> str:
    """A line of the table."""
    cells = (
        row.scenario,
        str(row.stages),
        str(row.requests),
        str(row.ok),
        str(row.failed),
        str(row.lost),
        str(row.twice),
        f"{row.slowest_s:.2f} s",
        str(row.leftovers),
    )
    cells_text = " ".join(cell.ljust(width) if k == 0 else cell.rjust(width) for k, (cell, width) in _columns(cells))
    return f"{cells_text}  {'; '.join((row.missed and ['MISSED: ' + '; '.join(row.missed)]) or row.notes)}"


def _columns(cells: Sequence[str]) -> Iterator[tuple[int, tuple[str, int]]]:
    return enumerate(zip(cells, COLUMNS, strict=True))


def measure(bench: Bench, name: str) -> Row:
    """One scenario, and what it left behind."""
    row = Row(name, bench.stages)
    try:
        SCENARIOS[name](bench, row)
        bench.whole()
        eventually(lambda: not bench.cluster.leftovers(), LEFTOVERS_WITHIN_S, 0.2)
    except AssertionError as exc:
        row.missed.append(str(exc)[:500])
    row.leftovers = len(bench.cluster.leftovers())
    row.require(row.leftovers == 0, f"left behind: {bench.cluster.leftovers()[:5]}")
    return row


def run(stages: int, names: Sequence[str], seconds: float, jobs: int) -> bool:
    """Every scenario on one deployment; True when no target was missed."""
    engines: list[dict[str, str]] = [{} for _ in range(stages - 1)] + [{"exit_on": "EXIT"}]
    held = True
    with running(config(*engines, lease_s=LEASE_S, request_timeout_s=TIMEOUT_S)) as cluster:
        cluster.router()
        bench = Bench(cluster, stages, seconds, jobs)
        for name in names:
            row = measure(bench, name)
            held = held and not row.missed
            print(line(row), flush=True)
    return held


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each scenario under load (default: 30)")
    parser.add_argument("--stages", default="2,3", help="numbers of stages (default: 2,3)")
    parser.add_argument("--jobs", type=int, default=10_000, help="of the flat scenario (default: 10000)")
    parser.add_argument("--only", action="append", choices=sorted(SCENARIOS), help="a scenario; may be repeated")
    chosen = parser.parse_args()
    titles = ("scenario", "stages", "requests", "ok", "failed", "lost", "twice", "slowest", "leftovers")
    print(" ".join(t.ljust(width) if k == 0 else t.rjust(width) for k, (t, width) in _columns(titles)))
    held = [run(int(n), chosen.only or list(SCENARIOS), chosen.seconds, chosen.jobs) for n in chosen.stages.split(",")]
    sys.exit(0 if all(held) else 1)


if __name__ == "__main__":
    main()
