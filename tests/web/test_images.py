"""POST /v1/images/generations from end to end, but for the engines."""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from PIL import Image

from omniqueue import calls, errors, media, store
from tests.web import support
from tests.web.support import GENERATIONS, PROMPT, Router, error_of


def decoded(text: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(text)))


def test_the_default_answer_holds_the_picture_itself(router: Router) -> None:
    response = router.post()
    assert response.status_code == 200
    body = response.json
    assert set(body) == {"created", "data", "size", "output_format", "model"}
    assert (body["size"], body["output_format"], body["model"]) == ("64x32", "png", router.pipe.name)
    assert isinstance(body["created"], int)
    [entry] = body["data"]
    assert entry["revised_prompt"] is None
    assert decoded(entry["b64_json"]).size == (64, 32)
    assert router.job(response.headers["X-Omniqueue-Job-Id"])["status"] == "succeeded"


def test_a_url_is_absolute_and_leads_to_the_picture(router: Router) -> None:
    body = router.post(json={"prompt": PROMPT, "response_format": "url", "size": "96x48"}).json
    url = body["data"][0]["url"]
    assert url.startswith("http://localhost/v1/files/")
    file = router.client.get(urlsplit(url).path)
    assert file.status_code == 200
    assert file.content_type == "image/png"
    assert file.headers.getlist("X-Content-Type-Options") == ["nosniff"]
    assert "immutable" in file.headers["Cache-Control"]
    assert file.content_length == len(file.data)
    assert Image.open(io.BytesIO(file.data)).size == (96, 48)


def test_a_public_place_for_media_is_what_urls_name(valkey: str, tmp_path: Path) -> None:
    where = "https://media.example/pictures/"
    with support.running(valkey, tmp_path, support.pipeline(), media_http_url=where) as router, support.Workers(router):
        url = router.post(json={"prompt": PROMPT, "response_format": "url"}).json["data"][0]["url"]
        assert url.startswith("https://media.example/pictures/")
        assert "//" not in url.removeprefix("https://")


@pytest.mark.parametrize(("name", "kind"), [("png", "PNG"), ("jpeg", "JPEG"), ("webp", "WEBP")])
def test_every_output_format_is_what_comes_back(router: Router, name: str, kind: str) -> None:
    body = router.post(json={"prompt": PROMPT, "output_format": name}).json
    assert body["output_format"] == name
    assert decoded(body["data"][0]["b64_json"]).format == kind


def test_n_pictures_have_seeds_that_count_up(router: Router) -> None:
    body = router.post(json={"prompt": PROMPT, "n": 3, "seed": 7}).json
    assert [entry["seed"] for entry in body["data"]] == [7, 8, 9]
    assert len({entry["b64_json"] for entry in body["data"]}) == 3


def test_a_drawn_seed_is_told_and_makes_the_request_repeatable(router: Router) -> None:
    first = router.post().json["data"][0]["seed"]
    assert router.post().json["data"][0]["seed"] != first
    assert router.post(json={"prompt": PROMPT, "seed": first}).json["data"][0]["seed"] == first


@pytest.mark.parametrize(
    "fields",
    [
        {"size": "auto"},
        {"size": None, "seed": None, "negative_prompt": None, "num_inference_steps": None, "guidance_scale": None},
        {"n": None, "output_format": None, "response_format": None, "output_compression": None, "priority": None},
        {"negative_prompt": ""},
        {"guidance_scale": 0},
        {"guidance_scale": 20},
        {"guidance_scale": 4.5},
        {"num_inference_steps": 1},
        {"num_inference_steps": 50},
        {"seed": 0},
        {"seed": 2**63 - 1 - 1024},
        {"n": 10},
        {"user": "somebody"},
        {"quality": "auto", "background": "opaque", "moderation": "low", "stream": False, "partial_images": 0},
        {"style": None, "quality": None, "stream": None},
        {"priority": 9, "request_timeout_s": 30},
        {"output_format": "webp", "output_compression": 0},
        {"output_format": "png", "output_compression": 100},
        {"prompt": "ein Apfel, 红苹果, تفاحة, 🍎"},
        {"prompt": " padded "},
        {"prompt": "😀" * 10_000},
    ],
)
def test_these_are_served(router: Router, fields: dict[str, Any]) -> None:
    response = router.post(json={"prompt": PROMPT, **fields})
    assert response.status_code == 200, response.json


def test_what_was_asked_reaches_the_stages_and_nothing_else_does(router: Router) -> None:
    fields = {
        "prompt": " as it is ",
        "negative_prompt": "no",
        "n": 2,
        "size": "32x48",
        "seed": 5,
        "num_inference_steps": 3,
        "guidance_scale": 2,
        "output_format": "jpeg",
        "output_compression": 80,
        "user": "u",
    }
    response = router.post(json={**fields, "response_format": "url", "priority": 4, "request_timeout_s": 20})
    record = router.store.job(response.headers["X-Omniqueue-Job-Id"])
    assert record is not None
    del fields["size"]
    assert record.request == {**fields, "kind": "image", "width": 32, "height": 48, "model": router.pipe.name}
    assert record.priority == 4
    assert round(record.deadline - record.created_at) == 20


def test_fast_answers_find_somebody_waiting(router: Router) -> None:
    with ThreadPoolExecutor(16) as pool:
        calls = [
            pool.submit(router.application.test_client().post, GENERATIONS, json={"prompt": "x"}) for _ in range(200)
        ]
        assert {call.result().status_code for call in calls} == {200}


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("engine_rejected", 400, "invalid_request_error"),
        ("no_room", 507, "insufficient_storage"),
        ("engine_error", 500, "server_error"),
        ("worker_lost", 500, "server_error"),
    ],
)
def test_a_failed_job_says_which_stage_why_and_after_how_many_attempts(
    idle_router: Router, code: str, status: int, kind: str
) -> None:
    with support.Workers(idle_router, support.failing(code, "The reason.")):
        response = idle_router.post()
    error = error_of(response, status)
    assert error["message"] == "Stage 0 (part0) failed after 1 attempt: The reason."
    assert (error["code"], error["type"]) == (code, kind)
    assert idle_router.job(response.headers["X-Omniqueue-Job-Id"])["error"]["code"] == code


def test_an_engines_refusal_names_the_field(idle_router: Router) -> None:
    def refuse(workers: support.Workers, claim: store.Claim) -> None:
        workers.router.store.fail(claim, "engine_rejected", "Too long.", retry=False, param="prompt")

    with support.Workers(idle_router, refuse):
        response = idle_router.post()
    assert error_of(response, 400)["param"] == "prompt"
    assert idle_router.job(response.headers["X-Omniqueue-Job-Id"])["error"]["param"] == "prompt"


def test_a_job_past_its_deadline_is_504_within_a_second(idle_router: Router) -> None:
    with support.Workers(idle_router, support.holding):
        response = idle_router.post(json={"prompt": PROMPT, "request_timeout_s": 0.4})
    error = error_of(response, 504)
    assert (error["code"], error["type"]) == ("deadline_exceeded", "timeout_error")
    assert "0.4 s" in error["message"]
    assert "part0" in error["message"]


def test_a_cancelled_job_ends_the_wait(idle_router: Router) -> None:
    def cancel(workers: support.Workers, claim: store.Claim) -> None:
        idle_router.store.cancel(claim.job_id)
        idle_router.store.fail(claim, "stopped", "", retry=False)

    with support.Workers(idle_router, cancel):
        assert error_of(idle_router.post(), 409)["code"] == "job_cancelled"


def test_a_picture_that_the_router_cannot_see_is_a_fault_of_the_deployment(idle_router: Router) -> None:
    def elsewhere(workers: support.Workers, claim: store.Claim) -> None:
        if claim.stage_id == 0:
            support.succeed(workers, claim)
            return
        stored = {"file": media.file_name(claim.job_id, claim.attempt, 0, "png"), "width": 64, "height": 64}
        idle_router.store.finish(claim, None, {}, {"kind": "image", "data": [stored]})

    with support.Workers(idle_router, elsewhere):
        response = idle_router.post()
        url = idle_router.post(json={"prompt": PROMPT, "response_format": "url"})
    assert "OMNIQUEUE_MEDIA_FS_URL" in error_of(response, 500)["message"]
    assert url.status_code == 200


def test_a_pipeline_that_makes_no_pictures_refuses_them(valkey: str, tmp_path: Path) -> None:
    pipe = support.pipeline()
    texts = tuple(
        stage if stage.stage_id == 0 else type(stage)(**{**vars(stage), "final_output_type": "text"})
        for stage in pipe.stages
    )
    with support.running(valkey, tmp_path, type(pipe)(**{**vars(pipe), "stages": texts})) as router:
        assert error_of(router.post(), 400)["param"] == "model"
        assert not router.enqueued()


def test_a_crash_of_the_router_is_logged_and_its_body_tells_nothing(
    idle_router: Router, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def crash(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(calls, "submit", crash)
    error = error_of(idle_router.post(), 500)
    assert "secret" not in error["message"]
    assert "secret detail" in caplog.text
    assert "Traceback" in caplog.text


def test_every_error_of_ours_has_openais_shape(idle_router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.OmniqueueError)
    ]
    assert len(kinds) > 15
    for kind in kinds:

        def fail(*_: Any, error: type[errors.OmniqueueError] = kind, **__: Any) -> None:
            raise error("What happened.", param="there")

        monkeypatch.setattr(calls, "submit", fail)
        if kind is not errors.QueueFull:
            assert error_of(idle_router.post(), kind.status)["param"] == "there"
