"""The embedded Valkey: it answers, keeps its data over a restart, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from omniqueue import errors, store
from omniqueue.embedded import EmbeddedValkey


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, for a unix socket's path has room for about 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="oq-") as made:
        yield Path(made) / "run"


def gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_it_starts_answers_and_stops_without_a_trace_but_its_data(folder: Path) -> None:
    server = EmbeddedValkey(folder)
    server.start()
    assert server.process is not None
    pid = server.process.pid
    client = store.connect(server.url, 2.0)
    assert client.ping()
    client.close()
    assert server.alive()
    server.stop()
    assert gone(pid)
    assert not server.alive()
    assert not server.socket.exists()
    server.stop()


def test_only_its_user_may_come_near(folder: Path) -> None:
    server = EmbeddedValkey(folder)
    server.start()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(server.socket.stat().st_mode) == 0o700
    client = store.connect(server.url, 2.0)
    assert client.config_get("port") == {"port": "0"}
    assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    client.close()
    server.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_append_only_data_survive_a_restart_however_it_ended(folder: Path, number: signal.Signals) -> None:
    server = EmbeddedValkey(folder)
    server.start()
    client = store.connect(server.url, 2.0)
    client.set("key", "value")
    client.execute_command("WAITAOF", 1, 0, 5000)  # type: ignore[no-untyped-call]
    client.close()
    assert server.process is not None
    server.process.send_signal(number)
    server.process.wait()
    server.start()
    client = store.connect(server.url, 2.0)
    assert client.get("key") == "value"
    client.close()
    server.stop()


def test_without_append_only_a_restart_begins_anew(folder: Path) -> None:
    server = EmbeddedValkey(folder, append_only=False)
    for _ in range(2):
        server.start()
        client = store.connect(server.url, 2.0)
        assert client.dbsize() == 0
        client.set("key", "value")
        client.close()
        server.stop()


def test_a_socket_that_another_left_behind_is_no_obstacle(folder: Path) -> None:
    folder.mkdir()
    (folder / "valkey.sock").touch()
    server = EmbeddedValkey(folder)
    server.start()
    server.stop()


def test_a_folder_too_long_for_a_socket_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="too long for a unix socket"):
        EmbeddedValkey(tmp_path / ("x" * 100))


def test_a_server_that_cannot_start_is_unavailable_with_the_end_of_its_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "appendonlydir").mkdir(parents=True)
    (folder / "appendonlydir" / "appendonly.aof.manifest").write_text("rubbish")
    server = EmbeddedValkey(folder)
    with pytest.raises(errors.BrokerUnavailable, match=r"(?s)did not start in 10 s: .*manifest"):
        server.start()
    assert not server.alive()
    assert not server.socket.exists()


def test_it_dies_with_its_parent_even_when_that_is_killed(folder: Path) -> None:
    program = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from omniqueue import embedded
        server = embedded.EmbeddedValkey(Path(sys.argv[1]))
        server.start()
        print(server.process.pid, flush=True)
        time.sleep(600)
    """)
    parent = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not gone(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    while not gone(pid):
        time.sleep(0.01)
