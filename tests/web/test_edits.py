"""POST /v1/images/edits: pictures in, pictures out, and nothing of them in Redis or Celery."""

from __future__ import annotations

import base64
import dataclasses
import io
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from omniqueue import params, payloads, remote, store
from tests.unit.test_pictures import BAD, bomb, encoded
from tests.unit.test_remote import PRIVATE, Canary
from tests.web import live, support
from tests.web.support import PROMPT, Router, error_of
from web import services

EDITS = "/v1/images/edits"
PNG = encoded("RGB", (64, 32))

File = tuple[Any, ...]


def file(content: bytes = PNG, name: str = "a.png", kind: str = "image/png") -> File:
    return io.BytesIO(content), name, kind


@pytest.fixture
def editing(valkey: str, tmp_path: Path) -> Iterator[Router]:
    pipe = dataclasses.replace(support.pipeline(), max_images=4, extra_fields=params.EXTRA_FIELDS)
    with support.running(valkey, tmp_path, pipe) as router:
        yield router


class Seen(support.Workers):
    """Workers that keep what the last stage was given."""

    def __init__(self, router: Router) -> None:
        super().__init__(router, self.look)
        self.requests: list[dict[str, Any]] = []
        self.inputs: list[dict[str, tuple[tuple[int, ...], bytes]]] = []

    def __enter__(self) -> Seen:
        super().__enter__()
        return self

    def look(self, workers: support.Workers, claim: store.Claim) -> None:
        if claim.stage_id == 1:
            self.requests.append(dict(claim.request))
            assert claim.input_reference is not None
            with services.of(self.router.application).payloads.open(claim.input_reference) as payload:
                tensors = payload.items[0].tensors
                self.inputs.append({name: (t.shape, bytes(t.buffer)) for name, t in tensors.items()})
        support.succeed(workers, claim)


def edit(router: Router, **fields: Any) -> Any:
    given = {"prompt": PROMPT, "image": file(), **fields}
    data = {name: value for name, value in given.items() if value is not None}
    return router.client.post(EDITS, data=data, content_type="multipart/form-data")


def leftovers(router: Router) -> list[str]:
    return services.of(router.application).payloads.names()


def test_a_picture_and_a_prompt_become_a_picture(editing: Router) -> None:
    with Seen(editing) as seen:
        response = edit(editing, seed="7", n="2")
    assert response.status_code == 200, response.json
    assert [entry["seed"] for entry in response.json["data"]] == [7, 8]
    assert response.json["size"] == "64x32"
    picture = Image.open(io.BytesIO(base64.b64decode(response.json["data"][0]["b64_json"])))
    assert picture.size == (64, 32)
    assert seen.inputs == [{"image.0": ((32, 64, 3), bytes((10, 20, 30)) * 2048)}]
    assert (seen.requests[0]["images"], seen.requests[0]["kind"]) == (1, "image")


@pytest.mark.parametrize("name", ["image", "image[]"])
def test_several_references_keep_their_order(editing: Router, name: str) -> None:
    given = [file(encoded("L", (16 * side, 16))) for side in (4, 1, 2)]
    with Seen(editing) as seen:
        assert edit(editing, **{"image": None, name: given}).status_code == 200
    assert [seen.inputs[0][f"image.{index}"][0] for index in range(3)] == [(16, 64, 1), (16, 16, 1), (16, 32, 1)]


@pytest.mark.parametrize("name", ["mask", "mask_image"])
def test_a_mask_and_a_reference_reach_the_stage(editing: Router, name: str) -> None:
    more = {name: file(encoded("RGBA", (64, 32))), "reference_image": file(encoded("L", (8, 8), "WEBP"))}
    with Seen(editing) as seen:
        assert edit(editing, **more).status_code == 200
    assert seen.inputs[0]["mask"][0] == (32, 64, 4)
    assert seen.inputs[0]["reference_image"][0] == (8, 8, 3)
    assert seen.requests[0]["mask"] is True


def test_a_data_url_is_a_picture_too(editing: Router) -> None:
    url = "data:image/png;base64," + base64.b64encode(PNG).decode()
    with Seen(editing) as seen:
        assert edit(editing, image=None, url=url).status_code == 200
        assert edit(editing, image=file(encoded("L", (16, 16))), **{"url[]": [url, url]}).status_code == 200
    assert seen.inputs[0]["image.0"][0] == (32, 64, 3)
    assert sorted(seen.inputs[1]) == ["image.0", "image.1", "image.2"]


def test_what_was_asked_reaches_the_stages(editing: Router) -> None:
    fields = {
        "negative_prompt": "no", "n": 2, "size": "32x48", "seed": 5, "num_inference_steps": 3, "guidance_scale": 2.5,
        "guidance_scale_2": 1.5, "true_cfg_scale": 4.0, "flow_shift": 3.0, "strength": 0.5, "output_format": "jpeg",
        "output_compression": 80, "user": "u", "return_stage_metrics": True, "response_format": "url", "stream": False,
    }  # fmt: skip
    with Seen(editing) as seen:
        response = edit(editing, **{name: str(value) for name, value in fields.items()})
    assert response.status_code == 200, response.json
    assert response.json["metrics"]["stage_durations"].keys() == {"part0", "part1"}
    assert response.json["data"][0]["url"].startswith("http://localhost/v1/files/")
    for name in ("size", "return_stage_metrics", "response_format", "stream"):
        del fields[name]
    expected = {**fields, "prompt": PROMPT, "kind": "image", "width": 32, "height": 48, "images": 1}
    assert seen.requests[0] == {**expected, "model": editing.pipe.name}
    # And from the job into the parameters of the diffusion stage.
    made = params.stage_params(seen.requests[0], editing.pipe.stages[1], 1)
    assert made == {
        "width": 32, "height": 48, "num_inference_steps": 3, "guidance_scale": 2.5, "guidance_scale_2": 1.5,
        "true_cfg_scale": 4.0, "strength": 0.5, "extra_args": {"flow_shift": 3.0}, "seed": 6,
    }  # fmt: skip


def test_pictures_lie_in_the_payload_store_and_nowhere_else(editing: Router) -> None:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(edit(editing, image=file(encoded("RGB", (512, 512))))))
    thread.start()
    deadline = time.monotonic() + 20
    while not (jobs := editing.store.jobs(editing.pipe.name, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    [name] = leftovers(editing)
    assert name.endswith(f"_{jobs[0].id}_in_0")
    assert os.stat(services.of(editing.application).payloads.directory / name).st_size > 512 * 512 * 3
    for key in editing.store.client.scan_iter(f"{editing.store.namespace}:*", count=1000):
        assert int(editing.store.client.memory_usage(key, samples=0) or 0) < 20_000, key  # type: ignore[arg-type]
    with Seen(editing):
        thread.join(20)
    assert answers[0].status_code == 200


def test_a_retry_with_the_same_key_gets_the_same_job_and_leaves_no_second_copy(editing: Router) -> None:
    headers = {"Idempotency-Key": "k"}
    ids = []
    with Seen(editing):
        for _ in range(2):
            data = {"prompt": PROMPT, "image": file()}
            response = editing.client.post(EDITS, data=data, content_type="multipart/form-data", headers=headers)
            assert response.status_code == 200
            ids.append(response.headers["X-Omniqueue-Job-Id"])
        data = {"prompt": PROMPT, "image": file(encoded("RGB", (32, 32)))}
        other = editing.client.post(EDITS, data=data, content_type="multipart/form-data", headers=headers)
        error_of(other, 409)
    assert ids[0] == ids[1]
    assert {name.split("_")[2] for name in leftovers(editing)} <= {ids[0]}


def test_a_full_queue_leaves_no_picture_behind(valkey: str, tmp_path: Path) -> None:
    pipe = dataclasses.replace(support.pipeline(), max_images=1, max_queue=1)
    with support.running(valkey, tmp_path, pipe) as router:
        assert router.post("/v1/jobs").status_code == 202
        error_of(edit(router), 429)
        assert not leftovers(router)


def test_a_full_payload_store_is_507(editing: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads.PayloadStore, "free_bytes", lambda self: 1000)
    assert error_of(edit(editing), 507)["code"] == "no_room"
    assert not editing.enqueued()


def test_an_allowed_url_is_fetched_by_the_router(valkey: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = Canary(lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + PNG))
    monkeypatch.setattr(remote, "PORTS", {"http": canary.port, "https": canary.port})
    pipe = dataclasses.replace(support.pipeline(), max_images=4)
    try:
        with support.running(valkey, tmp_path, pipe, allow_remote_media=("localhost",)) as router, Seen(router) as seen:
            url = f"http://localhost:{canary.port}/x.png"
            assert error_of(edit(router, image=None, url=url), 400)["param"] == "url"
            assert canary.connections == 0
            monkeypatch.setattr(remote, "is_public", lambda address: True)
            assert edit(router, image=None, url=url).status_code == 200
            assert seen.inputs[0]["image.0"][0] == (32, 64, 3)
            error_of(edit(router, image=None, url="http://other.example/x.png"), 400)
            assert canary.connections == 1
    finally:
        canary.stop()


def test_a_canary_hears_nothing_of_a_private_url(valkey: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = Canary()
    monkeypatch.setattr(remote, "PORTS", {"http": canary.port, "https": canary.port})
    pipe = dataclasses.replace(support.pipeline(), max_images=4)
    try:
        with support.running(valkey, tmp_path, pipe, allow_remote_media=("*",)) as router:
            for host in PRIVATE:
                response = edit(router, image=None, url=f"http://{host}:{canary.port}/x.png")
                assert response.status_code in (400, 424), host
                assert not router.enqueued()
        assert canary.connections == 0
    finally:
        canary.stop()


def test_a_finished_edit_leaves_no_picture_in_shared_memory(valkey: str, tmp_path: Path) -> None:
    with live.running(valkey, tmp_path, live.shipped("fake_image", delay_s=0, steps=1)) as running:
        data = {"prompt": PROMPT, "image": file()}
        assert running.post(EDITS, data=data, content_type="multipart/form-data").status_code == 200
        live.eventually(lambda: not running.services.payloads.names())


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.fixture
def refusing(editing: Router) -> Iterator[Router]:
    yield editing
    assert not editing.enqueued()
    assert not leftovers(editing)


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("param", ["image", "mask", "reference_image"])
def test_what_is_no_whole_picture_is_refused(refusing: Router, what: str, param: str) -> None:
    error = error_of(edit(refusing, **{param: file(BAD[what])}), 400)
    assert (error["param"], error["code"]) == (param, "invalid_image")


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"image": None}, "image"),
    ({"image": [file() for _ in range(5)]}, "image"),
    ({"image": "a text"}, "image"),
    ({"image": "/etc/passwd"}, "image"),
    ({"image[]": file()}, "image[]"),
    ({"mask": "data:image/png;base64,AAAA"}, "mask"),
    ({"mask": [file(), file()]}, "mask"),
    ({"mask": file(), "mask_image": file()}, "mask_image"),
    ({"mask": file(encoded("L", (32, 64)))}, "mask"),
    ({"image": file(encoded("RGB", (65, 32)))}, "size"),
    ({"image": file(encoded("RGB", (1040, 16)))}, "size"),
    ({"image": [file(bomb(4096, 4000)), file(bomb(4096, 4000))], "size": "64x64"}, "image"),
    ({"prompt": None}, "prompt"),
    ({"prompt": file(b"text")}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": "\0"}, "prompt"),
    ({"n": "２"}, "n"),
    ({"n": " 2"}, "n"),
    ({"n": "2.5"}, "n"),
    ({"n": "0"}, "n"),
    ({"n": "11"}, "n"),
    ({"n": ""}, "n"),
    ({"n": ["1", "1"]}, "n"),
    ({"seed": "-1"}, "seed"),
    ({"seed": "9" * 400}, "seed"),
    ({"guidance_scale": "nan"}, "guidance_scale"),
    ({"guidance_scale": "inf"}, "guidance_scale"),
    ({"guidance_scale": "1e999"}, "guidance_scale"),
    ({"strength": "1.1"}, "strength"),
    ({"strength": "nan"}, "strength"),
    ({"num_inference_steps": "51"}, "num_inference_steps"),
    ({"stream": "true"}, "stream"),
    ({"stream": "maybe"}, "stream"),
    ({"size": "64X64"}, "size"),
    ({"response_format": "file"}, "response_format"),
    ({"output_format": "gif"}, "output_format"),
    ({"input_fidelity": "high"}, "input_fidelity"),
    ({"lora": "{}"}, "lora"),
    ({"layers": "2"}, "layers"),
    ({"promt": "x"}, "promt"),
    ({"a": file()}, "a"),
    ({"url": "http://127.0.0.1/x.png"}, "url"),
    ({"url": "file:///etc/passwd"}, "url"),
    ({"url": "data:image/png;base64,AAAA"}, "url"),
    ({"url": "x", "url[]": "y"}, "url[]"),
]


@pytest.mark.parametrize(("fields", "param"), FIELDS, ids=lambda value: repr(value)[:50])
def test_a_bad_field_is_refused_by_name(refusing: Router, fields: dict[str, Any], param: str) -> None:
    fresh = {name: _again(value) for name, value in fields.items()}
    error = error_of(edit(refusing, **fresh), 400)
    assert error["param"] == param
    assert param in error["message"]


def _again(value: Any) -> Any:
    """The test client closes the files that it sends."""
    if isinstance(value, list):
        return [_again(entry) for entry in value]
    return (io.BytesIO(value[0].getvalue()), *value[1:]) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{}", "application/json", 415),
        (b"prompt=x", "application/x-www-form-urlencoded", 415),
        (b"x", None, 415),
        (b"x", "multipart/form-data", 400),
        (b"", "multipart/form-data; boundary=b", 400),
        (b"nothing", "multipart/form-data; boundary=b", 400),
        (b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nx', "multipart/form-data; boundary=b", 400),
        (b"--b\r\n\r\nx\r\n--b--\r\n", "multipart/form-data; boundary=b", 400),
        (b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n", "multipart/form-data; boundary=b", 400),
        (b"--b--\r\n", "multipart/form-data; boundary=b", 400),
        (
            b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n\xff\xfe\r\n--b--\r\n',
            "multipart/form-data; boundary=b",
            400,
        ),
        (
            b'--b\r\nContent-Disposition: form-data; filename="x"\r\n\r\nx\r\n--b--\r\n',
            "multipart/form-data; boundary=b",
            400,
        ),
        (b"x", "multipart/form-data; boundary=" + "b" * 5000, 400),
        (b"x", "multipart/form-data; boundary=\xfc", 400),
        (
            b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n' + b"x" * 600_000 + b"\r\n--b--\r\n",
            "multipart/form-data; boundary=b",
            413,
        ),
        (
            b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n' * 200 + b"--b--\r\n",
            "multipart/form-data; boundary=b",
            413,
        ),
    ],
)
def test_what_is_no_form_is_refused(refusing: Router, content: bytes, kind: str | None, status: int) -> None:
    error_of(refusing.client.post(EDITS, data=content, content_type=kind), status)


def test_a_body_above_the_limit_is_413(valkey: str, tmp_path: Path) -> None:
    pipe = dataclasses.replace(support.pipeline(), max_images=1)
    with support.running(valkey, tmp_path, pipe, max_upload_bytes=1 << 16) as router:
        assert error_of(edit(router, image=file(b"x" * 70_000)), 413)["code"] == "request_too_large"
        assert not router.enqueued()


@pytest.mark.parametrize("name", params.EXTRA_FIELDS)
def test_a_field_that_the_model_does_not_honour_is_refused(valkey: str, tmp_path: Path, name: str) -> None:
    value = file() if name in ("mask", "reference_image") else "0.5"
    pipe = dataclasses.replace(support.pipeline(), max_images=1)
    with support.running(valkey, tmp_path, pipe) as router:
        error = error_of(edit(router, **{name: value}), 400)
        assert (error["param"], "not honoured by this model" in error["message"]) == (name, True)
        assert not router.enqueued()


def test_a_model_that_edits_nothing_says_so(idle_router: Router) -> None:
    error = error_of(edit(idle_router), 400)
    assert (error["param"], "does not edit pictures" in error["message"]) == ("image", True)
