"""Eight requests at once through the AR stage's Celery worker, eight in a row, and the engine alone for both.

``python -m bench.ar_batching`` writes a tiny GLM-Image, starts the real stage-0 worker on an embedded Valkey, then the
same engine in this process without a queue. All times are of the AR stage only, in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from omniqueue import celery_app, chain, configfile, demo, embedded, engines, params, payloads, settings, store, up
from omniqueue.child import end_all
from omniqueue.engines.base import StageRequest
from omniqueue.pipeline import Pipeline

CONFIG = "glm_image_tiny.yaml"
START_S = 300.0
REQUEST_S = 300.0


def job(pipe: Pipeline, seed: int, size: str) -> dict[str, Any]:
    """One request; only the seed differs from one to the next."""
    return params.image_job(pipe, prompt="A red apple on a white table", size=size, seed=seed)


@contextlib.contextmanager
def worker(folder: Path) -> Iterator[store.Store]:
    """An embedded Valkey and the real worker of stage 0."""
    valkey = embedded.EmbeddedValkey(folder)
    valkey.start()
    os.environ["OMNIQUEUE_REDIS_URL"] = valkey.url
    with open(folder / "worker.log", "wb") as log:
        process = subprocess.Popen(up.worker_command("stage0"), stdout=log, stderr=subprocess.STDOUT)
    try:
        celery_app.publish_only(settings.load())
        records = store.Store.from_settings(settings.load(), timeout_s=5.0)
        deadline = time.monotonic() + START_S
        while not any(one["phase"] == "ready" for one in records.workers()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((folder / "worker.log").read_text()[-3000:])
            time.sleep(0.2)
        yield records
    finally:
        end_all([process], 30.0)
        config = settings.load()
        left = payloads.PayloadStore(config.payload_namespace(), config.shm_dir)
        left.sweep(lambda ids: set(), min_age_s=0.0)
        valkey.stop()


def through_queue(records: store.Store, pipe: Pipeline, size: str) -> Callable[[int], None]:
    """A function that has stage 0 of one job run by the worker, and returns when it is done."""

    def one(seed: int) -> None:
        job_id = records.submit(pipe, job(pipe, seed, size)).job_id
        chain.publish(pipe, store.Owed(job_id, 0))
        deadline = time.monotonic() + REQUEST_S
        while time.monotonic() < deadline:
            record = records.job(job_id)
            if record is None or record.state.terminal:
                raise SystemExit(f"the job ended before its time: {record}")
            if record.stages[0].state == "done":
                records.cancel(job_id)  # nobody runs stage 1 here
                return
            time.sleep(0.01)
        raise SystemExit("the AR stage did not answer")

    return one


def alone(pipe: Pipeline, model: str, size: str) -> tuple[Callable[[int], None], Callable[[], None]]:
    """The same for the engine in this process, driven directly; and what closes it."""
    stage = pipe.stage(0)
    engine = engines.create(stage)
    engine.start(pipe, stage, model, lambda phase: None)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def call(coroutine: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout=REQUEST_S)

    def one(seed: int) -> None:
        asked = job(pipe, seed, size)
        request = StageRequest(f"r{time.monotonic_ns()}", asked, 0, params.stage_params(asked, stage, 0), {})
        call(engine.generate(request, lambda done, total: None))

    return one, engine.close


def timed(one: Callable[[int], None], count: int) -> tuple[float, float]:
    """Seconds for ``count`` requests in a row, and for as many at once."""
    one(0)  # the first request warms caches up
    start = time.monotonic()
    for seed in range(count):
        one(seed)
    row_s = time.monotonic() - start
    start = time.monotonic()
    with ThreadPoolExecutor(count) as clients:
        list(clients.map(one, range(count)))
    return row_s, time.monotonic() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=8, help="requests (default: %(default)s)")
    parser.add_argument("--size", default="64x64", help="picture size (default: %(default)s)")
    options = parser.parse_args()
    model = str(demo.tiny_model())
    os.environ |= {"OMNIQUEUE_STAGE_CONFIGS_PATH": CONFIG, "OMNIQUEUE_MODEL": model, "VLLM_LOGGING_LEVEL": "WARNING"}
    pipe = configfile.load(CONFIG, model=model)
    with tempfile.TemporaryDirectory(prefix="oq-") as folder, worker(Path(folder)) as records:
        queued = timed(through_queue(records, pipe, options.size), options.count)
    one, close = alone(pipe, model, options.size)
    direct = timed(one, options.count)
    close()
    print(f"\n{options.count} AR requests, {options.size}, {os.cpu_count()} cores")
    print(f"{'':<24}{'in a row':>10}{'at once':>10}{'at once / in a row':>20}")
    for name, (row_s, once_s) in (("omniqueue, stage 0", queued), ("the engine alone", direct)):
        print(f"{name:<24}{row_s:>9.2f}s{once_s:>9.2f}s{once_s / row_s:>20.2f}")
    print(f"{'omniqueue / alone':<24}{queued[0] / direct[0]:>10.2f}{queued[1] / direct[1]:>10.2f}")
    if queued[1] > queued[0] / 2:
        print("target missed: at once should take less than half the time of in a row")
        sys.exit(1)


if __name__ == "__main__":
    main()
