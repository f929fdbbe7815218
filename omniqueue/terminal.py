"""Pictures in a terminal: two pixels a character, where it understands colours."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TextIO

from omniqueue.payloads import Tensor


def shows_pictures(stream: TextIO) -> bool:
    """Whether what is written there is seen by somebody, in 24 bit colours."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return False
    return "utf" in (stream.encoding or "").lower()


def picture_lines(picture: Tensor, columns: int | None = None) -> Iterator[str]:
    """The lines of a picture, uint8 of shape (height, width, 3), no wider than ``columns`` or the terminal."""
    height, width, _ = picture.shape
    across = min(width, columns or min(64, shutil.get_terminal_size().columns))
    # A character is about twice as high as wide, so each holds one pixel above another.
    down = max(1, round(across * height / width / 2))
    pixels = memoryview(picture.buffer).cast("B")

    def mean(row: int, column: int) -> str:
        rows = range(row * height // (2 * down), max(row * height // (2 * down) + 1, (row + 1) * height // (2 * down)))
        begin = column * width // across
        places = [
            3 * (y * width + x) for y in rows for x in range(begin, max(begin + 1, (column + 1) * width // across))
        ]
        return ";".join(str(sum(pixels[place + channel] for place in places) // len(places)) for channel in range(3))

    for line in range(down):
        cells = (f"\x1b[38;2;{mean(2 * line, x)};48;2;{mean(2 * line + 1, x)}m\u2580" for x in range(across))
        yield "".join(cells) + "\x1b[0m"
