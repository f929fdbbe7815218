"""A router in this process, and workers that end jobs through the records, without engines."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import flask
import flask.testing
import msgspec
import redis
from werkzeug.exceptions import HTTPException
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.test import TestResponse

from omniqueue import catalog, celery_app, errors, media, payloads, settings, store
from omniqueue.pipeline import Pipeline
from tests.unit import support
from web import answers, app, openapi, services

GENERATIONS = "/v1/images/generations"
PROMPT = "A red apple on a white table"


@dataclasses.dataclass
class Router:
    """The application, its records and its only pipeline."""

    application: flask.Flask
    #: A FlaskClient; Any, since its responses' ``json`` may be None only in its types.
    client: Any
    store: store.Store
    media: media.MediaStore
    pipe: Pipeline

    def post(self, path: str = GENERATIONS, json: Any = None, **options: Any) -> Any:
        return self.client.post(path, json={"prompt": PROMPT} if json is None else json, **options)

    def job(self, job_id: str) -> dict[str, Any]:
        response = self.client.get(f"/v1/jobs/{job_id}")
        assert response.status_code == 200, response.json
        body: dict[str, Any] = response.json
        return body

    def enqueued(self) -> list[str]:
        """Job records, and broker lists of the pipeline's queues that hold a message."""
        client = self.store.client
        found = list(client.scan_iter(f"{self.store.namespace}:job:*", count=1000))
        for stage in self.pipe.stages:
            found += list(client.scan_iter(f"{stage.queue}*", count=1000, _type="LIST"))
        return found


_OPERATIONS = {
    (operation.method, operation.path): operation for family in app.FAMILIES for operation in family.operations
}


class CheckingClient(flask.testing.FlaskClient):
    """A client that holds every answer against what the OpenAPI document says of it."""

    def open(self, *arguments: Any, **options: Any) -> TestResponse:
        response = super().open(*arguments, **options)
        environ = response.request.environ
        try:
            rule, _ = self.application.create_url_adapter(flask.Request(environ)).match(return_rule=True)  # type: ignore[union-attr]
        except HTTPException:
            return response
        path = re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule)
        if (operation := _OPERATIONS.get((environ["REQUEST_METHOD"], path))) is not None:
            check_answer(operation, response)
        return response


def check_answer(operation: openapi.Operation, response: TestResponse) -> None:
    """Fail unless status, media type and body are documented."""
    told = openapi.document([operation], keys=True)["paths"][operation.path][operation.method.lower()]["responses"]
    assert str(response.status_code) in told, (operation.method, operation.path, response.status_code)
    kinds = told[str(response.status_code)]["content"]
    assert {kind.partition(";")[0] for kind in kinds} >= {response.content_type.partition(";")[0]}, operation.path
    if response.content_type == openapi.JSON:
        body = operation.responses.get(response.status_code, answers.ErrorAnswer)
        [kind] = [part for part in openapi.parts(body) if not isinstance(part, openapi.Content)]
        msgspec.convert(response.json, kind, strict=True)


@contextlib.contextmanager
def running(valkey: str, folder: Path, pipe: Pipeline, **changes: Any) -> Iterator[Router]:
    """A router with a namespace of its own, named after the pipeline."""
    config = settings.Settings(
        redis_url=valkey,
        namespace=f"web-{pipe.name}",
        media_fs_url=f"file://{folder}/media",
        shm_dir=str(folder),
        **changes,
    )
    application = app.create_app(config, catalog.Catalog((pipe,)))
    # Celery keeps a pool of producers for the first broker it met; another test may have used another one.
    celery_app.app.__dict__.pop("amqp", None)
    application.test_client_class = CheckingClient
    router = services.of(application)
    try:
        yield Router(application, application.test_client(), router.store, router.media, pipe)
    finally:
        router.stop()
        with contextlib.suppress(redis.ConnectionError):
            _forget(router.store, pipe)


def _forget(records: store.Store, pipe: Pipeline) -> None:
    for pattern in (f"{records.namespace}:*", f"*{pipe.name}*"):
        for key in records.client.scan_iter(pattern, count=1000):
            records.client.delete(key)


class Handler(WSGIRequestHandler):
    """HTTP/1.1, and quiet."""

    protocol_version = "HTTP/1.1"

    def log(self, *_: object) -> None:
        """Nothing: who asks knows what was sent."""


@contextlib.contextmanager
def listening(application: flask.Flask) -> Iterator[str]:
    """The URL of an application of this process, for clients that need a socket."""
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


Behaviour = Callable[["Workers", store.Claim], None]


class Workers:
    """One thread in place of every stage's worker: takes what waits and ends it as ``behave`` says."""

    def __init__(self, router: Router, behave: Behaviour | None = None) -> None:
        self.router = router
        self.behave: Behaviour = behave or succeed
        #: Jobs in the order in which their first stage was run.
        self.seen: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> Workers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def _loop(self) -> None:
        while not self._stop.wait(0.003):
            with contextlib.suppress(errors.BrokerUnavailable):
                for stage in self.router.pipe.stages:
                    for job_id in self.waiting(stage.queue):
                        self.step(job_id, stage.stage_id)

    def waiting(self, queue: str) -> list[str]:
        records = self.router.store
        found: list[str] = records.client.zrange(f"{records.namespace}:wait:{queue}", 0, -1)  # type: ignore[assignment]
        return found

    def step(self, job_id: str, stage_id: int) -> None:
        claim = self.router.store.claim(self.router.pipe, job_id, stage_id, "stub", alone=True)
        if isinstance(claim, store.Claim):
            if stage_id == 0:
                self.seen.append(job_id)
            self.behave(self, claim)


def succeed(workers: Workers, claim: store.Claim) -> None:
    """Record an output; the last stage's is the picture itself."""
    router = workers.router
    if claim.stage_id < len(router.pipe.stages) - 1:
        reference = payloads.Reference(name=f"oq_none_{claim.job_id}", nbytes=8, host="stub")
        router.store.finish(claim, reference, {"seed": claim.request["seed"]})
        return
    data = [picture(router.media, claim, index) for index in range(claim.request["n"])]
    router.store.finish(claim, None, {"steps": 4}, {"kind": "image", "data": data})


def picture(place: media.MediaStore, claim: store.Claim, index: int) -> dict[str, Any]:
    """A grey picture of the requested size, stored."""
    job = claim.request
    width, height = job["width"], job["height"]
    image = payloads.Tensor("uint8", (height, width, 3), bytes([90 + index]) * (width * height * 3))
    content = media.encode_image(image, job["output_format"], job["output_compression"])
    name = media.file_name(claim.job_id, claim.attempt, index, job["output_format"])
    place.write(name, content)
    facts = {"width": width, "height": height, "seed": job["seed"] + index}
    return {"file": name, "nbytes": len(content), "content_type": media.IMAGE_TYPES[job["output_format"]], **facts}


def failing(code: str, message: str) -> Behaviour:
    """Every stage that is tried fails for good."""

    def behave(workers: Workers, claim: store.Claim) -> None:
        workers.router.store.fail(claim, code, message, retry=False)

    return behave


def holding(workers: Workers, claim: store.Claim) -> None:
    """The stage stays claimed, as with a busy worker."""


def slowly(seconds: float) -> Behaviour:
    """Like :func:`succeed`, after a while."""

    def behave(workers: Workers, claim: store.Claim) -> None:
        time.sleep(seconds)
        succeed(workers, claim)

    return behave


def announce(records: store.Store, pipe: Pipeline, stage_id: int, **changes: Any) -> dict[str, Any]:
    """A worker's heartbeat."""
    stage = pipe.stage(stage_id)
    facts = {
        "worker": f"{stage.queue}@host.1",
        "pipeline": pipe.name,
        "fingerprint": pipe.fingerprint,
        "stage_id": stage_id,
        "queue": stage.queue,
        "host": "host",
        "pid": 1,
        "started_at": 1.0,
        "phase": "ready",
        "detail": "",
        "concurrency": 4,
        "running": 0,
        **changes,
    }
    records.beat(str(facts["worker"]), facts)
    return facts


def error_of(response: TestResponse, status: int) -> Mapping[str, Any]:
    """The error object of a response that must have OpenAI's shape and this status."""
    assert response.status_code == status, (response.status_code, response.get_data(as_text=True)[:500])
    assert response.content_type == "application/json"
    body = response.json
    assert isinstance(body, dict)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: Mapping[str, Any] = body["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert "Traceback" not in error["message"]
    assert not re.search(r'File "', error["message"])
    return error


def pipeline(**changes: Any) -> Pipeline:
    """Two fake stages, sizes in multiples of 16, at most 10 pictures and 50 steps."""
    pipe = support.pipeline(2)
    size = dataclasses.replace(pipe.size, multiple=16, min_side=16, max_side=1024, default=(64, 32))
    return dataclasses.replace(pipe, size=size, max_steps=50, **changes)
