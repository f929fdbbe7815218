"""Redis gone, hanging or restarted: a 503 in time, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omniqueue import embedded
from tests.web import support
from tests.web.support import Router, error_of


@pytest.fixture
def own_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[embedded.EmbeddedValkey]:
    """One that a test may stop."""
    server = embedded.EmbeddedValkey(tmp_path_factory.mktemp("q"), append_only=False)
    server.start()
    try:
        yield server
    finally:
        if server.process is not None:
            server.process.send_signal(signal.SIGCONT)
        server.stop()


@pytest.fixture
def own(own_valkey: embedded.EmbeddedValkey, tmp_path: Path) -> Iterator[Router]:
    with support.running(own_valkey.url, tmp_path, support.pipeline()) as router:
        yield router


CALLS = [
    ("POST", "/v1/images/generations"),
    ("POST", "/v1/jobs"),
    ("GET", "/v1/jobs"),
    ("GET", "/v1/jobs/x"),
    ("DELETE", "/v1/jobs/x"),
    ("GET", "/v1/jobs/x/events"),
    ("GET", "/v1/queues"),
    ("GET", "/ready"),
]


def assert_unavailable(router: Router) -> None:
    for method, path in CALLS:
        started = time.monotonic()
        response = router.client.open(path, method=method, json={"prompt": "x"} if method == "POST" else None)
        took_s = time.monotonic() - started
        assert response.status_code == 503, path
        assert response.json["error"]["code"] == "broker_unavailable"
        assert "Redis" in response.json["error"]["message"]
        assert took_s < 10, (method, path, took_s)
    assert router.client.get("/health").status_code == 200
    assert router.client.get("/v1/models").status_code == 200


def test_everything_that_needs_redis_is_503_within_two_seconds_when_it_is_gone(
    own: Router, own_valkey: embedded.EmbeddedValkey
) -> None:
    with support.Workers(own):
        assert own.post().status_code == 200
    own_valkey.stop()
    assert_unavailable(own)
    own_valkey.start()
    with support.Workers(own):
        assert own.post().status_code == 200


def test_everything_that_needs_redis_is_503_within_two_seconds_when_it_hangs(
    own: Router, own_valkey: embedded.EmbeddedValkey
) -> None:
    with support.Workers(own):
        assert own.post().status_code == 200
    assert own_valkey.process is not None
    os.kill(own_valkey.process.pid, signal.SIGSTOP)
    assert_unavailable(own)
    os.kill(own_valkey.process.pid, signal.SIGCONT)
    with support.Workers(own):
        assert own.post().status_code == 200


def test_ready_says_so_in_openais_shape(own: Router, own_valkey: embedded.EmbeddedValkey) -> None:
    own_valkey.stop()
    body = own.client.get("/ready").json
    assert body["status"] == "not_ready"
    assert body["reasons"] == ["Redis does not answer, so no stage can be seen."]


class Call:
    """A request on a thread of its own."""

    def __init__(self, router: Router, **fields: Any) -> None:
        self.answer: Any = None
        client: Any = router.application.test_client()

        def run() -> None:
            self.answer = client.post(support.GENERATIONS, json={"prompt": "x", **fields})

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def result(self, timeout_s: float) -> Any:
        self.thread.join(timeout_s)
        assert self.answer is not None, f"no answer within {timeout_s} s"
        return self.answer


def test_a_record_lost_in_a_restart_ends_the_wait_at_once(own: Router, own_valkey: embedded.EmbeddedValkey) -> None:
    call = Call(own)
    time.sleep(0.3)
    own_valkey.stop()
    time.sleep(0.3)
    own_valkey.start()
    error = error_of(call.result(5), 500)
    assert error["code"] == "job_failed"
    assert "Redis lost the record" in error["message"]


def test_a_wait_outlives_a_restart_of_a_redis_that_keeps_its_data(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server = embedded.EmbeddedValkey(tmp_path_factory.mktemp("q"), append_only=True)
    server.start()
    try:
        with support.running(server.url, tmp_path, support.pipeline()) as router:
            calls = [Call(router) for _ in range(4)]
            for _ in range(2):
                time.sleep(0.5)
                server.stop()
                time.sleep(0.5)
                server.start()
            with support.Workers(router):
                assert {call.result(15).status_code for call in calls} == {200}
    finally:
        server.stop()


def test_a_wait_for_a_redis_that_stays_away_ends_with_the_deadline(
    own: Router, own_valkey: embedded.EmbeddedValkey
) -> None:
    call = Call(own, request_timeout_s=1)
    time.sleep(0.3)
    own_valkey.stop()
    started = time.monotonic()
    error_of(call.result(5), 504)
    assert time.monotonic() - started < 10


def test_a_publish_that_fails_is_made_up_for(own: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a broker elsewhere: the record says that the work is owed; the router's own reaper enqueues it."""
    from omniqueue import chain

    failed = []

    def publish(*args: Any) -> bool:
        failed.append(args)
        return False

    monkeypatch.setattr(own.store, "holds_queues", False)
    monkeypatch.setattr(chain, "publish", publish)
    job_id = own.post("/v1/jobs").json["id"]
    deadline = time.monotonic() + 10
    while not any(own.pipe.stages[0].queue in name for name in own.enqueued()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [args[1].job_id for args in failed] == [job_id]
