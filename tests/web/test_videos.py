"""Videos as jobs and at once, with a fake engine behind a real stage host."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import pytest

from omniqueue.pipeline import FrameRule
from tests.web import live, support
from tests.web.live import Live

VIDEOS = "/v1/videos"
SMALL = {"prompt": "a boat", "size": "32x16", "num_frames": 4}


@pytest.fixture(scope="module")
def served(valkey: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    pipes = [live.shipped("fake_text", delay_s=0), live.shipped("fake_video", delay_s=0)]
    with live.running(valkey, tmp_path_factory.mktemp("videos"), *pipes) as running:
        yield running


@pytest.fixture
def slow(valkey: str, tmp_path: Path) -> Iterator[Live]:
    with live.running(valkey, tmp_path, live.shipped("fake_video", delay_s=0.1, steps=100)) as running:
        yield running


def create(served: Live, **fields: Any) -> dict[str, Any]:
    response = served.post(VIDEOS, json={**SMALL, **fields})
    assert response.status_code == 200, response.json
    body: dict[str, Any] = response.json
    return body


def ended(served: Live, video: dict[str, Any]) -> dict[str, Any]:
    def look() -> Any:
        body = served.client.get(f"{VIDEOS}/{video['id']}").json
        return body if body["status"] in ("completed", "failed") else None

    found: dict[str, Any] = live.eventually(look)
    return found


def frames(content: bytes) -> tuple[str, int, int, int, float]:
    """Codec, width, height, frames and frames a second."""
    with av.open(io.BytesIO(content), "r") as container:
        stream = container.streams.video[0]
        count = len(list(container.decode(stream)))
        return stream.codec.name, stream.width, stream.height, count, float(stream.average_rate or 0)


def test_a_video_is_made_as_a_job_and_downloaded(served: Live) -> None:
    video = create(served, seed=7)
    assert video["object"] == "video"
    assert video["id"].startswith("video_")
    assert video["status"] in ("queued", "in_progress", "completed")
    assert (video["size"], video["seconds"], video["num_frames"], video["fps"]) == ("32x16", "0.5", 4, 8.0)
    made = ended(served, video)
    assert (made["status"], made["progress"], made["error"], made["seed"]) == ("completed", 100, None, 7)
    assert made["expires_at"] - made["completed_at"] == 3600
    response = served.client.get(f"{VIDEOS}/{video['id']}/content")
    part = served.client.get(f"{VIDEOS}/{video['id']}/content", headers={"Range": "bytes=4-7"})
    assert (part.status_code, part.data) == (206, b"ftyp")
    assert (response.status_code, response.content_type) == (200, "video/mp4")
    assert frames(response.data) == ("h264", 32, 16, 4, 8.0)


def test_a_form_asks_for_the_same(served: Live) -> None:
    fields = {"prompt": "a boat", "size": "32x16", "seconds": "1", "fps": "12", "model": "fake-video", "seed": "3"}
    response = served.post(VIDEOS, data=fields, content_type="multipart/form-data")
    assert response.status_code == 200, response.json
    assert (response.json["num_frames"], response.json["fps"], response.json["seconds"]) == (12, 12.0, "1")
    assert ended(served, response.json)["seed"] == 3
    response = served.post(VIDEOS, data={**fields, "seed": "x"}, content_type="multipart/form-data")
    assert support.error_of(response, 400)["param"] == "seed"


def test_without_size_and_length_the_models_own_are_used(served: Live) -> None:
    video = create(served, size=None, num_frames=None)
    assert (video["size"], video["num_frames"], video["fps"]) == ("320x192", 16, 8.0)


def test_width_and_height_are_another_way_to_say_the_size(served: Live) -> None:
    assert create(served, size=None, width=48, height=32)["size"] == "48x32"


def test_seconds_are_rounded_up_to_frames_that_the_model_makes(valkey: str, tmp_path: Path) -> None:
    rule = FrameRule(step=4, max_frames=81, default=33, fps=16)
    pipe = dataclasses.replace(live.shipped("fake_video", delay_s=0), frames=rule)
    with live.running(valkey, tmp_path, pipe) as served:
        assert create(served, num_frames=None, seconds="4")["num_frames"] == 65
        assert create(served, num_frames=None, seconds=0.1)["num_frames"] == 5
        assert create(served, num_frames=5)["num_frames"] == 5
        for change, param in (({"num_frames": 6}, "num_frames"), ({"num_frames": None, "seconds": "6"}, "seconds")):
            error = support.error_of(served.post(VIDEOS, json={**SMALL, **change}), 400)
            assert error["param"] == param


def test_parameters_reach_the_stage(served: Live) -> None:
    fields = {"num_inference_steps": 3, "guidance_scale": 2.5, "seed": 9, "fps": 10}
    video = create(served, negative_prompt="rain", **fields)
    ended(served, video)
    record = served.store.job(video["id"].removeprefix("video_"))
    assert record is not None
    expected = {"width": 32, "height": 16, "num_frames": 4, **fields}
    assert record.stages[0].params == expected
    assert record.request["negative_prompt"] == "rain"


@pytest.mark.parametrize("response_format", ["url", "b64_json", None])
def test_a_request_in_dynamos_form_waits_for_the_video(served: Live, response_format: str | None) -> None:
    nvext = {"fps": 4, "num_frames": 6, "seed": 5, "num_inference_steps": 2, "negative_prompt": "x"}
    body = {"prompt": "a boat", "size": "32x16", "nvext": nvext, "response_format": response_format}
    response = served.post(VIDEOS, json=body)
    assert response.status_code == 200, response.json
    made = response.json
    assert (made["status"], made["progress"], made["seed"]) == ("completed", 100, 5)
    [data] = made["data"]
    if response_format == "b64_json":
        content = base64.b64decode(data["b64_json"])
    else:
        content = served.client.get(data["url"].removeprefix("http://localhost")).data
    assert frames(content) == ("h264", 32, 16, 6, 4.0)
    assert served.job(response).stages[0].params["num_inference_steps"] == 2


def test_the_synchronous_call_answers_with_the_file(served: Live) -> None:
    response = served.post(f"{VIDEOS}/sync", json=SMALL)
    assert (response.status_code, response.content_type) == (200, "video/mp4")
    assert frames(response.data)[3] == 4


def test_videos_are_listed_without_other_jobs_and_paged(valkey: str, tmp_path: Path) -> None:
    pipes = [live.shipped("fake_text", delay_s=0), live.shipped("fake_video", delay_s=0)]
    with live.running(valkey, tmp_path, *pipes) as served:
        ids = [create(served)["id"] for _ in range(5)]
        served.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        page = served.client.get(f"{VIDEOS}?limit=2").json
        assert [video["id"] for video in page["data"]] == ids[:2:-1]
        assert (page["has_more"], page["last_id"]) == (True, ids[3])
        rest = served.client.get(f"{VIDEOS}?limit=5&after={page['last_id']}").json
        assert [video["id"] for video in rest["data"]] == ids[2::-1]
        assert rest["has_more"] is False
        oldest = served.client.get(f"{VIDEOS}?order=asc").json
        assert [video["id"] for video in oldest["data"]] == ids
        assert support.error_of(served.client.get(f"{VIDEOS}?after=video_x"), 400)["param"] == "after"


def test_a_finished_video_is_deleted_with_its_file(served: Live) -> None:
    video = create(served)
    ended(served, video)
    record = served.store.job(video["id"].removeprefix("video_"))
    assert record is not None
    assert record.result is not None
    response = served.client.delete(f"{VIDEOS}/{video['id']}")
    assert response.json == {"id": video["id"], "object": "video.deleted", "deleted": True}
    support.error_of(served.client.get(f"{VIDEOS}/{video['id']}"), 404)
    support.error_of(served.client.delete(f"{VIDEOS}/{video['id']}"), 404)
    assert not served.media.fs.exists(served.media._path(record.result["data"][0]["file"]))


def test_a_video_that_is_being_made_has_no_content_and_is_stopped_by_delete(slow: Live) -> None:
    video = create(slow)
    live.eventually(lambda: slow.jobs()[0].state.value == "running")
    assert "not made yet" in support.error_of(slow.client.get(f"{VIDEOS}/{video['id']}/content"), 404)["message"]
    assert slow.client.delete(f"{VIDEOS}/{video['id']}").json["deleted"] is True
    assert slow.jobs() == []


def test_a_video_that_failed_says_why(valkey: str, tmp_path: Path) -> None:
    with live.running(valkey, tmp_path, live.shipped("fake_video", raise_on="RAISE")) as served:
        video = ended(served, create(served, prompt="RAISE"))
        assert (video["status"], video["error"]["code"]) == ("failed", "engine_error")
        assert "asked to raise" in video["error"]["message"]
        support.error_of(served.client.get(f"{VIDEOS}/{video['id']}/content"), 422)
        support.error_of(served.post(f"{VIDEOS}/sync", json={**SMALL, "prompt": "RAISE"}), 500)


@pytest.mark.parametrize("name", ["video_" + "0" * 32, "0" * 32, "video_", "x"])
def test_an_unknown_id_is_not_found(served: Live, name: str) -> None:
    for path in (f"{VIDEOS}/{name}", f"{VIDEOS}/{name}/content"):
        assert support.error_of(served.client.get(path), 404)["code"] == "not_found"
    support.error_of(served.client.delete(f"{VIDEOS}/{name}"), 404)


def test_another_kind_of_job_is_no_video(served: Live) -> None:
    response = served.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    job_id = response.headers["X-Omniqueue-Job-Id"]
    support.error_of(served.client.get(f"{VIDEOS}/video_{job_id}"), 404)


def test_the_same_key_gets_the_same_video(served: Live) -> None:
    headers = {"Idempotency-Key": "k1"}
    ids = {served.post(VIDEOS, json=SMALL, headers=headers).json["id"] for _ in range(2)}
    assert len(ids) == 1


BAD = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ["x"]}, "prompt"),
    ({"model": "fake-text"}, "model"),
    ({"size": "31x16"}, "size"),
    ({"size": "1296x16"}, "size"),
    ({"size": "１６x16"}, "size"),
    ({"width": 32}, "size"),
    ({"size": None, "width": 32}, "height"),
    ({"size": None, "width": 33, "height": 32}, "width"),
    ({"num_frames": 0}, "num_frames"),
    ({"num_frames": 241}, "num_frames"),
    ({"num_frames": 2.5}, "num_frames"),
    ({"seconds": "4"}, "num_frames"),
    ({"num_frames": None, "seconds": "31"}, "seconds"),
    ({"num_frames": None, "seconds": "４"}, "seconds"),
    ({"num_frames": None, "seconds": 0}, "seconds"),
    ({"fps": 0}, "fps"),
    ({"fps": 241}, "fps"),
    ({"seed": -1}, "seed"),
    ({"num_inference_steps": 201}, "num_inference_steps"),
    ({"guidance_scale": 21}, "guidance_scale"),
    ({"guidance_scale_2": 1.0}, "guidance_scale_2"),
    ({"flow_shift": 1.0}, "flow_shift"),
    ({"negative_prompt": "a\0"}, "negative_prompt"),
    ({"num_outputs_per_prompt": 2}, "num_outputs_per_prompt"),
    ({"input_reference": "x"}, "input_reference"),
    ({"response_format": "mp4"}, "response_format"),
    ({"nvext": {"boundary_ratio": 0.5}}, "nvext.boundary_ratio"),
    ({"nvext": {"num_frames": 4}}, "nvext.num_frames"),
    ({"nvext": {"colour": 1}}, "nvext.colour"),
    ({"aspect_ratio": "16:9"}, "aspect_ratio"),
]


@pytest.mark.parametrize(("change", "param"), BAD)
def test_what_cannot_be_honoured_is_refused_by_name_and_starts_nothing(
    served: Live, change: dict[str, Any], param: str
) -> None:
    before = len(served.jobs())
    error = support.error_of(served.post(VIDEOS, json={**SMALL, **change}), 400)
    assert error["param"] == param, error
    assert len(served.jobs()) == before


def test_the_only_variant_is_the_video(served: Live) -> None:
    video = create(served)
    response = served.client.get(f"{VIDEOS}/{video['id']}/content?variant=thumbnail")
    assert support.error_of(response, 400)["param"] == "variant"
