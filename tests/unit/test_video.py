"""Frames as an mp4."""

from __future__ import annotations

import io
from typing import Any

import av
import pytest

from omniqueue import errors, video
from omniqueue.payloads import Tensor


def clip(frames: int = 6, width: int = 64, height: int = 48) -> Tensor:
    """Each frame of one grey, brighter from frame to frame."""
    size = width * height * 3
    return Tensor("uint8", (frames, height, width, 3), b"".join(bytes([20 + 30 * n]) * size for n in range(frames)))


def decoded(content: bytes) -> tuple[Any, list[Any]]:
    with av.open(io.BytesIO(content), "r") as container:
        stream = container.streams.video[0]
        return stream, list(container.decode(stream))


@pytest.mark.parametrize("fps", [1.0, 1.0005, 8.0, 23.976, 24000 / 1001, 29.97, 239.9999, 240.0])
def test_every_frame_is_there_in_its_order_at_its_rate(fps: float) -> None:
    content = video.encode(clip(), fps)
    stream, frames = decoded(content)
    assert (stream.width, stream.height, len(frames)) == (64, 48, 6)
    assert float(stream.average_rate) == pytest.approx(fps, rel=1e-6)
    greys = [bytes(frame.reformat(format="gray").planes[0])[100] for frame in frames]
    assert greys == sorted(greys)
    assert greys[-1] - greys[0] == pytest.approx(150, abs=12)


@pytest.mark.parametrize(("width", "height"), [(16, 16), (30, 18), (33, 17), (1, 1)])
def test_sizes_are_kept_to_the_pixel(width: int, height: int) -> None:
    stream, frames = decoded(video.encode(clip(2, width, height), 8))
    assert (stream.width, stream.height, len(frames)) == (width, height, 2)


def test_the_index_comes_before_the_pictures() -> None:
    content = video.encode(clip(), 8)
    assert 0 < content.find(b"moov") < content.find(b"mdat")


@pytest.mark.parametrize(
    "frames",
    [
        Tensor("uint8", (0, 4, 4, 3), b""),
        Tensor("uint8", (4, 4, 3), bytes(48)),
        Tensor("uint8", (1, 4, 4, 4), bytes(64)),
        Tensor("float32", (1, 4, 4, 3), bytes(192)),
    ],
)
def test_other_tensors_are_the_engines_error(frames: Tensor) -> None:
    with pytest.raises(errors.EngineError, match="video"):
        video.encode(frames, 8)
