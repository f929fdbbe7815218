"""Moving pictures as an mp4: encoded by the last stage's worker with PyAV, so that frames never leave it."""

from __future__ import annotations

import tempfile
from fractions import Fraction
from typing import Any

from omniqueue import errors
from omniqueue.payloads import Tensor

#: The one format, and its media type.
TYPES = {"mp4": "video/mp4"}


def encode(video: Tensor, fps: float) -> bytes:
    """An H.264 mp4 of uint8 frames of shape (frames, height, width, 3). Raises EngineError for other frames."""
    if video.dtype != "uint8" or len(video.shape) != 4 or video.shape[3] != 3 or not video.nbytes:
        raise errors.EngineError(f"The engine's video is {video.dtype} {video.shape}, not uint8 frames of 3 channels.")
    view = memoryview(video.buffer).cast("B")
    with tempfile.NamedTemporaryFile(prefix="omniqueue-", suffix=".mp4") as file:
        _write(file.name, view, video.shape, fps)
        return file.read()


def _write(path: str, view: memoryview, shape: tuple[int, ...], fps: float) -> None:
    import av

    frames, height, width, _ = shape
    # The index goes to the front, so that a browser can begin before the end has arrived; for that the muxer reads
    # its own file again.
    with av.open(path, "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream: Any = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(100_000))
        stream.width, stream.height = width, height
        # Players want half the colours' resolution, which sides of an odd length do not have.
        stream.pix_fmt = "yuv444p" if width % 2 or height % 2 else "yuv420p"
        size = height * width * 3
        for index in range(frames):
            for packet in stream.encode(_frame(view[index * size : (index + 1) * size], width, height)):
                container.mux(packet)
        for packet in stream.encode(None):
            container.mux(packet)


def _frame(pixels: memoryview, width: int, height: int) -> Any:
    import av

    frame = av.VideoFrame(width, height, "rgb24")
    plane, row = frame.planes[0], width * 3
    padding = bytes(plane.line_size - row)
    plane.update(b"".join(bytes(pixels[y * row : (y + 1) * row]) + padding for y in range(height)))
    return frame
