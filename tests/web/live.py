"""A router and every stage of several pipelines in this process: real stage hosts, fake engines, no Celery worker."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omniqueue import catalog, celery_app, configfile, engines, errors, media, payloads, settings, store, tasks
from omniqueue.pipeline import Pipeline
from tests.web import support
from web import app, services
from workers.host import StageHost


def shipped(name: str, **engine_args: Any) -> Pipeline:
    """A stage config that ships, by its name, with other arguments for its fake engines."""
    pipe = configfile.load(f"{name}.yaml")
    stages = tuple(
        dataclasses.replace(stage, queue=f"{pipe.name}.{stage.queue}", engine_args={**stage.engine_args, **engine_args})
        for stage in pipe.stages
    )
    return dataclasses.replace(pipe, stages=stages, request_timeout_s=20.0)


@dataclass
class Live:
    """What a test asks and looks at."""

    client: Any
    store: store.Store
    media: media.MediaStore
    services: services.Services
    hosts: dict[str, StageHost] = field(default_factory=dict)

    def post(self, path: str, **options: Any) -> Any:
        return self.client.post(path, **options)

    def jobs(self) -> list[Any]:
        """The records of all pipelines."""
        return [record for pipe in self.services.catalog.pipelines for record in self.store.jobs(pipe.name, 100)]

    def job(self, response: Any) -> Any:
        """The record behind an answer."""
        return self.store.job(response.headers["X-Omniqueue-Job-Id"])


@contextlib.contextmanager
def running(valkey: str, folder: Path, *pipes: Pipeline) -> Iterator[Live]:
    """Everything in a namespace of its own."""
    namespace = f"live-{uuid.uuid4().hex[:8]}"
    config = settings.Settings(
        redis_url=valkey, namespace=namespace, media_fs_url=f"file://{folder}/media", shm_dir=str(folder)
    )
    application = app.create_app(config, catalog.Catalog(pipes))
    celery_app.app.__dict__.pop("amqp", None)
    application.test_client_class = support.CheckingClient
    router = services.of(application)
    live = Live(application.test_client(), router.store, router.media, router)
    shared = payloads.PayloadStore(config.payload_namespace(), str(folder))
    for pipe in pipes:
        for stage in pipe.stages:
            engine = engines.create(stage)
            engine.start(pipe, stage, "", lambda phase: None)
            worker = f"{stage.queue}@here"
            live.hosts[stage.queue] = StageHost(pipe, stage, engine, router.store, shared, router.media, worker)
    stop = threading.Event()
    threads = [threading.Thread(target=_work, args=(live, stop)), threading.Thread(target=_hear, args=(live, stop))]
    for thread in threads:
        thread.start()
    try:
        yield live
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for host in live.hosts.values():
            host.close()
        router.stop()
        for pattern in (f"{namespace}:*", *(f"*{pipe.name}.stage*" for pipe in pipes)):
            for key in router.store.client.scan_iter(pattern, count=1000):
                router.store.client.delete(key)


def _work(live: Live, stop: threading.Event) -> None:
    """In place of Celery: a stage that is queued is attempted by its host."""
    taken: set[tuple[str, int, int]] = set()
    with ThreadPoolExecutor(32) as pool:
        while not stop.wait(0.005):
            for record in live.jobs():
                stage = record.stages[record.stage]
                key = (record.id, record.stage, stage.attempt)
                if record.state.terminal or stage.state != "queued" or key in taken:
                    continue
                taken.add(key)
                pipe = live.services.catalog.named(record.pipeline)
                pool.submit(tasks.attempt_stage, live.hosts[pipe.stages[record.stage].queue], record.id, record.stage)


def _hear(live: Live, stop: threading.Event) -> None:
    """In place of the pulse: leases are prolonged, and what must stop is stopped."""
    while not stop.wait(0.02):
        for host in live.hosts.values():
            held = host.held()
            keys = live.store.renew(held, host.pipe.lease_s) if held else set()
            for key in keys:
                host.stop(key, errors.Stopped())


def eventually(what: Any, timeout_s: float = 10.0) -> Any:
    """The first true value of ``what``."""
    deadline = time.monotonic() + timeout_s
    while not (value := what()):
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s"
        time.sleep(0.01)
    return value


def events(chunks: Any) -> list[tuple[str, str]]:
    """Server-sent events as (name, data); comments are left out."""
    text = b"".join(chunks).decode()
    assert text.endswith("\n\n")
    found = []
    for block in text[:-2].split("\n\n"):
        fields: Mapping[str, str] = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if fields:
            found.append((fields.get("event", ""), fields["data"]))
    return found
