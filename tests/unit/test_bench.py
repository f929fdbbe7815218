"""The arithmetic of the bench, on made-up numbers: nothing is timed here."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from bench import goals, in_hand, peer, report
from bench.goals import EVENTS, GOALS, KIB, MIB


def measured(p50_ms: float, per_s: float, p99_ms: float | None = None) -> dict[str, Any]:
    times = {"p50_ms": p50_ms, "p95_ms": p50_ms, "p99_ms": p99_ms or p50_ms}
    return {**times, "per_s": per_s, "requests": 100, "cpu_ms": {"client": 1.0, "workers": 2.0, "broker": 0.5}}


def cell(path: str, stages: int, payload: int, clients: int, events: bool, **figures: float) -> dict[str, Any]:
    place = {"path": path, "stages": stages, "payload": payload, "clients": clients, "events": events}
    return {**place, "measured": measured(**figures)}


def run(slower: float = 1.0) -> dict[str, Any]:
    """A run whose stages take 1 ms at 1 KiB, 1.5 ms at 1 MiB and 6 ms at 16 MiB, twice that with events."""
    cells = [cell("stock Celery", 3, KIB, 64, False, p50_ms=640, per_s=100)]
    for events, factor in ((False, slower), (True, 2 * slower)):
        for path, per_s in (("Python", 700), ("HTTP", 450)):
            for clients in (1, 64):
                cells.append(cell(path, 1, KIB, clients, events, p50_ms=factor, per_s=3 * per_s / factor))
                for payload, hop_ms in ((KIB, 1.0), (MIB, 1.5), (16 * MIB, 6.0)):
                    p50_ms = factor * (1 + 2 * hop_ms)
                    cells.append(cell(path, 3, payload, clients, events, p50_ms=p50_ms, per_s=per_s / factor))
    floor = {"hop_ms": 0.1, "copy_ms": {"1 KiB": 0.001, "16 MiB": 3.0}}
    return {"machine": "2 cores", "floor": floor, "cells": cells}


def spoken(ours: float, native: float) -> dict[str, Any]:
    rates = {path: {"requests_per_s": per_s, "audio_s_per_s": per_s, "cpu_ms": 1.0}
             for path, per_s in ((goals.OURS, ours), (goals.NATIVE, native))}  # fmt: skip
    return {**rates, "requests": 64, "same": 63}


def told(*runs: dict[str, Any]) -> dict[str, float]:
    return report.found_in(runs)


def test_a_ratio_is_a_figure_over_what_stood_beside_it() -> None:
    found = told(run())
    assert found[goals.HOP] == pytest.approx(10)
    assert found[goals.MIB_MORE] == pytest.approx(0.5)
    assert found[goals.COPIES] == pytest.approx(2)
    assert found[goals.PYTHON] == pytest.approx(7)
    assert found[goals.HTTP] == pytest.approx(4.5)


def test_task_events_have_ratios_of_their_own() -> None:
    found = told(run())
    assert found[goals.HOP + EVENTS] == pytest.approx(20)
    assert found[goals.PYTHON + EVENTS] == pytest.approx(3.5)


def test_the_tail_is_that_of_the_worst_cell() -> None:
    one = run()
    long = cell("HTTP", 2, MIB, 64, False, p50_ms=10, per_s=5, p99_ms=31)
    one["cells"].append(long)
    one["cells"].append(cell("HTTP", 2, MIB, 16, False, p50_ms=10, per_s=5, p99_ms=900))
    assert told(one)[goals.TAIL] == pytest.approx(3.1)
    assert told(one)[goals.TAIL + EVENTS] == 1


def test_medians_are_of_ratios_and_the_worst_cell_is_looked_for_afterwards() -> None:
    runs = [run(slower) for slower in (1.0, 5.0, 1.2)]
    assert told(*runs)[goals.HOP] == pytest.approx(12)
    for number, one in enumerate(runs):  # each run has another bad cell, and no cell is bad in two
        one["cells"][1 + number]["measured"]["p99_ms"] *= 10
    assert told(*runs)[goals.TAIL] == 1


def test_the_parts_that_stand_by_themselves() -> None:
    rows = [{"cpu_ms": {"worker": ms, "broker": 1.0}} for ms in (1.0, 1.1, 1.4, 1.2)]
    assert told({"machine": "", "backlog": rows}) == pytest.approx({goals.WAITING: 1.2, goals.FINISHED: 1.1})
    assert told({"machine": "", "replicas": {"1": 10.0, "2": 19.6, "8": 75.0}}) == pytest.approx(
        {goals.TWO: 1.96, goals.EIGHT: 7.5}
    )
    assert told({"machine": "", "overhead": {"worker": 0.05, "engine alone": 0.02}}) == pytest.approx(
        {goals.OVERHEAD: 0.03}
    )
    rates = {"tokens_per_s": 97.0, "pictures_per_s": 1.0}, {"tokens_per_s": 100.0, "pictures_per_s": 2.0}
    engines = {"omniqueue": rates[0], "engine alone": rates[1]}
    assert told({"machine": "", "engines": engines}) == pytest.approx({goals.TOKENS: 0.97, goals.PICTURES: 0.5})
    assert told({"machine": "", "speech": spoken(3.0, 2.0)}) == pytest.approx({goals.SPEECH: 1.5})


def test_every_figure_has_a_goal_and_every_goal_a_figure() -> None:
    parts = run()
    parts |= {"replicas": {"1": 1.0, "2": 2.0, "8": 8.0}, "overhead": {"worker": 0.1, "engine alone": 0.0}}
    parts["backlog"] = [{"cpu_ms": {"worker": 1.0}}] * 4
    rates = {"tokens_per_s": 1.0, "pictures_per_s": 1.0}
    parts["engines"] = {"omniqueue": rates, "engine alone": rates}
    parts["speech"] = spoken(1.0, 1.0)
    assert {name.removesuffix(EVENTS) for name in told(parts)} == {goal.name for goal in GOALS}


@pytest.mark.parametrize(
    ("bound", "at_least", "value", "said"),
    [
        (7, False, 7, "met"),
        (7, False, 7.7, "missed by 10.0%"),
        (7, False, 21, "missed: 3.0 times the goal"),
        (0.97, True, 0.97, "met"),
        (6, True, 3, "missed by 50.0%"),
    ],
)
def test_a_verdict_says_by_how_much(bound: float, at_least: bool, value: float, said: str) -> None:
    assert goals.Goal("x", bound, at_least).verdict(value) == said


@pytest.mark.parametrize(
    ("name", "was", "now", "worse"),
    [
        (goals.HOP, 10, 11.4, False),
        (goals.HOP, 10, 11.6, True),
        (goals.HOP, 10, 5, False),
        (goals.HOP + EVENTS, 10, 12, True),
        (goals.PYTHON, 6, 5.2, False),
        (goals.PYTHON, 6, 5.0, True),
        (goals.PYTHON, 6, 9, False),
        # A difference: shares of its goal, since it may have been nothing or less.
        (goals.MIB_MORE, 0.0, 0.14, False),
        (goals.MIB_MORE, -0.1, 0.1, True),
        (goals.OVERHEAD, 0.01, 0.017, False),
        (goals.OVERHEAD, 0.01, 0.018, True),
    ],
)
def test_what_got_worse_by_more_than_the_tolerance_is_told(name: str, was: float, now: float, worse: bool) -> None:
    sentences = goals.regressions({name: now}, {name: was})
    assert bool(sentences) == worse
    assert all(name in sentence for sentence in sentences)


def test_what_was_not_measured_is_no_regression() -> None:
    assert goals.regressions({goals.HOP: 100}, {goals.PYTHON: 1}) == []


def test_stored_ratios_keep_those_of_other_commands(tmp_path: Path) -> None:
    path = tmp_path / "ratios.json"
    report.store([run()], path)
    report.store([{"machine": "4 cores", "overhead": {"worker": 0.05, "engine alone": 0.02}}], path)
    kept = json.loads(path.read_text())["ratios"]
    assert kept[goals.HOP] == 10
    assert kept[goals.OVERHEAD] == 0.03
    assert report.regressions([run()], path) == []
    (worse,) = [s for s in report.regressions([run(1.2)], path) if s.startswith(f"{goals.HOP}:")]
    assert "20% worse" in worse


def test_without_stored_ratios_nothing_got_worse(tmp_path: Path) -> None:
    assert report.regressions([run()], tmp_path / "none.json") == []


def test_the_repository_s_ratios_are_of_goals_that_there_are() -> None:
    stored = json.loads(report.STORED.read_text())["ratios"]
    assert {name.removesuffix(EVENTS) for name in stored} <= {goal.name for goal in GOALS}


def test_the_report_has_a_line_a_goal_and_a_line_a_cell() -> None:
    runs = [run(), run(1.5)]
    text = report.whole(runs)
    assert sum(text.count(f"| {goal.name} |") for goal in GOALS) == len(GOALS)
    assert text.count("| stock Celery | 3 | 1 KiB | 64 |") == 1
    assert text.count("| Python -E | 3 | 16 MiB | 64 |") == 1
    assert "see `make bench-engines`" in text
    widths = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    assert len([width for width, _ in itertools.groupby(widths)]) == 2


def test_speech_tells_how_many_files_are_the_same() -> None:
    text = report.whole([{"machine": "", "speech": spoken(3.0, 2.0)}])
    assert "| requests/s | 3.00 | 2.00 | 1.500 |" in text
    assert "63 of 64 files are the same bytes." in text


def test_the_peer_s_figures_stand_beside_the_cells_that_it_was_measured_in() -> None:
    assert peer.beside("HTTP", 3, KIB, 1) == "p50 6.5, p99 12"
    assert peer.beside("Python", 3, 16 * MIB, 64) == "6/s, p99 10315"
    assert peer.beside("HTTP", 3, MIB, 1) == ""


def test_a_rate_is_of_whole_ends_in_exactly_their_time() -> None:
    assert in_hand.rate([10.0, 10.5, 11.0, 11.5]) == 2
    for times in ([], [1.0], [1.0, 1.0]):
        with pytest.raises(ValueError, match="too few"):
            in_hand.rate(times)
