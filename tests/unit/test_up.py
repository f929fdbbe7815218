"""``omniqueue up``: what it refuses before anything is started, and when a part is started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from omniqueue import child as children
from omniqueue import errors, topology, up


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Starting sets variables for the parts."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def silent(line: str) -> None:
    """Nobody listens."""


class Records:
    """A store that knows these announcements."""

    def __init__(self, *workers: dict[str, Any]) -> None:
        self.announced = list(workers)

    def workers(self) -> list[dict[str, Any]]:
        return self.announced


def machine(folder: Path, **options: Any) -> up.Machine:
    """A machine of the fake pipeline on a port nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        options.setdefault("port", probe.getsockname()[1])
    return up.Machine(up.Options(config="fake_image", run_dir=folder / "run", **options), silent)


def refused(made: up.Machine) -> str:
    """The message of a machine that does not start; nothing of it runs."""
    with pytest.raises(errors.ConfigError) as caught:
        made.start()
    assert made.valkey is None
    assert not made.children
    made.stop()
    return caught.value.message


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"127.0.0.1:{port}: Address already in use" in refused(machine(tmp_path, port=port))


def test_a_port_that_was_just_left_is_not_in_use() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first waits in TIME_WAIT
        client.close()
    up.check_address("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(errors.ConfigError, match=host):
        up.check_address(host, 8000)


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "127.0.0.1:80"), ("::1", "[::1]:80"), ("localhost", "localhost:80")]
)
def test_an_ipv6_address_goes_into_brackets(host: str, shown: str) -> None:
    assert up.address(host, 80) == shown
    assert up.router_command(host, 80)[-1] == shown


def test_replicas_of_a_stage_that_is_not_there_are_refused(tmp_path: Path) -> None:
    assert "no stage 9; it has [0, 1]" in refused(machine(tmp_path, replicas={9: 2}))


def test_places_that_cannot_be_used_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIQUEUE_SHM_DIR", str(tmp_path / "nowhere"))
    assert "OMNIQUEUE_SHM_DIR" in refused(machine(tmp_path))
    monkeypatch.delenv("OMNIQUEUE_SHM_DIR")
    monkeypatch.setenv("OMNIQUEUE_MEDIA_FS_URL", "nonsense://here")
    assert "OMNIQUEUE_MEDIA_FS_URL" in refused(machine(tmp_path))
    (tmp_path / "run2").write_text("a file")
    assert "--run-dir" in refused(up.Machine(up.Options("fake_image", run_dir=tmp_path / "run2"), silent))


def test_what_a_killed_run_left_is_removed_but_not_what_another_redis_knows_of(tmp_path: Path) -> None:
    for url, left in ((None, False), ("redis://127.0.0.1:1/0", True)):
        picture = tmp_path / "run" / "media" / "picture.png"
        picture.parent.mkdir(parents=True)
        picture.touch()
        refused(machine(tmp_path, redis_url=url, replicas={9: 2}))
        assert picture.exists() is left


def test_only_pipelines_are_named_when_a_config_is_not_found() -> None:
    with pytest.raises(errors.ConfigError) as caught:
        topology.find_config("nonsense")
    assert "fake_image" in caught.value.message
    assert "topologies" not in caught.value.message


def ended(folder: Path, made: up.Machine, *, restarts: int, status: int = 9) -> children.Child:
    """A child of ``made`` that has been started again ``restarts`` times and has just ended."""
    command = [sys.executable, "-c", f"raise SystemExit({status})"]
    child = children.Child("stage0", command, folder / "stage0.log", {}, restarts=restarts)
    child.start()
    assert child.process is not None
    child.process.wait()
    made.children = [child]
    return child


def test_a_worker_that_was_ready_is_started_again_at_once_however_often(tmp_path: Path) -> None:
    made = machine(tmp_path)
    child = ended(tmp_path, made, restarts=50)
    assert child.process is not None
    pid = child.process.pid
    told = {"worker": "w", "queue": "stage0", "pid": pid, "phase": "ready", "detail": "", "started_at": time.time()}
    made.records = Records(told)  # type: ignore[assignment]
    made.check()
    assert child.process.pid != pid
    assert child.restarts == 1
    child.process.wait()


def test_a_worker_that_never_gets_ready_waits_longer_each_time_and_is_given_up_at_last(tmp_path: Path) -> None:
    made = machine(tmp_path)
    made.records = Records()  # type: ignore[assignment]
    child = ended(tmp_path, made, restarts=3)
    made.check()
    assert child.retry_at > time.monotonic() + 3.0
    assert child.restarts == 3
    child = ended(tmp_path, made, restarts=20)
    with pytest.raises(errors.NotReady, match="status 9"):
        made.check()


def test_a_part_that_asks_something_hears_at_once_that_nobody_answers(tmp_path: Path) -> None:
    """Some checkpoints bring code and ask on stdin whether it may run; on a terminal they would wait for ever."""
    child = children.Child("stage0", [sys.executable, "-c", "input('run it?')"], tmp_path / "stage0.log", {})
    child.start()
    assert child.process is not None
    assert child.process.wait(timeout=60) == 1
    assert child.tail(1) == "EOFError: EOF when reading a line"


def test_a_wrong_configuration_is_not_tried_again(tmp_path: Path) -> None:
    made = machine(tmp_path)
    made.records = Records()  # type: ignore[assignment]
    ended(tmp_path, made, restarts=0, status=2)
    with pytest.raises(errors.NotReady, match="status 2"):
        made.check()


def test_asked_twice_to_stop_no_part_is_waited_for() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, lambda *a: None); print(1, flush=True); time.sleep(60)"
    deaf = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert deaf.stdout is not None
    assert deaf.stdout.readline()
    deaf.stdout.close()
    hurry = threading.Event()
    hurry.set()
    seen: list[int] = []
    send, deaf.send_signal = deaf.send_signal, lambda number: (seen.append(number), send(number))[1]  # type: ignore
    children.end_all([deaf], 2.0, hurry)
    assert seen == [signal.SIGTERM, signal.SIGTERM, signal.SIGKILL]
    assert deaf.returncode == -signal.SIGKILL


def test_told_to_stop_before_it_is_ready_the_block_is_not_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGHUP)
    monkeypatch.setattr(up.Machine, "start", lambda self: signal.raise_signal(signal.SIGHUP))
    monkeypatch.setattr(up.Machine, "wait_ready", lambda self: None)
    with pytest.raises(KeyboardInterrupt), up.running(up.Options("fake_image", run_dir=tmp_path), silent):
        pytest.fail("entered")
    assert signal.getsignal(signal.SIGHUP) == before


@pytest.mark.parametrize("more", [{"replicas": {0: 2}}, {"model": "/checkpoint"}])
def test_what_is_said_of_one_pipeline_is_refused_with_several(tmp_path: Path, more: dict[str, Any]) -> None:
    machine = up.Machine(up.Options(f"fake_text{os.pathsep}fake_video", run_dir=tmp_path, **more), lambda line: None)
    with mock.patch.dict(os.environ), pytest.raises(errors.ConfigError, match="is for one stage config"):
        machine.start()
    machine.stop()
