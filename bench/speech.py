"""Speech of three stages: over HTTP and three Celery workers, and by vLLM-Omni's own ``AsyncOmni`` in one program.

Both get the same requests in turns, sixteen of them in flight, after a first burst that warms them up. Every stage has
the same limits, every engine one thread of arithmetic. The files have to be the same bytes.
"""

from __future__ import annotations

import contextlib
import io
import json
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import wave
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import yaml

from bench import three_stages
from bench.closed_loop import Cpu
from bench.goals import NATIVE, OURS
from tests.engines import handover, native_async, reference
from tests.pipeline.conftest import Product

REQUESTS, IN_FLIGHT, SEED = 64, 16, 42
#: The most that thinker and talker make.
TOKENS, CODES = 16, 32
#: How often both are measured.
ROUNDS = 2
START_S, BURST_S = 300.0, 240.0


class Native:
    """:mod:`tests.engines.native_async` as a process."""

    def __init__(self, folder: Path, checkpoint: Path, config: Path) -> None:
        pipe = reference.pipeline(checkpoint, str(config))
        stages = [dict(stage.deploy) for stage in pipe.stages]
        stages[-1]["worker_extension_cls"] = native_async.EXTENSION
        deploy = folder / "deploy.yaml"
        deploy.write_text(yaml.safe_dump({**pipe.deploy, "stages": stages}))
        env = {**reference.environment(), **handover.SMALL}
        command = [sys.executable, "-m", "tests.engines.native_async", str(checkpoint), str(deploy)]
        self.log = folder / "native.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env)
        self._answers: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put(b"")

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Its next answer. Raises TimeoutError, or ChildProcessError when it has ended."""
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"vLLM-Omni has not answered for {timeout_s:.0f} s; see {self.log}.") from None
        if not line:
            raise ChildProcessError(f"vLLM-Omni ended: {self.log.read_text(errors='replace')[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def burst(self, prompts: Sequence[str]) -> tuple[float, list[str]]:
        """Seconds that all took, and the digest of each one's file."""
        assert self.process.stdin is not None
        asked = {"prompts": list(prompts), "seed": SEED, "in_flight": IN_FLIGHT}
        self.process.stdin.write(json.dumps(asked).encode() + b"\n")
        self.process.stdin.flush()
        answer = self.answer(BURST_S)
        return answer["seconds"], answer["digests"]

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Without it for the block: idle, it asks its engines for answers every millisecond."""
        top = psutil.Process(self.process.pid)
        family = [top, *top.children(recursive=True)]
        for process in family:
            process.suspend()
        try:
            yield
        finally:
            for process in family:
                process.resume()

    def close(self) -> None:
        """End it; by force after a while."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Clients:
    """Of the router."""

    def __init__(self, product: Product) -> None:
        self._product = product
        self.files: list[bytes] = []

    def burst(self, prompts: Sequence[str]) -> tuple[float, list[str]]:
        """As :meth:`Native.burst`."""
        start = time.monotonic()
        with ThreadPoolExecutor(IN_FLIGHT) as clients:
            self.files = list(clients.map(self._say, prompts))
        return time.monotonic() - start, [native_async.digest(file) for file in self.files]

    def _say(self, prompt: str) -> bytes:
        asked = {"input": prompt, "seed": SEED, "response_format": "wav"}
        status, content = self._product.post("/v1/audio/speech", asked, BURST_S)
        if status != 200:
            raise ValueError(f"Not what was asked: {status} {content}")
        return bytes(content)

    def audio_s(self) -> float:
        """How long all files of the last burst sound."""
        total_s = 0.0
        for file in self.files:
            with wave.open(io.BytesIO(file)) as sound:
                total_s += sound.getnframes() / sound.getframerate()
        return total_s


@contextlib.contextmanager
def _both() -> Iterator[tuple[Native, Product]]:
    with tempfile.TemporaryDirectory(prefix="oqb-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        checkpoint = three_stages.written(folder)
        config = three_stages.config(folder, TOKENS, CODES)
        native = Native(folder, checkpoint, config)
        stack.callback(native.close)
        product = stack.enter_context(three_stages.served(folder, checkpoint, config))
        native.answer(START_S)
        yield native, product


def throughput() -> dict[str, Any]:
    """Requests and seconds of sound a second of both, by the medians of the rounds; CPU milliseconds a request."""
    prompts = three_stages.prompts(REQUESTS, SEED)
    with _both() as (native, product):
        clients = Clients(product)
        paths = {NATIVE: (native.burst, native.process.pid), OURS: (clients.burst, product.process.pid)}
        seconds: dict[str, list[float]] = {path: [] for path in paths}
        cpu_ms: dict[str, list[float]] = {path: [] for path in paths}
        digests: dict[str, list[str]] = {}
        for number in range(ROUNDS + 1):
            for path, (burst, pid) in sorted(paths.items(), reverse=bool(number % 2)):
                taken = Cpu({path: [pid]})
                with native.stopped() if path == OURS else contextlib.nullcontext():
                    took_s, digests[path] = burst(prompts if number else prompts[:IN_FLIGHT])
                if number:
                    seconds[path].append(took_s)
                    cpu_ms[path].append(1000 * taken.taken_s()[path] / REQUESTS)
            if number:
                told = ", ".join(f"{path} {times[-1]:.1f} s" for path, times in seconds.items())
                print(f"round {number}: {told}", flush=True)
    return {
        **{path: _rates(times, clients.audio_s(), cpu_ms[path]) for path, times in seconds.items()},
        "requests": REQUESTS,
        "same": sum(a == b for a, b in zip(digests[OURS], digests[NATIVE], strict=True)),
    }


def _rates(times: Sequence[float], audio_s: float, cpu_ms: Sequence[float]) -> Mapping[str, float]:
    took_s = statistics.median(times)
    return {
        "requests_per_s": REQUESTS / took_s,
        "audio_s_per_s": audio_s / took_s,
        "cpu_ms": statistics.median(cpu_ms),
    }
