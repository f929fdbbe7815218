"""Pictures from clients: whole ones become pixels, everything else is refused before it costs anything."""

from __future__ import annotations

import io
import struct
import time
import tracemalloc
import zlib
from typing import Any

import pytest
from PIL import Image

from omniqueue import errors, pictures


def encoded(mode: str = "RGB", size: tuple[int, int] = (6, 4), kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    color: Any = {"RGB": (10, 20, 30), "RGBA": (10, 20, 30, 40), "L": 7, "CMYK": (0, 0, 0, 0)}.get(mode, 1)
    Image.new(mode, size, color).save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def bomb(width: int, height: int) -> bytes:
    """A PNG of that size whose pixels are zeros, packed by zlib to nearly nothing."""
    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(b"\0" * (width + 1)) for _ in range(min(height, 4000))) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def deep(kind: int, channels: int) -> bytes:
    """A PNG of one pixel with 16 bits a channel."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, kind, 0, 0, 0))
    rows = zlib.compress(b"\0" + b"\x12\x34" * channels)
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def animated() -> bytes:
    file = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in (0, 255)]
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:])
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_picture_becomes_its_pixels(kind: str) -> None:
    tensor = pictures.decode(encoded(kind=kind), "image")
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("uint8", (4, 6, 3), 72)


@pytest.mark.parametrize(
    ("mode", "channels"), [("1", 1), ("L", 1), ("P", 3), ("LA", 4), ("RGB", 3), ("RGBA", 4)]
)  # fmt: skip
def test_modes_are_kept_or_become_one_without_loss(mode: str, channels: int) -> None:
    assert pictures.decode(encoded(mode), "image").shape == (4, 6, channels)


def test_pixels_are_the_ones_that_were_sent() -> None:
    assert bytes(pictures.decode(encoded("RGBA"), "image").buffer[:4]) == bytes((10, 20, 30, 40))


def test_a_palette_with_transparency_keeps_it() -> None:
    assert pictures.decode(encoded("P", transparency=1), "image").shape == (4, 6, 4)


@pytest.mark.parametrize(("mode", "colour"), [("1", 1), ("L", 7), ("RGB", (10, 20, 30))])
def test_a_transparent_colour_stays_transparent(mode: str, colour: Any) -> None:
    tensor = pictures.decode(encoded(mode, transparency=colour), "image")
    assert tensor.shape == (4, 6, 4)
    assert set(bytes(tensor.buffer)[3::4]) == {0}


def test_a_photograph_is_turned_as_it_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    assert pictures.decode(encoded(kind="JPEG", exif=exif), "image").shape == (6, 4, 3)


WHOLE = encoded(size=(64, 64))
BAD = {
    "nothing": b"",
    "text": b"no picture at all",
    "a gif": encoded("P", kind="GIF"),
    "a tiff": encoded(kind="TIFF"),
    "a bmp": encoded(kind="BMP"),
    "a pdf": encoded(kind="PDF"),
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 5\n",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg' width='1' height='1'/>",
    "its signature": WHOLE[:8],
    "its header": WHOLE[:33],
    "half of it": WHOLE[: len(WHOLE) // 2],
    "all but the end": encoded(kind="JPEG", size=(64, 64))[:-20],
    "half a webp": encoded(kind="WEBP", size=(64, 64))[:40],
    "a broken checksum": WHOLE[:40] + bytes([WHOLE[40] ^ 255]) + WHOLE[41:],
    "16 bits": encoded("I;16"),
    "16 bits of colours": deep(2, 3),
    "16 bits of grey and alpha": deep(4, 2),
    "16 bits of colours and alpha": deep(6, 4),
    "frames": animated(),
    "no pixels": b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 0, 0, 8, 2, 0, 0, 0)),
    "a text bomb": WHOLE[:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(b"\0" * (1 << 24))) + WHOLE[33:],
    "a wide bomb": bomb(60_000, 60_000),
    "a tall line": bomb(1, 20_000),
    "the largest": bomb(100_000, 4001),
}


@pytest.mark.parametrize("what", BAD)
def test_everything_else_is_refused_by_name_at_once_and_in_little_memory(what: str) -> None:
    tracemalloc.start()
    try:
        began = time.monotonic()
        with pytest.raises(pictures.BadPicture) as caught:
            pictures.decode(BAD[what], "mask")
        assert time.monotonic() - began < 5
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    assert caught.value.param == "mask"
    assert caught.value.message.startswith("mask")
    assert "0x" not in caught.value.message.replace("0x0", "").replace("0x4001", "").replace("0x60", "")


def test_the_limit_is_in_the_message() -> None:
    with pytest.raises(pictures.BadPicture, match=r"image is 60000x60000; at most 16,777,216 pixels"):
        pictures.decode(bomb(60_000, 60_000), "image")


def test_the_largest_picture_is_read() -> None:
    assert pictures.decode(bomb(4096, 4000), "image").shape == (4000, 4096, 1)


def test_a_picture_waits_for_its_turn_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_TURN_S", 0.01)
    assert pictures._TURN.acquire(timeout=1)
    assert pictures._TURN.acquire(timeout=1)
    try:
        with pytest.raises(errors.NotReady):
            pictures.decode(WHOLE, "image")
    finally:
        pictures._TURN.release()
        pictures._TURN.release()
