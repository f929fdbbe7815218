"""Log lines as text and as JSON: whose job, stage and attempt a line is about."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from omniqueue import errors, logs, settings

log = logging.getLogger("omniqueue.test")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield tmp_path / "log"
    for handler in root.handlers:
        handler.close()
    root.handlers[:], root.level = handlers, level


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_json_lines_hold_what_the_line_says_and_what_it_is_about(file: Path) -> None:
    logs.configure("json", logging.INFO, str(file))
    with logs.about(job="j", stage=1, attempt=2):
        log.info("action=stage_ended outcome=%s error=%s", "done", "none at all")
        log.warning("not ours")
    log.info("action=ready stage=%s", "stage0")
    first, second, third = lines(file)
    assert {k: first[k] for k in ("action", "job", "stage", "attempt", "outcome", "error", "level", "logger")} == {
        "action": "stage_ended", "job": "j", "stage": 1, "attempt": 2, "outcome": "done", "error": "none at all",
        "level": "INFO", "logger": "omniqueue.test",
    }  # fmt: skip
    assert str(first["time"]).endswith("+00:00")
    assert (second["message"], second["job"], second["level"]) == ("not ours", "j", "WARNING")
    assert "job" not in third
    assert third["stage"] == "stage0"


def test_an_exception_stays_on_its_line(file: Path) -> None:
    logs.configure("json", logging.INFO, str(file))
    try:
        raise ValueError("several\nlines")
    except ValueError:
        log.exception("action=engine_raised")
    (line,) = lines(file)
    assert "ValueError: several\nlines" in str(line["exception"])


def test_text_lines_are_told_what_they_do_not_say_themselves(file: Path) -> None:
    logs.configure("text", logging.INFO, str(file))
    with logs.about(job="j", stage=1):
        log.info("action=a")
        log.info("action=b job=j stage=1")
    log.info("action=c")
    first, second, third = file.read_text().splitlines()
    assert first.endswith("omniqueue.test action=a job=j stage=1")
    assert second.endswith("omniqueue.test action=b job=j stage=1")
    assert third.endswith("action=c")


def test_a_library_with_handlers_of_its_own_is_adopted(file: Path) -> None:
    other = logging.getLogger("some.library")
    other.addHandler(logging.NullHandler())
    other.propagate = False
    logs.configure("json", logging.INFO, str(file))
    logs.adopt("some.library")
    other.warning("heard")
    assert lines(file)[0]["message"] == "heard"


@pytest.mark.parametrize(("name", "bad"), [("LOG_FORMAT", "xml"), ("TRACES", "zipkin"), ("TRACES", "file:")])
def test_a_bad_value_is_named(name: str, bad: str) -> None:
    with pytest.raises(errors.ConfigError, match=f"OMNIQUEUE_{name}='{bad}'"):
        settings.load({f"OMNIQUEUE_{name}": bad})


def test_without_traces_nothing_of_opentelemetry_is_imported_but_what_redis_brings() -> None:
    modules = "web.app, workers.stage_worker, omniqueue.tasks, omniqueue.tracing"
    ours = ("opentelemetry.sdk.trace", "opentelemetry.exporter")
    program = f"import sys, {modules}; print([name for name in sys.modules if name.startswith({ours})])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
