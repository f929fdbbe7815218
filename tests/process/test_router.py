"""The real router between real clients and real workers: killed, flooded, and left alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from tests.process.cluster import Cluster, Process, eventually


def generate(web: Cluster, prompt: str, key: str = "", **more: Any) -> tuple[int, dict[str, Any]]:
    """POST /v1/images/generations: status and body; status 0 when the connection broke."""
    body = json.dumps({"prompt": prompt, "size": "16x16", "seed": 1, "response_format": "url", **more}).encode()
    headers = {"Idempotency_Key": key} if key else {}
    try:
        status, text = web.http("POST", "/v1/images/generations", body, 60.0, **headers)
    except OSError:
        return 0, {}
    return status, json.loads(text)


def create(web: Cluster, prompt: str, key: str = "", **more: Any) -> dict[str, Any]:
    """POST /v1/jobs: the job object."""
    body = json.dumps({"prompt": prompt, "size": "16x16", "seed": 1, **more}).encode()
    headers = {"Idempotency_Key": key} if key else {}
    status, text = web.http("POST", "/v1/jobs", body, 60.0, **headers)
    assert status == 202, text
    return dict(json.loads(text))


def look(web: Cluster, job_id: str) -> dict[str, Any]:
    status, text = web.http("GET", f"/v1/jobs/{job_id}")
    assert status == 200, text
    return dict(json.loads(text))


def the_router(web: Cluster) -> Process:
    return next(process for process in web.processes if process.name == "router" and process.alive())


@pytest.mark.parametrize("whole_group", [True, False], ids=["master and worker", "master only"])
def test_sigkill_of_the_router_with_sixteen_in_flight_loses_none_and_the_same_key_finds_the_same_job(
    web: Cluster, whole_group: bool
) -> None:
    router = the_router(web)
    _, (last,) = web.workers(1, 1)
    mark = f"group {whole_group}"
    last.signal(signal.SIGSTOP)  # so that all of them are in flight
    jobs = [create(web, f"{mark} job {k}", f"{mark} job {k}")["id"] for k in range(8)]
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(generate, web, f"{mark} wait {k}", f"{mark} wait {k}") for k in range(8)]
        eventually(lambda: web.store.live(web.pipe.name) == 16)
        if whole_group:
            os.killpg(router.pid, signal.SIGKILL)
        router.kill()
        last.signal(signal.SIGCONT)
        web.router()
        first = [future.result(60.0) for future in waiting]
    # A worker that outlives its master still answers those that wait; otherwise their connections break.
    assert {status for status, _ in first} <= ({0} if whole_group else {0, 200})

    for k, job_id in enumerate(jobs):
        assert create(web, f"{mark} job {k}", f"{mark} job {k}")["id"] == job_id
        eventually(lambda job_id=job_id: look(web, job_id)["status"] == "succeeded")  # type: ignore[misc]
    accepted = web.store.counts(web.pipe.name)["accepted"]
    again = [generate(web, f"{mark} wait {k}", f"{mark} wait {k}") for k in range(8)]
    assert [status for status, _ in again] == [200] * 8
    assert web.store.counts(web.pipe.name)["accepted"] == accepted
    assert all(stage.attempt == 1 for job_id in jobs for stage in web.job(job_id).stages)


def test_a_burst_beyond_max_queue_gets_429_with_retry_after_for_exactly_the_excess(web: Cluster) -> None:
    (first,), _ = web.workers(1, 1)
    first.signal(signal.SIGSTOP)
    barrier = threading.Barrier(50)

    def one(number: int) -> int:
        barrier.wait(20.0)
        return generate(web, f"burst {number}")[0]

    with ThreadPoolExecutor(50) as pool:
        futures = [pool.submit(one, k) for k in range(50)]
        eventually(lambda: sum(future.done() for future in futures) == 18)
        first.signal(signal.SIGCONT)
        statuses = Counter(future.result(60.0) for future in futures)
    assert statuses == {200: 32, 429: 18}
    assert generate(web, "afterwards")[0] == 200


def test_clients_that_leave_a_stream_take_nothing_with_them(web: Cluster) -> None:
    _, (last,) = web.workers(1, 1)
    last.signal(signal.SIGSTOP)
    jobs = [create(web, f"left {k}")["id"] for k in range(20)]
    for job_id in jobs:
        with socket.create_connection(("127.0.0.1", web.port), timeout=10.0) as connection:
            connection.sendall(f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert b"200 OK" in connection.recv(4096)
    assert web.http("GET", "/health")[0] == 200
    last.signal(signal.SIGCONT)
    for job_id in jobs:
        eventually(lambda job_id=job_id: look(web, job_id)["status"] == "succeeded")  # type: ignore[misc]
    # The threads that served them are free again: one notices at its next write, within a few seconds.
    assert generate(web, "next")[0] == 200


def test_a_prompt_that_kills_its_worker_is_told_with_stage_and_attempts(web: Cluster) -> None:
    _, (worker,) = web.workers(1, 1)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, web, "EXIT now")
        for _ in range(3):
            assert worker.wait(20.0) == 9
            worker = web.worker(1, ready=False)  # it may be killed as soon as it is
        status, body = answer.result(30.0)
    assert status == 500
    assert "Stage 1" in body["error"]["message"]
    assert "after 3 attempts" in body["error"]["message"]
    assert "stopped answering" in body["error"]["message"]


def test_redis_restarted_under_load_is_not_seen_by_those_that_wait_and_the_router_goes_on(web: Cluster) -> None:
    router = the_router(web)
    worker_pids = {child.pid for child in psutil.Process(router.pid).children()}
    _, (last,) = web.workers(1, 1)
    with ThreadPoolExecutor(16) as pool:
        last.signal(signal.SIGSTOP)
        waiting = [pool.submit(generate, web, f"through a restart {k}") for k in range(16)]
        eventually(lambda: web.store.live(web.pipe.name) == 16)
        for _ in range(2):
            web.valkey.stop()
            start = time.monotonic()
            status, body = generate(web, "meanwhile")
            assert (status, body["error"]["code"]) == (503, "broker_unavailable")
            assert time.monotonic() - start < 10
            web.valkey.start()
        last.signal(signal.SIGCONT)
        assert {future.result(40.0)[0] for future in waiting} == {200}
    assert router.alive()
    assert {child.pid for child in psutil.Process(router.pid).children()} == worker_pids


def test_memory_and_descriptors_of_router_and_workers_are_flat_over_two_thousand_requests(web: Cluster) -> None:
    serving = psutil.Process(the_router(web).pid).children()[0]
    workers = [psutil.Process(process.pid) for group in web.workers(1, 1) for process in group]

    def some(count: int) -> list[tuple[int, int]]:
        with ThreadPoolExecutor(16) as pool:
            assert set(pool.map(lambda k: generate(web, f"flat {k}")[0], range(count))) == {200}
        return [(process.memory_info().rss, process.num_fds()) for process in (serving, *workers)]

    for (rss, descriptors), (rss_after, descriptors_after) in zip(some(500), some(2000), strict=True):
        assert rss_after - rss < 8 << 20, f"{(rss_after - rss) / 1e6:.1f} MB more"
        assert descriptors_after - descriptors <= 20  # a connection to Redis for each at once; a leak would be hundreds


def test_the_router_says_within_a_beat_which_stage_has_no_worker(web: Cluster) -> None:
    _, (last,) = web.workers(1, 1)
    assert web.http("GET", "/ready")[0] == 200
    last.kill()
    status, text = eventually(lambda: _not_ready(web), 8.0)
    assert status == 503
    assert "celery -A omniqueue worker -Q stage1" in text.decode()
    web.worker(1)
    assert web.http("GET", "/ready")[0] == 200


def _not_ready(web: Cluster) -> tuple[int, bytes] | None:
    answer = web.http("GET", "/ready")
    return answer if answer[0] != 200 else None
