"""Liveness, readiness, queues, models and files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from omniqueue import catalog, media, settings, store
from tests.web import support
from tests.web.support import Router, error_of
from web import app


def test_the_router_is_alive_whatever_redis_does(idle_router: Router) -> None:
    response = idle_router.client.get("/health")
    assert (response.status_code, response.json) == (200, {"status": "ok"})


def test_ready_says_which_stage_has_no_worker_and_how_to_start_one(idle_router: Router) -> None:
    support.announce(idle_router.store, idle_router.pipe, 0)
    response = idle_router.client.get("/ready")
    assert response.status_code == 503
    queue = idle_router.pipe.stages[1].queue
    [reason] = response.json["reasons"]
    assert f"Stage 1 (part1) has no worker; start one with: celery -A omniqueue worker -Q {queue}." in reason
    assert response.json["error"]["code"] == "not_ready"
    [pipe] = response.json["pipelines"]
    assert [stage["ready"] for stage in pipe["stages"]] == [True, False]
    assert pipe["stages"][0]["replicas"][0]["worker"].startswith(idle_router.pipe.stages[0].queue)


def test_ready_is_200_with_a_replica_of_every_stage(idle_router: Router) -> None:
    for stage_id in (0, 1):
        support.announce(idle_router.store, idle_router.pipe, stage_id)
    support.announce(idle_router.store, idle_router.pipe, 1, worker="second")
    response = idle_router.client.get("/ready")
    assert (response.status_code, response.json["status"], response.json["reasons"]) == (200, "ready", [])
    assert [stage["ready_replicas"] for stage in response.json["pipelines"][0]["stages"]] == [1, 2]


@pytest.mark.parametrize(("phase", "detail"), [("loading", "weights"), ("refused", "no such file")])
def test_a_worker_that_is_not_ready_does_not_count_and_is_named(idle_router: Router, phase: str, detail: str) -> None:
    support.announce(idle_router.store, idle_router.pipe, 0, worker="w0")
    support.announce(idle_router.store, idle_router.pipe, 1, worker="w1", phase=phase, detail=detail)
    response = idle_router.client.get("/ready")
    assert response.status_code == 503
    assert f"w1 is {phase} ({detail})" in response.json["error"]["message"]


def test_a_draining_worker_does_not_count(idle_router: Router) -> None:
    support.announce(idle_router.store, idle_router.pipe, 0, phase="draining")
    response = idle_router.client.get("/ready")
    assert "Stage 0 (part0) has no ready worker: all of them are shutting down." in " ".join(response.json["reasons"])


def test_a_worker_with_another_topology_is_named_even_when_others_are_ready(idle_router: Router) -> None:
    for stage_id in (0, 1):
        support.announce(idle_router.store, idle_router.pipe, stage_id)
    support.announce(idle_router.store, idle_router.pipe, 1, worker="w9", fingerprint="other", pipeline="elsewhere")
    response = idle_router.client.get("/ready")
    assert response.status_code == 200
    assert "w9 serves another topology than the router (elsewhere other there" in response.json["reasons"][0]


def test_only_a_worker_with_another_topology_is_none(idle_router: Router) -> None:
    support.announce(idle_router.store, idle_router.pipe, 0)
    support.announce(idle_router.store, idle_router.pipe, 1, worker="w9", fingerprint="other")
    response = idle_router.client.get("/ready")
    assert response.status_code == 503
    assert "w9" in response.json["error"]["message"]


def test_work_is_accepted_while_a_stage_has_no_worker(idle_router: Router) -> None:
    assert idle_router.client.get("/ready").status_code == 503
    assert idle_router.post("/v1/jobs").status_code == 202


def test_queues_tell_what_waits_what_runs_and_who_serves(idle_router: Router) -> None:
    for _ in range(3):
        idle_router.post("/v1/jobs")
    support.announce(idle_router.store, idle_router.pipe, 0, running=2, concurrency=8)
    support.announce(idle_router.store, idle_router.pipe, 0, worker="w2", running=1, phase="draining")
    first, second = idle_router.client.get("/v1/queues").json["data"]
    assert first["oldest_wait_s"] >= 0
    del first["oldest_wait_s"], second["oldest_wait_s"]
    stages, name = idle_router.pipe.stages, idle_router.pipe.name
    same = {"object": "queue", "pipeline": name}
    assert first == {
        **same,
        "queue": stages[0].queue,
        "stage_id": 0,
        "name": "part0",
        "waiting": 3,
        "running": 3,
        "replicas": 1,
        "capacity": 8,
    }
    assert second == {
        **same,
        "queue": stages[1].queue,
        "stage_id": 1,
        "name": "part1",
        "waiting": 0,
        "running": 0,
        "replicas": 0,
        "capacity": 0,
    }


def test_models_are_listed_and_found_also_with_a_slash(valkey: str, tmp_path: Path) -> None:
    pipe = dataclasses.replace(support.pipeline(), served_model_names=("zai-org/GLM-Image", "glm"))
    with support.running(valkey, tmp_path, pipe) as router:
        listed = router.client.get("/v1/models").json
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["zai-org/GLM-Image", "glm"]
        for model in listed["data"]:
            assert router.client.get(f"/v1/models/{model['id']}").json == model
            assert (model["object"], model["owned_by"], model["output_types"]) == ("model", "omniqueue", ["image"])
            assert isinstance(model["created"], int)


def test_two_pipelines_are_told_apart_by_model(valkey: str, tmp_path: Path) -> None:
    one, two = support.pipeline(), support.pipeline()
    config = settings.Settings(
        redis_url=valkey, namespace=f"web-{one.name}", media_fs_url=f"file://{tmp_path}", shm_dir=str(tmp_path)
    )
    application = app.create_app(config, catalog.Catalog((one, two)))
    client: Any = application.test_client()
    try:
        made = [client.post("/v1/jobs", json={"prompt": "x", "model": m}).json for m in (two.name, one.name, None)]
        assert [body["pipeline"] for body in made] == [two.name, one.name, one.name]
        listed = client.get("/v1/jobs?order=asc").json["data"]
        assert [entry["id"] for entry in listed] == [entry["id"] for entry in made]
        page = client.get(f"/v1/jobs?order=asc&after={made[0]['id']}").json["data"]
        assert [entry["id"] for entry in page] == [entry["id"] for entry in made[1:]]
        assert {pipe["pipeline"] for pipe in client.get("/ready").json["pipelines"]} == {one.name, two.name}
    finally:
        application.extensions["omniqueue"].stop()


NAME = media.file_name(store.new_id(), 1, 0, "png")


@pytest.mark.parametrize(
    "path",
    [
        NAME,
        "../secret.png",
        "..%2fsecret.png",
        "%2e%2e/secret.png",
        "%2e%2e%2fsecret.png",
        "..%5csecret.png",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        f"../{NAME}",
        f"..%2f{NAME}",
        f"{NAME}%00",
        f"{NAME}%0a",
        f"{NAME}/",
        f"{NAME}.part",
        NAME.upper(),
        "file:%2f%2f%2fetc%2fpasswd",
        "",
        ".",
        "..",
        "a" * 4000,
    ],
)
def test_a_path_trick_is_404(idle_router: Router, tmp_path: Path, path: str) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    response = idle_router.client.get(f"/v1/files/{path}")
    error_of(response, 404)
    assert b"secret.png" not in (tmp_path / "secret.png").read_bytes()


def test_head_of_a_file_has_its_size_and_no_body(idle_router: Router) -> None:
    idle_router.media.write(NAME, b"x" * 700_000)
    response = idle_router.client.head(f"/v1/files/{NAME}")
    assert (response.status_code, response.content_length, response.data) == (200, 700_000, b"")
    assert idle_router.client.get(f"/v1/files/{NAME}").data == b"x" * 700_000


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [
        ("bytes=0-9", 0, 10),
        ("bytes=699990-", 699_990, 700_000),
        ("bytes=5-9999999", 5, 700_000),
        ("bytes=-7", 699_993, 700_000),
        ("bytes=-9999999", 0, 700_000),
        ("bytes=100-599999", 100, 600_000),
    ],
)
def test_a_part_of_a_file_can_be_had(idle_router: Router, asked: str, start: int, end: int) -> None:
    content = bytes(range(250)) * 2800
    idle_router.media.write(NAME, content)
    response = idle_router.client.get(f"/v1/files/{NAME}", headers={"Range": asked})
    assert (response.status_code, response.content_length) == (206, end - start)
    assert response.headers["Content-Range"] == f"bytes {start}-{end - 1}/700000"
    assert response.data == content[start:end]


@pytest.mark.parametrize(
    "headers",
    [
        {"Range": "bytes=9-5"},
        {"Range": "bytes=0-1,4-5"},
        {"Range": "lines=0-1"},
        {"Range": "bytes=\u0663-"},
        {"Range": ""},
        {"Range": "bytes=0-1", "If-Range": '"v"'},
    ],
)
def test_what_is_no_part_is_answered_with_the_whole(idle_router: Router, headers: dict[str, str]) -> None:
    idle_router.media.write(NAME, b"x" * 100)
    response = idle_router.client.get(f"/v1/files/{NAME}", headers=headers)
    assert (response.status_code, response.data) == (200, b"x" * 100)
    assert response.headers["Accept-Ranges"] == "bytes"


def test_a_part_behind_the_end_is_416(idle_router: Router) -> None:
    idle_router.media.write(NAME, b"x" * 100)
    response = idle_router.client.get(f"/v1/files/{NAME}", headers={"Range": "bytes=100-"})
    assert error_of(response, 416)["param"] == "Range"
