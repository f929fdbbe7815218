"""schemathesis over /openapi.json, against every kind of pipeline: ``python -m tests.web.fuzz --cases 2000``."""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from omniqueue import embedded
from tests.web import live, support

#: What is asked of every answer; left out is only what contradicts the API on purpose, each with its reason.
EXCLUDED = {
    # DELETE of a live job cancels it, and the job can be looked at until it is deleted a second time.
    "use_after_free",
}
CONFIG = Path(__file__).parent / "schemathesis.toml"


@contextlib.contextmanager
def serving(valkey: str, folder: Path) -> Iterator[str]:
    """The URL of a router with a pipeline of each kind, whose engines take no time."""
    names = ("fake_image", "fake_text", "fake_speech", "fake_video")
    pipes = [live.shipped(name, delay_s=0, steps=1) for name in names]
    with live.running(valkey, folder, *pipes) as running:
        stop = threading.Event()
        thread = threading.Thread(target=_beat, args=(running, stop))
        thread.start()
        try:
            with support.listening(running.client.application) as url:
                yield url
        finally:
            stop.set()
            thread.join(10)


def _beat(running: live.Live, stop: threading.Event) -> None:
    """The workers' heartbeats, without which nothing is ready."""
    while not stop.is_set():
        for pipe in running.services.catalog.pipelines:
            for stage in pipe.stages:
                support.announce(running.store, pipe, stage.stage_id)
        stop.wait(1)


def run(url: str, examples: int, seed: int, timeout_s: float) -> tuple[int, str]:
    """schemathesis's exit status and report; ``examples`` are per operation, beside those of its coverage phase."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(CONFIG), "run", f"{url}/openapi.json",
        "--checks", "all", "--exclude-checks", ",".join(sorted(EXCLUDED)), "--max-examples", str(examples),
        "--seed", str(seed), "--request-timeout", "30", "--no-color", "--workers", "2",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:  # where it keeps what it has found
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=folder, check=False)
    return done.returncode, done.stdout + done.stderr


def cases(report: str) -> int:
    """How many requests a report tells of."""
    found = re.search(r"([\d,]+) generated", report)
    return int(found[1].replace(",", "")) if found else 0


def main() -> int:
    """The command line: status 0 when no check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="requests at least (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="oq-") as folder:
        valkey = embedded.EmbeddedValkey(Path(folder), append_only=False)
        valkey.start()
        try:
            with serving(valkey.url, Path(folder)) as url:
                status, report = run(url, max(1, chosen.cases // 20), chosen.seed, 3600)
        finally:
            valkey.stop()
    print(report)
    print(f"{cases(report):,} requests; status {status}")
    return status


if __name__ == "__main__":
    sys.exit(main())
