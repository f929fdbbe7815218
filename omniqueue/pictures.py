"""Pictures that clients send: checked by their headers before anything is decoded, then raw pixels.

The only place that opens a client's file, and only ever as bytes in hand, never by a name.
"""

from __future__ import annotations

import io
import struct
import threading
import zlib

from omniqueue import errors
from omniqueue.payloads import Tensor

#: What is read, by Pillow's names.
FORMATS = ("PNG", "JPEG", "WEBP")
#: Largest picture, in pixels and by side; far above what any model looks at. A request has as many pixels in all.
MAX_PIXELS = 1 << 24
MAX_SIDE = 16_384
#: Modes kept as they are, with their channels; the rest becomes one of them without loss.
_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}
_CONVERTED = {"1": "L", "P": "RGB", "PA": "RGBA", "LA": "RGBA", "CMYK": "RGB", "YCbCr": "RGB"}
#: Modes without a channel for transparency, of which a PNG may say that one colour, or some, are transparent.
_KEYED = ("1", "L", "P", "RGB")
#: What Pillow raises for files that are damaged, each format in its own way.
_DAMAGED = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    LookupError,
    TypeError,
    ArithmeticError,
    struct.error,
    zlib.error,
)
#: Decoding takes several times a picture's size in memory, so only a few are decoded at once.
_TURN = threading.BoundedSemaphore(2)
#: How long a picture may wait for its turn, in seconds.
_TURN_S = 30.0


class BadPicture(errors.InvalidRequest):
    """The file is not a picture that can be read."""

    code = "invalid_image"


def decode(content: bytes, param: str, max_pixels: int = MAX_PIXELS) -> Tensor:
    """The picture as uint8 of shape (height, width, channels): 1 grey, 3 RGB or 4 RGBA, turned as its EXIF says.

    Raises BadPicture for what is no whole PNG, JPEG or WebP picture, or is too large; ``param`` is the field's name.
    """
    from PIL import Image, ImageOps

    Image.MAX_IMAGE_PIXELS = None  # a warning, or an error at twice as much: our own limit comes before
    if not _TURN.acquire(timeout=_TURN_S):
        raise errors.NotReady("Too many pictures are being read at once; try again.")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:  # reads the header only
            _check(image.size, max_pixels, getattr(image, "n_frames", 1), param)
            if any("16" in str(tile[3]) for tile in image.tile):  # colours would be cut to 8 bits without a word
                raise BadPicture(f"{param}: pictures of 16 bits are not read; send 8 bits.", param=param)
            image.load()
            whole = ImageOps.exif_transpose(image)
            keyed = image.mode in _KEYED and "transparency" in image.info
            wanted = "RGBA" if keyed else _CONVERTED.get(image.mode)
            picture = whole.convert(wanted) if wanted else whole
            channels = _CHANNELS.get(picture.mode)
            if channels is None:
                raise BadPicture(f"{param}: pictures of mode {picture.mode} are not read; send 8 bits.", param=param)
            return Tensor("uint8", (picture.height, picture.width, channels), picture.tobytes())
    except _DAMAGED as exc:
        raise BadPicture(f"{param} must be a whole PNG, JPEG or WebP picture: {_said(exc)}.", param=param) from None
    finally:
        _TURN.release()


def _check(size: tuple[int, int], max_pixels: int, frames: int, param: str) -> None:
    width, height = size
    if width * height > max_pixels or max(size) > MAX_SIDE:
        raise BadPicture(
            f"{param} is {width}x{height}; at most {max_pixels:,} pixels and {MAX_SIDE:,} a side are read.", param=param
        )
    if frames != 1:
        raise BadPicture(f"{param} has {frames} frames; send one picture.", param=param)


def _said(exc: BaseException) -> str:
    """Pillow's reason, without the object's address that it names when it knows no format."""
    text = str(exc).strip().rstrip(".")
    return "it is not one of these" if not text or "cannot identify" in text else text[:200]
