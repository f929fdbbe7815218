"""Finished media: names, encodings, and a place that may be full, gone or not writable."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from omniqueue import errors, media
from omniqueue.payloads import Tensor
from tests.unit import support

JOB = "0123456789abcdef" * 2
NAME = media.file_name(JOB, 1, 0, "png")


@pytest.fixture
def place(tmp_path: Path) -> media.MediaStore:
    return media.MediaStore(f"file://{tmp_path}/media")


def picture(width: int, height: int, channels: int = 3) -> Tensor:
    row = bytes((x * 7 + c * 50) % 256 for x in range(width) for c in range(channels))
    return Tensor("uint8", (height, width, channels), row * height)


# -- names -------------------------------------------------------------------------------------------------------------


def test_a_name_tells_job_attempt_and_item() -> None:
    assert f"{JOB}-1-0.png" == NAME
    assert media.job_of(NAME) == JOB
    assert len({media.file_name(JOB, a, i, e) for a in (1, 2) for i in (0, 1) for e in ("png", "webp")}) == 8


TRICKS = [
    "", ".", "..", "../" + NAME, "/" + NAME, "x/" + NAME, NAME + "/", NAME + "/../x", NAME + "\n", "\n" + NAME,
    NAME + "\0", NAME + ".part", NAME.upper(), JOB, JOB + ".png", f"{JOB}-1.png", f"{JOB}-1-0", f"{JOB}-1-0.",
    "%2e%2e/x", f"{JOB}-１-0.png", f"{JOB}--1-0.png", f"{JOB}-1-0.PNG", f"{JOB[:-1]}-1-0.png", f"{JOB}0-1-0.png",
    "a" * 10_000, f"file://{NAME}", f"~/{NAME}", f"{JOB}-1-0.png*",
]  # fmt: skip


@pytest.mark.parametrize("name", TRICKS)
def test_no_other_name_is_ever_opened_written_or_removed(
    place: media.MediaStore, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for touch in ("open", "rm", "mv", "makedirs"):
        monkeypatch.setattr(place.fs, touch, support.raising(AssertionError("touched")))
    for use in (place.open, place.read, lambda n: place.write(n, b""), media.job_of):
        with pytest.raises(errors.NotFound) as caught:
            use(name)
        assert len(caught.value.message) < 1000
    with pytest.raises(errors.NotFound):
        place.remove({"data": [{"file": name}]})


@given(st.text(max_size=60))
def test_a_name_is_ours_or_not_found(name: str) -> None:
    try:
        assert media.job_of(name) in name
    except errors.NotFound:
        return
    assert "/" not in name
    assert ".." not in name


# -- encodings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1, 1), (8, 8), (64, 32), (31, 257)])
@pytest.mark.parametrize("output_format", list(media.IMAGE_TYPES))
def test_every_format_keeps_the_size(output_format: str, size: tuple[int, int]) -> None:
    content = media.encode_image(picture(*size), output_format)
    with Image.open(io.BytesIO(content)) as read:
        assert (read.format, read.size, read.mode) == (output_format.upper(), size, "RGB")
        assert Image.MIME[str(read.format)] == media.CONTENT_TYPES[output_format]


@pytest.mark.parametrize("output_format", ["png", "webp"])
@pytest.mark.parametrize("channels", [3, 4])
def test_png_and_full_quality_webp_lose_nothing(output_format: str, channels: int) -> None:
    given = picture(33, 17, channels)
    if channels == 4:  # a see-through pixel's colour may go, so that none is
        given = Tensor("uint8", given.shape, bytes(255 if i % 4 == 3 else b for i, b in enumerate(bytes(given.buffer))))
    with Image.open(io.BytesIO(media.encode_image(given, output_format, 100))) as read:
        assert read.convert("RGB" if channels == 3 else "RGBA").tobytes() == bytes(given.buffer)


def test_a_picture_with_transparency_becomes_a_jpeg_without() -> None:
    with Image.open(io.BytesIO(media.encode_image(picture(8, 8, 4), "jpeg"))) as read:
        assert read.mode == "RGB"


@pytest.mark.parametrize("output_format", ["jpeg", "webp"])
def test_compression_is_the_quality(output_format: str) -> None:
    noise = Tensor("uint8", (64, 64, 3), os.urandom(64 * 64 * 3))
    sizes = [len(media.encode_image(noise, output_format, quality)) for quality in (0, 40, 100)]
    assert sizes == sorted(set(sizes))


def test_the_same_picture_is_the_same_file() -> None:
    for output_format in media.IMAGE_TYPES:
        assert len({media.encode_image(picture(20, 20), output_format) for _ in range(3)}) == 1


def test_a_read_only_view_is_encoded_as_it_is() -> None:
    given = picture(16, 16)
    view = Tensor("uint8", given.shape, memoryview(bytes(given.buffer)))
    assert media.encode_image(view, "png") == media.encode_image(given, "png")


@pytest.mark.parametrize(
    "wrong",
    [
        Tensor("float32", (2, 2, 3), bytes(48)),
        Tensor("uint8", (2, 2, 1), bytes(4)),
        Tensor("uint8", (2, 2), bytes(4)),
        Tensor("uint8", (1, 2, 2, 3), bytes(12)),
        Tensor("uint8", (), bytes(1)),
        Tensor("uint8", (0, 4, 3), b""),
    ],
)
def test_what_is_no_picture_is_the_engines_error(wrong: Tensor) -> None:
    with pytest.raises(errors.EngineError, match="The engine's picture is"):
        media.encode_image(wrong, "png")


# -- the place ---------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_and_then_removed(place: media.MediaStore) -> None:
    place.write(NAME, b"content")
    assert place.read(NAME) == b"content"
    with place.open(NAME) as file:
        assert file.read(3) == b"con"
    place.remove({"data": [{"file": NAME}, {"text": "no file"}]})
    with pytest.raises(errors.NotFound, match="time to live"):
        place.read(NAME)


def test_removing_twice_or_nothing_is_fine(place: media.MediaStore) -> None:
    results: list[Any] = [None, {}, {"data": []}, {"data": [{"file": NAME}, {"file": NAME}]}]
    for result in results:
        place.remove(result)


def test_a_folder_in_memory_is_a_place_too() -> None:
    place = media.MediaStore("memory://somewhere/")
    place.write(NAME, b"x")
    assert place.read(NAME) == b"x"
    place.remove({"data": [{"file": NAME}]})


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("step", ["makedirs", "open", "mv"])
def test_a_disk_that_refuses_is_told_and_leaves_no_half_file(
    place: media.MediaStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: str, code: int
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(place.fs, step, support.raising(OSError(code, os.strerror(code))))
        with pytest.raises(errors.OmniqueueError, match="Could not store") as caught:
            place.write(NAME, b"content")
    full = code in (errno.ENOSPC, errno.EDQUOT)
    assert type(caught.value) is (errors.NoRoom if full else errors.OmniqueueError)
    assert os.strerror(code) in caught.value.message
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_half_written_file_is_never_seen_under_its_name(
    place: media.MediaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(source: str, target: str) -> None:
        with pytest.raises(errors.NotFound):
            place.read(NAME)

    monkeypatch.setattr(place.fs, "mv", look)
    place.write(NAME, b"content")


@pytest.mark.parametrize("url", ["nosuch://x", "s3-but-wrong://bucket"])
def test_a_url_that_nothing_can_open_is_a_config_error(url: str) -> None:
    with pytest.raises(errors.ConfigError, match=r"OMNIQUEUE_MEDIA_FS_URL=.* cannot be opened"):
        media.MediaStore(url)


def test_a_place_is_made_once_per_url() -> None:
    assert media.shared("memory://a") is media.shared("memory://a")
    assert media.shared("memory://a") is not media.shared("memory://b")
