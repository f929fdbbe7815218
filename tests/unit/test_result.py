"""The last stage's outputs as what a client gets."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from omniqueue import errors, media
from omniqueue.engines.base import StageOutput
from omniqueue.payloads import Tensor
from omniqueue.store import Claim
from tests.unit import support
from workers import result

JOB = "0123456789abcdef" * 2


@pytest.fixture
def place(tmp_path: Path) -> media.MediaStore:
    return media.MediaStore(f"file://{tmp_path}")


def picture(width: int = 8, height: int = 4) -> StageOutput:
    return StageOutput({}, {"image": Tensor("uint8", (height, width, 3), bytes(width * height * 3))})


def store(place: media.MediaStore, outputs: list[StageOutput], kind: str | None = "image", **job: Any) -> Any:
    claim = Claim(JOB, 1, 2, {"prompt": "p", **job}, 10.0, None, {})
    stage = dataclasses.replace(support.pipeline(1).stages[0], final_output_type=kind)
    return result.store(place, claim, outputs, stage)


@pytest.mark.parametrize("output_format", list(media.IMAGE_TYPES))
def test_pictures_are_stored_in_the_format_that_was_asked(place: media.MediaStore, output_format: str) -> None:
    stored = store(place, [picture(8, 4), picture(16, 8)], output_format=output_format, seed=7)
    assert stored["kind"] == "image"
    for index, entry in enumerate(stored["data"]):
        content = place.read(entry["file"])
        assert entry == {
            "file": f"{JOB}-2-{index}.{output_format}",
            "nbytes": len(content),
            "content_type": f"image/{output_format}",
            "width": (8, 16)[index],
            "height": (4, 8)[index],
            "seed": 7 + index,
        }
        with Image.open(io.BytesIO(content)) as read:
            assert read.format == output_format.upper()


def test_without_a_format_a_picture_is_a_png_and_without_a_seed_it_has_none(place: media.MediaStore) -> None:
    (entry,) = store(place, [picture()])["data"]
    assert entry["content_type"] == "image/png"
    assert "seed" not in entry


@pytest.mark.parametrize(
    "output",
    [
        StageOutput(),
        StageOutput({}, {"other": Tensor("uint8", (1,), b"x")}),
        StageOutput({}, {"image": Tensor("uint8", (0, 0, 3), b"")}),
        StageOutput({}, {"image": Tensor("float32", (1, 1, 3), bytes(12))}),
        StageOutput({}, {"image": Tensor("uint8", (3,), bytes(3))}),
    ],
)
def test_an_output_that_is_no_picture_is_the_engines_error(place: media.MediaStore, output: StageOutput) -> None:
    with pytest.raises(errors.EngineError):
        store(place, [output])


def test_a_picture_of_another_size_than_was_asked_is_the_engines_error(place: media.MediaStore) -> None:
    with pytest.raises(errors.EngineError, match="height, width"):
        store(place, [picture(8, 4)], width=4, height=8)


def test_an_output_of_no_item_is_the_engines_error(place: media.MediaStore) -> None:
    with pytest.raises(errors.EngineError, match="nothing"):
        store(place, [])


def test_a_kind_that_nothing_encodes_is_told_with_those_that_are(place: media.MediaStore) -> None:
    with pytest.raises(errors.EngineError, match=r"'smell'.*image"):
        store(place, [picture()], kind="smell")


def test_short_text_stays_in_the_record_and_long_text_becomes_a_file(place: media.MediaStore) -> None:
    data = {"finish_reason": "length", "prompt_tokens": 3, "token_ids": [1, 2]}
    facts = {"finish_reason": "length", "prompt_tokens": 3, "completion_tokens": 2}
    (short,) = store(place, [StageOutput({"text": "苹果", **data})], kind="text")["data"]
    assert short == {**facts, "text": "苹果"}
    text = "苹" * 20_000
    (long,) = store(place, [StageOutput({"text": text, **data})], kind="text")["data"]
    assert place.read(long["file"]).decode() == text
    assert long == {**facts, "file": f"{JOB}-2-0.txt", "nbytes": 60_000, "content_type": "text/plain; charset=utf-8"}


def test_logprobs_are_kept_when_asked_for_and_a_long_list_becomes_a_file(place: media.MediaStore) -> None:
    entry = {"token": "a", "logprob": -0.5, "top": []}
    (short,) = store(place, [StageOutput({"text": "a", "logprobs": [entry]})], kind="text", logprobs=True)["data"]
    assert short["logprobs"] == [entry]
    (long,) = store(place, [StageOutput({"text": "a", "logprobs": [entry] * 2000})], "text", logprobs=True)["data"]
    assert long["content_type"] == "application/json"
    assert json.loads(place.read(long["file"])) == {"text": "a", "logprobs": [entry] * 2000}
    (without,) = store(place, [StageOutput({"text": "a", "logprobs": [entry]})], kind="text")["data"]
    assert "logprobs" not in without
    with pytest.raises(errors.EngineRejected, match="logprobs"):
        store(place, [StageOutput({"text": "a"})], kind="text", logprobs=True)


def test_sound_is_stored_as_asked(place: media.MediaStore) -> None:
    sound = StageOutput({"sample_rate": 8000}, {"audio": Tensor("float32", (2, 8000), bytes(64_000))})
    (entry,) = store(place, [sound], "audio", output_format="pcm", speed=2.0, sample_rate=16_000)["data"]
    assert entry["content_type"] == "audio/pcm"
    assert (entry["sample_rate"], entry["channels"]) == (16_000, 2)
    assert entry["seconds"] == pytest.approx(0.5, rel=0.05)
    assert len(place.read(entry["file"])) == entry["nbytes"] == round(entry["seconds"] * 16_000) * 4
    (plain,) = store(place, [sound], "audio")["data"]
    assert (plain["content_type"], plain["sample_rate"], plain["seconds"]) == ("audio/wav", 8000, 1.0)


def test_video_is_stored_with_its_facts_and_must_be_what_was_asked(place: media.MediaStore) -> None:
    clip = StageOutput({"fps": 12.0}, {"video": Tensor("uint8", (3, 16, 32, 3), bytes(3 * 16 * 32 * 3))})
    (entry,) = store(place, [clip], "video", num_frames=3, width=32, height=16)["data"]
    facts = {"width": 32, "height": 16, "num_frames": 3, "fps": 12.0, "seconds": 0.25, "content_type": "video/mp4"}
    assert entry.items() >= facts.items()
    assert store(place, [clip], "video", fps=6)["data"][0]["seconds"] == 0.5
    with pytest.raises(errors.EngineError, match="frames, height, width"):
        store(place, [clip], "video", num_frames=4, width=32, height=16)


@pytest.mark.parametrize("kind", ["audio", "video"])
def test_an_output_without_sound_or_frames_is_the_engines_error(place: media.MediaStore, kind: str) -> None:
    with pytest.raises(errors.EngineError, match="returned no"):
        store(place, [picture()], kind)


def test_what_cannot_be_stored_is_no_room_and_no_result(
    place: media.MediaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "write", support.raising(errors.NoRoom()))
    with pytest.raises(errors.NoRoom):
        store(place, [picture()])


def test_the_files_of_a_result_that_failed_half_way_are_removed(place: media.MediaStore, tmp_path: Path) -> None:
    with pytest.raises(errors.EngineError):
        store(place, [picture(), picture(), StageOutput()])
    assert list(tmp_path.iterdir()) == []
