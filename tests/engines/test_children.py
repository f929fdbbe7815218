"""Only processes that the engine started are ended."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

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


KILLED = (
    "import os, subprocess, sys\n"
    "from omniqueue.engines.children import ChildProcesses\n"
    "children = ChildProcesses()\n"
    "with children.record():\n"
    "    child = subprocess.Popen([sys.executable, '-c', sys.argv[2]], stdout=subprocess.PIPE)\n"
    "    child.stdout.readline()\n"
    "print(*[process.pid for process in children.alive()], flush=True)\n"
    "os.kill(os.getpid(), 9) if sys.argv[1] == 'killed' else os._exit(70)\n"
)


@pytest.mark.parametrize("how", ["killed", "left in haste"])
@pytest.mark.parametrize("child", [STUBBORN, PARENT])
def test_a_killed_worker_leaves_no_process_of_its_engine(how: str, child: str) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, how, child], stdout=subprocess.PIPE, timeout=60, check=False)
    family = [int(pid) for pid in ended.stdout.split()]
    assert len(family) == (2 if child == PARENT else 1)
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in family):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_no_guard_stays_behind_and_none_is_needed_without_children() -> None:
    before = psutil.Process().children()
    children = ChildProcesses()
    with children.record():
        pass
    assert psutil.Process().children() == before
    with children.record():
        child = subprocess.Popen(SLEEP)
    assert len(psutil.Process().children()) == len(before) + 2
    children.end(patience_s=0.1)
    child.wait(timeout=10)
    assert psutil.Process().children() == before
