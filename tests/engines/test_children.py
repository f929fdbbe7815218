"""Only processes that the engine started are ended."""

from __future__ import annotations

import subprocess
import sys

import psutil

from omniqueue.engines.children import ChildProcesses

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
PARENT = (
    "import subprocess, sys\n"
    "subprocess.run([sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(600)'])"
)


def test_children_of_the_block_are_ended_and_others_are_not() -> None:
    other = subprocess.Popen(SLEEP)
    children = ChildProcesses()
    with children.record():
        mine = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
    assert mine.stdout is not None
    mine.stdout.readline()
    try:
        assert [process.pid for process in children.alive()] == [mine.pid]
        assert children.end(patience_s=0.2) == [mine.pid]
        mine.wait(timeout=10)
        assert other.poll() is None
        assert children.alive() == []
        assert children.end(patience_s=0.2) == []
    finally:
        other.kill()
        other.wait()
        mine.stdout.close()


def test_grandchildren_are_ended_too() -> None:
    children = ChildProcesses()
    with children.record():
        parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.readline()
    family = [process.pid for process in children.alive()]
    assert len(family) == 2
    assert sorted(children.end(patience_s=0.2)) == sorted(family)
    parent.wait(timeout=10)
    parent.stdout.close()
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in family)
