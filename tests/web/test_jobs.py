"""/v1/jobs: the life of a job as its client sees it."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from werkzeug.test import TestResponse

from omniqueue import errors, store
from tests.unit import support as unit_support
from tests.web import support
from tests.web.support import PROMPT, Router, error_of
from web import events


def create(router: Router, **fields: Any) -> dict[str, Any]:
    response = router.post("/v1/jobs", json={"prompt": PROMPT, **fields})
    assert response.status_code == 202, response.json
    body: dict[str, Any] = response.json
    assert response.headers["Location"] == f"/v1/jobs/{body['id']}"
    assert response.headers["X-Omniqueue-Job-Id"] == body["id"]
    return body


def ended(router: Router, job_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 10
    while (body := router.job(job_id))["status"] in ("queued", "running", "cancelling"):
        assert time.monotonic() < deadline, body
        time.sleep(0.01)
    return body


def test_a_job_is_accepted_at_once_and_enqueued(idle_router: Router) -> None:
    body = create(idle_router, type="image", priority=2, user="me", request_timeout_s=100)
    assert body["object"] == "job"
    assert (body["status"], body["type"], body["position"], body["progress"]) == ("queued", "image", 0, 0)
    assert (body["pipeline"], body["model"]) == (idle_router.pipe.name, idle_router.pipe.name)
    assert (body["priority"], body["user"]) == (2, "me")
    assert round(body["deadline"] - body["created_at"]) == 100
    assert body["stage"] == {"stage_id": 0, "name": "part0", "state": "queued"}
    assert [stage["state"] for stage in body["stages"]] == ["queued", "waiting"]
    assert (body["result"], body["error"], body["finished_at"]) == (None, None, None)
    lists = [name for name in idle_router.enqueued() if idle_router.pipe.stages[0].queue in name]
    assert len(lists) == 1
    [message] = idle_router.store.client.lrange(lists[0], 0, -1)  # type: ignore[misc]
    assert body["id"] in message
    assert PROMPT not in message


def test_a_finished_job_has_urls_times_and_resolved_parameters(router: Router) -> None:
    body = ended(router, create(router, n=2, seed=3)["id"])
    assert (body["status"], body["progress"], body["stage"], body["position"]) == ("succeeded", 1, None, None)
    assert body["error"] is None
    assert [entry["seed"] for entry in body["result"]["data"]] == [3, 4]
    for entry in body["result"]["data"]:
        assert "file" not in entry
        assert router.client.get(urlsplit(entry["url"]).path).status_code == 200
    for stage in body["stages"]:
        assert (stage["state"], stage["attempt"], stage["failures"], stage["worker"]) == ("done", 1, 0, "stub")
        assert stage["wait_s"] >= 0
        assert stage["run_s"] >= 0
    assert [stage["params"] for stage in body["stages"]] == [{"seed": 3}, {"steps": 4}]
    assert body["finished_at"] >= body["created_at"]


def test_a_failed_job_names_stage_reason_and_attempts(idle_router: Router) -> None:
    job_id = create(idle_router)["id"]
    with support.Workers(idle_router, support.failing("engine_error", "It broke.")):
        body = ended(idle_router, job_id)
    assert body["status"] == "failed"
    assert body["result"] is None
    assert body["error"] == {
        "stage": 0,
        "name": "part0",
        "code": "engine_error",
        "attempts": 1,
        "message": "Stage 0 (part0) failed after 1 attempt: It broke.",
    }


def test_positions_count_up_and_fall_one_by_one(idle_router: Router) -> None:
    ids = [create(idle_router)["id"] for _ in range(4)]
    assert [idle_router.job(job_id)["position"] for job_id in ids] == [0, 1, 2, 3]
    unit_support.claim(idle_router.store, idle_router.pipe, ids[0])
    assert [idle_router.job(job_id)["position"] for job_id in ids] == [None, 0, 1, 2]


def test_progress_counts_stages_done_and_steps(idle_router: Router) -> None:
    records, pipe = idle_router.store, idle_router.pipe
    job_id = create(idle_router)["id"]
    claim = unit_support.claim(records, pipe, job_id)
    seen = [idle_router.job(job_id)["progress"]]
    for done in (1, 2, 4):
        records.renew([(claim, (done, 4))], 5.0)
        seen.append(idle_router.job(job_id)["progress"])
    body = idle_router.job(job_id)
    assert (body["status"], body["stages"][0]["progress"]) == ("running", {"done": 4, "total": 4})
    support.succeed(support.Workers(idle_router), claim)
    seen.append(idle_router.job(job_id)["progress"])
    assert seen == [0, 0.125, 0.25, 0.495, 0.5]


def test_a_job_that_another_delete_forgot_meanwhile_is_deleted(
    idle_router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = idle_router.client.post("/v1/jobs", json={"prompt": "x"}).json["id"]
    records, cancel = idle_router.store, idle_router.store.cancel

    def cancel_and_forget(one: str) -> None:
        cancel(one)
        records.delete(one)

    monkeypatch.setattr(records, "cancel", cancel_and_forget)
    response = idle_router.client.delete(f"/v1/jobs/{job_id}")
    assert (response.status_code, response.json["deleted"]) == (200, True)
    error_of(idle_router.client.get(f"/v1/jobs/{job_id}"), 404)


def test_a_live_job_is_cancelled_and_a_finished_one_deleted_with_its_files(router: Router) -> None:
    body = ended(router, create(router, n=2)["id"])
    paths = [urlsplit(entry["url"]).path for entry in body["result"]["data"]]
    response = router.client.delete(f"/v1/jobs/{body['id']}")
    assert (response.status_code, response.json) == (200, {"id": body["id"], "object": "job.deleted", "deleted": True})
    assert {router.client.get(path).status_code for path in paths} == {404}
    assert error_of(router.client.get(f"/v1/jobs/{body['id']}"), 404)["code"] == "not_found"
    error_of(router.client.delete(f"/v1/jobs/{body['id']}"), 404)


def test_a_waiting_job_is_cancelled_at_once(idle_router: Router) -> None:
    job_id = create(idle_router)["id"]
    response = idle_router.client.delete(f"/v1/jobs/{job_id}")
    assert (response.status_code, response.json["status"]) == (202, "cancelled")
    assert idle_router.job(job_id)["error"]["code"] == "job_cancelled"
    assert idle_router.store.live(idle_router.pipe.name) == 0


def test_a_running_job_is_cancelling_until_its_worker_confirms(idle_router: Router) -> None:
    job_id = create(idle_router)["id"]
    claim = unit_support.claim(idle_router.store, idle_router.pipe, job_id)
    for _ in range(2):
        response = idle_router.client.delete(f"/v1/jobs/{job_id}")
        assert (response.status_code, response.json["status"]) == (202, "cancelling")
    idle_router.store.fail(claim, "stopped", "", retry=False)
    assert idle_router.job(job_id)["status"] == "cancelled"


def listed(router: Router, **query: Any) -> dict[str, Any]:
    response = router.client.get("/v1/jobs", query_string=query)
    assert response.status_code == 200, response.json
    body: dict[str, Any] = response.json
    assert body["object"] == "list"
    return body


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_hold_every_job_once_in_order(idle_router: Router, order: str) -> None:
    ids = [create(idle_router)["id"] for _ in range(7)]
    if order == "desc":
        ids.reverse()
    seen: list[str] = []
    query: dict[str, Any] = {"limit": 3, "order": order}
    for expected in (3, 3, 1):
        body = listed(idle_router, **query)
        page = [entry["id"] for entry in body["data"]]
        assert len(page) == expected
        assert (body["first_id"], body["last_id"], body["has_more"]) == (page[0], page[-1], expected == 3)
        seen += page
        query["after"] = page[-1]
    assert seen == ids
    assert listed(idle_router, after=ids[-1], order=order)["data"] == []


def test_an_empty_list_is_a_list(idle_router: Router) -> None:
    assert listed(idle_router) == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


def test_an_unknown_query_parameter_does_not_matter_since_proxies_add_them(idle_router: Router) -> None:
    job_id = create(idle_router)["id"]
    assert idle_router.client.get(f"/v1/jobs/{job_id}?model=x").json["id"] == job_id


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("limit", text) for text in ("0", "-1", "101", "x", "", "1.5", "٣", "1e1")],
        ("order", "up"),
        ("after", "nope"),
        ("limt", "1"),
    ],
)
def test_a_bad_page_is_refused_by_name(idle_router: Router, field: str, value: str) -> None:
    response = idle_router.client.get("/v1/jobs", query_string={field: value})
    assert error_of(response, 400)["param"] == field


def parsed(response: TestResponse) -> list[tuple[str, Any]]:
    """Name and data of every event; comments are ("", text)."""
    found = []
    for block in response.get_data(as_text=True).split("\n\n")[:-1]:
        if block.startswith(":"):
            found.append(("", block))
            continue
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_events_follow_a_job_to_one_terminal_event(idle_router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "POLL_S", 0.01)
    job_id = create(idle_router)["id"]
    with support.Workers(idle_router, support.slowly(0.05)):
        response = idle_router.client.get(f"/v1/jobs/{job_id}/events")
        found = parsed(response)
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert response.headers["X-Accel-Buffering"] == "no"
    assert {name for name, _ in found} == {"status"}
    states = [body["status"] for _, body in found]
    assert states[0] in ("queued", "running")
    assert states.count("succeeded") == 1
    assert states[-1] == "succeeded"
    assert found[-1][1]["result"]["data"][0]["url"].startswith("http://localhost/v1/files/")
    progress = [body["progress"] for _, body in found]
    assert progress == sorted(progress)
    assert all(first != second for first, second in itertools.pairwise(found))


def test_events_of_a_finished_job_are_one(router: Router) -> None:
    job_id = ended(router, create(router)["id"])["id"]
    [(name, body)] = parsed(router.client.get(f"/v1/jobs/{job_id}/events"))
    assert (name, body["id"], body["status"]) == ("status", job_id, "succeeded")


def test_progress_does_not_go_back_when_a_stage_starts_over(
    idle_router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "POLL_S", 0.01)
    records, pipe = idle_router.store, idle_router.pipe
    job_id = create(idle_router)["id"]
    claim = unit_support.claim(records, pipe, job_id)
    records.renew([(claim, (3, 4))], 5.0)

    def go_on() -> None:
        time.sleep(0.1)
        records.fail(claim, "worker_lost", "x", retry=True)
        time.sleep(0.1)
        again = unit_support.claim(records, pipe, job_id)
        records.renew([(again, (1, 4))], 5.0)
        time.sleep(0.1)
        records.fail(again, "engine_error", "x", retry=False)

    thread = threading.Thread(target=go_on)
    thread.start()
    found = parsed(idle_router.client.get(f"/v1/jobs/{job_id}/events"))
    thread.join()
    assert [body["stages"][0]["attempt"] for _, body in found][-1] == 2
    assert {body["progress"] for _, body in found} == {0.375}


def test_a_silent_job_keeps_the_stream_alive_and_shutdown_ends_it(
    idle_router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "POLL_S", 0.01)
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 0.05)
    job_id = create(idle_router)["id"]
    services = idle_router.application.extensions["omniqueue"]
    timer = threading.Timer(0.4, services.stopping.set)
    timer.start()
    found = parsed(idle_router.client.get(f"/v1/jobs/{job_id}/events"))
    assert found[0][0] == "status"
    assert 2 <= len(found) <= 10
    assert {data for _, data in found[1:-1]} == {": keep-alive"}
    assert (found[-1][0], found[-1][1]["error"]["code"]) == ("error", "not_ready")


def test_a_job_that_vanishes_ends_its_stream_with_an_error(
    idle_router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "POLL_S", 0.01)
    job_id = create(idle_router)["id"]
    monkeypatch.setattr(store.Store, "job", _vanishing(store.Store.job, after=4))
    found = parsed(idle_router.client.get(f"/v1/jobs/{job_id}/events"))
    assert found[-1][0] == "error"
    assert found[-1][1]["error"]["code"] == "not_found"


def _vanishing(real: Any, after: int) -> Any:
    calls: list[str] = []

    def job(self: store.Store, job_id: str) -> Any:
        calls.append(job_id)
        if len(calls) == after - 1:
            raise errors.BrokerUnavailable()
        return real(self, job_id) if len(calls) < after else None

    return job


def test_a_client_that_leaves_ends_the_stream(idle_router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "POLL_S", 0.01)
    job_id = create(idle_router)["id"]
    response = idle_router.client.get(f"/v1/jobs/{job_id}/events", buffered=False)
    chunks = iter(response.response)
    assert b"event: status" in next(chunks)  # type: ignore[operator]
    response.close()
    assert list(chunks) == []
    assert idle_router.job(job_id)["status"] == "queued"


def test_a_retry_with_the_same_key_is_the_same_job(router: Router) -> None:
    headers = {"Idempotency-Key": "one"}
    first = router.post("/v1/jobs", json={"prompt": PROMPT}, headers=headers)
    again = router.post("/v1/jobs", json={"prompt": PROMPT}, headers=headers)
    assert first.json["id"] == again.json["id"]
    assert (first.status_code, again.status_code) == (202, 202)
    assert router.store.counts(router.pipe.name)["accepted"] == 1
    error = error_of(router.post("/v1/jobs", json={"prompt": "other"}, headers=headers), 409)
    assert error["param"] == "Idempotency-Key"


def test_a_synchronous_retry_waits_for_the_first_ones_job(idle_router: Router) -> None:
    headers = {"Idempotency-Key": "two"}
    answers: list[TestResponse] = []

    def call() -> None:
        answers.append(
            idle_router.application.test_client().post(support.GENERATIONS, json={"prompt": PROMPT}, headers=headers)
        )

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    with support.Workers(idle_router) as workers:
        for thread in threads:
            thread.join()
        late = idle_router.post(headers=headers)
    assert {answer.status_code for answer in [*answers, late]} == {200}
    assert len({answer.headers["X-Omniqueue-Job-Id"] for answer in [*answers, late]}) == 1
    assert len({answer.get_data() for answer in [*answers, late]}) == 1
    assert len(workers.seen) == 1
    error_of(idle_router.post(json={"prompt": PROMPT, "n": 2}, headers=headers), 409)


def test_an_idempotency_key_holds_for_one_endpoint_only(router: Router) -> None:
    headers = {"Idempotency-Key": "three"}
    assert router.post(headers=headers).status_code == 200
    error_of(router.post("/v1/jobs", json={"prompt": PROMPT}, headers=headers), 409)


def test_exactly_the_excess_is_429_and_capacity_comes_back(valkey: str, tmp_path: Path) -> None:
    with support.running(valkey, tmp_path, support.pipeline(max_queue=3)) as router:
        answers = [router.post("/v1/jobs", json={"prompt": PROMPT}) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [202, 202, 202, 429, 429]
        error = error_of(answers[-1], 429)
        assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        assert 1 <= int(answers[-1].headers["Retry-After"]) <= 30
        assert error_of(router.post(), 429)
        with support.Workers(router):
            for answer in answers[:3]:
                ended(router, answer.json["id"])
            assert router.post().status_code == 200
        assert sum(":job:" in name for name in router.enqueued()) == 4


def test_retry_after_grows_with_the_queue_but_not_for_ever(valkey: str, tmp_path: Path) -> None:
    with support.running(valkey, tmp_path, support.pipeline(max_queue=1)) as router:
        job_id = create(router)["id"]
        for waited_s, expected in ((12, "12"), (4000, "30")):
            unit_support.earlier(router.store, router.pipe, job_id, 0, waited_s)
            answer = router.post()
            assert answer.headers["Retry-After"] == expected
            assert "X-Omniqueue-Job-Id" not in answer.headers  # there is none


def test_a_stream_outlives_an_absence_of_redis(idle_router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "POLL_S", 0.01)
    job_id = create(idle_router)["id"]
    away = iter([False, True, True, True, True, False])
    position = store.Store.position

    def sometimes(self: store.Store, queue: str, wanted: str) -> int | None:
        if next(away, False):
            raise errors.BrokerUnavailable()
        return position(self, queue, wanted)

    monkeypatch.setattr(store.Store, "position", sometimes)
    response = idle_router.client.get(f"/v1/jobs/{job_id}/events", buffered=False)
    chunks = iter(response.response)
    assert next(chunks).startswith(b"event: status")  # type: ignore[union-attr]
    idle_router.store.cancel(job_id)
    found = b"".join(chunks).decode()  # type: ignore[arg-type]
    assert found.count("event: status") == 1
    assert '"status":"cancelled"' in found
    assert "event: error" not in found


@pytest.mark.parametrize("error", [errors.NotReady("Why."), RuntimeError("secret")])
def test_a_stream_that_breaks_says_so_once(
    idle_router: Router, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(events, "POLL_S", 0.01)
    job_id = create(idle_router)["id"]
    job = store.Store.job
    asked: list[str] = []

    def breaks(self: store.Store, wanted: str) -> Any:
        asked.append(wanted)
        if len(asked) > 3:
            raise error
        return job(self, wanted)

    monkeypatch.setattr(store.Store, "job", breaks)
    found = parsed(idle_router.client.get(f"/v1/jobs/{job_id}/events"))
    assert [name for name, _ in found] == ["status", "error"]
    assert found[-1][1]["error"]["message"] in ("Why.", "The router failed; its log has the details.")
