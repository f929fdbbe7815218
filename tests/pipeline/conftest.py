"""The whole product once, as ``omniqueue up`` starts it: queue, a worker per stage with its real engine, router."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from omniqueue import demo, settings, store
from tests.engines import reference

START_S = 400.0


@dataclass
class Product:
    """A running ``omniqueue up`` and how to speak to it."""

    process: subprocess.Popen[bytes]
    port: int
    folder: Path
    settings: settings.Settings

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def post(self, path: str, body: Any, timeout_s: float = 120.0) -> tuple[int, Any]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url(path), content, {"Content-Type": "application/json"})
        return _answer(request, timeout_s)

    def get(self, path: str) -> tuple[int, Any]:
        return _answer(urllib.request.Request(self.url(path)), 30.0)

    def store(self) -> store.Store:
        return store.Store.from_settings(self.settings, 5.0)

    def environment(self) -> dict[str, str]:
        """For another worker of the same deployment."""
        return {
            **reference.environment(),
            "OMNIQUEUE_REDIS_URL": self.settings.redis_url,
            "OMNIQUEUE_STAGE_CONFIGS_PATH": str(self.settings.stage_configs_path),
            "OMNIQUEUE_MODEL": str(self.settings.model),
            "OMNIQUEUE_MEDIA_FS_URL": self.settings.media_fs_url,
        }

    def logs(self) -> str:
        texts = [f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in self.folder.rglob("*.log")]
        return "\n".join(texts)


def _answer(request: urllib.request.Request, timeout_s: float) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            status, content, kind = response.status, response.read(), response.headers["Content-Type"]
    except urllib.error.HTTPError as exc:
        with exc:
            status, content, kind = exc.code, exc.read(), exc.headers["Content-Type"]
    return status, json.loads(content) if "json" in (kind or "") else content


def start(checkpoint: Path, folder: Path, config_path: str = reference.CONFIG) -> Product:
    """Start ``omniqueue up`` and wait until it says that it is ready."""
    port = demo.free_port()
    command = [sys.executable, "-m", "omniqueue.cli", "up", config_path, "--model", str(checkpoint)]
    command += ["--port", str(port), "--run-dir", str(folder)]
    with open(folder / "up.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=reference.environment())
    config = settings.load(
        {
            "OMNIQUEUE_REDIS_URL": f"unix://{folder / 'valkey.sock'}?db=0",
            "OMNIQUEUE_STAGE_CONFIGS_PATH": config_path,
            "OMNIQUEUE_MODEL": str(checkpoint),
            "OMNIQUEUE_MEDIA_FS_URL": f"file://{folder / 'media'}",
        }
    )
    product = Product(process, port, folder, config)
    deadline = time.monotonic() + START_S
    while "ready    http" not in (folder / "up.log").read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise AssertionError(product.logs())
        time.sleep(0.2)
    return product


@contextlib.contextmanager
def started(checkpoint: Path, folder: Path, config_path: str = reference.CONFIG) -> Iterator[Product]:
    """The same for a while: ended as Ctrl-C does it, unless a test has."""
    running = start(checkpoint, folder, config_path)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGINT)
            running.process.wait(timeout=90)


@pytest.fixture(scope="package")
def product(
    checkpoint: Path, native_reference: reference.NativeReference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Product]:
    """Started after the native reference has ended: at most three engine processes at once."""
    with started(checkpoint, tmp_path_factory.mktemp("up")) as running:
        yield running


def group_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Pids of the process and of everything below it."""
    import psutil

    top = psutil.Process(process.pid)
    return [top.pid, *(child.pid for child in top.children(recursive=True))]


def alive(pid: int) -> bool:
    """True while the process exists and is not a zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def shm_files(config: settings.Settings) -> list[str]:
    """Payload files of this deployment."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"oq_{config.payload_namespace()}_")]
