"""The world that the tiny GLM-Image draws: one coloured object in a setting, and on request a sign with a digit.

Scenes are drawn by code at any size, so there is no data set. Some combinations are held out: training never sees them,
evaluation uses nothing else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

#: RGB, 0 to 255. Everything is far enough from every background to be told from it.
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 40, 40),
    "orange": (245, 135, 25),
    "yellow": (245, 215, 50),
    "green": (30, 120, 55),
    "blue": (40, 65, 205),
    "purple": (140, 55, 180),
    "pink": (245, 150, 190),
    "brown": (120, 75, 40),
}
OBJECTS = ("apple", "ball", "box", "star", "tree", "cup")
SETTINGS = ("table", "meadow", "sea", "night")
DIGITS = "0123456789"


@dataclass(frozen=True)
class Scene:
    """What a picture shows.

    ``digit`` stands on a sign in the upper left corner; an empty string is no sign. ``blank`` leaves the sign empty.
    ``x`` and ``y`` place the object's centre as parts of width and height; ``size`` scales it.
    """

    colour: str
    object: str
    setting: str
    digit: str = ""
    x: float = 0.55
    y: float = 0.61
    size: float = 1.0
    blank: bool = False

    def without_digit(self) -> Scene:
        """The same scene as the prior tokens know it: digits reach a picture through the glyph encoder alone."""
        return replace(self, blank=True)


def combinations(held_out: bool) -> list[tuple[str, str, str]]:
    """Colour, object and setting: 168 for training, or the 24 held out, in which each single word is as frequent."""
    found = []
    for c, colour in enumerate(COLOURS):
        for o, thing in enumerate(OBJECTS):
            for s, setting in enumerate(SETTINGS):
                if ((c * 3 + o * 5 + s * 2 + (c // 4) * 2) % 8 == 3) is held_out:
                    found.append((colour, thing, setting))
    return found


def scenes(random: numpy.random.Generator, held_out: bool = False) -> Iterator[Scene]:
    """Endless random scenes, every second one with a sign."""
    known = combinations(held_out)
    while True:
        colour, thing, setting = known[random.integers(len(known))]
        digit = DIGITS[random.integers(10)] if random.random() < 0.5 else ""
        x, y, size = (float(choices[random.integers(len(choices))]) for choices in (_ACROSS, _DOWN, _SIZES))
        yield Scene(colour, thing, setting, digit, x, y, size)


#: Where objects are put and how large they are. Steps of a sixteenth keep the number of different cells small.
_ACROSS, _DOWN, _SIZES = (7 / 16, 9 / 16, 11 / 16), (10 / 16,), (0.85, 1.1)


# -- drawing -----------------------------------------------------------------------------------------------------------

Shape = Callable[[Any, Any], Any]


def render(scene: Scene, height: int, width: int) -> Any:
    """The picture, uint8 (height, width, 3); edges are smooth at any size."""
    picture = background(scene.setting, height, width).copy()
    unit = min(height, width)
    if scene.digit:
        _draw_sign(picture, unit, "" if scene.blank else scene.digit)
    _draw_object(picture, scene, unit)
    return (picture + 0.5).astype(numpy.uint8)


def radius(scene: Scene) -> float:
    """Half the object's extent as a part of the picture's shorter side."""
    return 0.24 * scene.size


@functools.lru_cache(maxsize=256)
def background(setting: str, height: int, width: int) -> Any:
    """The setting alone, float32 (height, width, 3). Callers must not write to it."""
    unit = min(height, width)
    y, x = numpy.mgrid[0:height, 0:width].astype(numpy.float32) + 0.5
    down, across = y / height, x / width
    canvas: Any = numpy.empty((height, width, 3), numpy.float32)
    paint = functools.partial(_paint, canvas, edge=unit)
    if setting == "table":
        canvas[:] = (190, 200, 214)
        paint(0.56 - down, (246, 244, 238))
        paint(numpy.abs(down - 0.56) - 0.008, (150, 146, 142))
        paint(0.9 - down, (212, 204, 196))
    elif setting == "meadow":
        canvas[:] = (172, 218, 247)
        paint(numpy.hypot(x - width + 0.2 * unit, y - 0.17 * unit) / unit - 0.1, (255, 236, 150))
        paint(0.5 + 0.03 * numpy.sin(across * 9) - down, (140, 208, 104))
        paint(0.78 + 0.02 * numpy.sin(across * 13) - down, (120, 192, 88))
    elif setting == "sea":
        canvas[:] = (226, 236, 244)
        paint(0.4 - down, (96, 178, 224))
        for level in (0.5, 0.68, 0.86):
            paint(numpy.abs(down - level - 0.012 * numpy.sin(across * 25)) - 0.01, (190, 228, 246))
    else:
        canvas[:] = (24, 28, 62)
        paint(numpy.hypot(x - width + 0.2 * unit, y - 0.17 * unit) / unit - 0.09, (236, 232, 200))
        for star_x, star_y in ((0.42, 0.1), (0.6, 0.2), (0.08, 0.45), (0.9, 0.42), (0.33, 0.28)):
            paint(numpy.hypot(x - star_x * width, y - star_y * height) / unit - 0.014, (200, 205, 220))
        paint(0.76 - down, (12, 14, 26))
    return canvas


def _paint(canvas: Any, distance: Any, colour: Sequence[float], edge: float) -> None:
    """Colour where ``distance`` is negative; ``edge`` pixels per unit of distance make the border one pixel wide."""
    cover = numpy.clip(0.5 - distance * edge, 0.0, 1.0)[..., None]
    canvas += cover * (numpy.asarray(colour, numpy.float32) - canvas)


def _draw_object(picture: Any, scene: Scene, unit: int) -> None:
    height, width = picture.shape[:2]
    reach = radius(scene) * unit
    middle_x, middle_y = scene.x * width, scene.y * height
    left, right = max(0, int(middle_x - 1.1 * reach) - 1), min(width, int(middle_x + 1.1 * reach) + 2)
    top, bottom = max(0, int(middle_y - 1.1 * reach) - 1), min(height, int(middle_y + 1.1 * reach) + 2)
    y, x = numpy.mgrid[top:bottom, left:right].astype(numpy.float32) + 0.5
    x, y = (x - middle_x) / reach, (y - middle_y) / reach
    paint = functools.partial(_paint, picture[top:bottom, left:right], edge=reach)
    colour = numpy.asarray(COLOURS[scene.colour], numpy.float32)
    body = _BODIES[scene.object](x, y)
    paint(body - 0.04, colour * 0.3)
    paint(body + 0.04, colour)
    inside = functools.partial(numpy.maximum, body + 0.04)
    if scene.object == "apple":
        paint(_rectangle(x - 0.02, y + 0.68, 0.07, 0.26), (92, 58, 28))
        paint(numpy.hypot(x - 0.34, (y + 0.74) * 2.2) - 0.28, (80, 170, 70))
    elif scene.object == "ball":
        paint(inside(numpy.abs(y - 0.12 * x) - 0.17), colour * 0.4 + 153)
    elif scene.object == "box":
        paint(inside(y + 0.42), colour * 0.62)
        paint(inside(numpy.abs(x) - 0.13), colour * 0.4 + 153)
    elif scene.object == "tree":
        paint(_rectangle(x, y - 0.78, 0.15, 0.2), (96, 62, 34))
    elif scene.object == "cup":
        paint(numpy.hypot(x + 0.15, (y + 0.6) * 2.6) - 0.52, colour * 0.3)


def _rectangle(x: Any, y: Any, half_width: float, half_height: float) -> Any:
    return numpy.maximum(numpy.abs(x) - half_width, numpy.abs(y) - half_height)


def _apple(x: Any, y: Any) -> Any:
    return numpy.hypot(numpy.abs(x) - 0.3, (y - 0.2) * 0.92) - 0.62


def _ball(x: Any, y: Any) -> Any:
    return numpy.hypot(x, y) - 0.9


def _box(x: Any, y: Any) -> Any:
    return _rectangle(x, y, 0.8, 0.8)


def _star(x: Any, y: Any) -> Any:
    step = math.pi / 5
    angle = numpy.arctan2(x, -y)
    folded = numpy.abs((angle + step) % (2 * step) - step)
    far = numpy.hypot(x, y)
    across, along = far * numpy.sin(folded), far * numpy.cos(folded)
    # The edge from the tip (0, 1) to the notch at a radius of 0.45.
    notch_x, notch_y = 0.45 * math.sin(step), 0.45 * math.cos(step)
    length = math.hypot(notch_x, 1.0 - notch_y)
    return (across * (1.0 - notch_y) + (along - 1.0) * notch_x) / length


def _tree(x: Any, y: Any) -> Any:
    upper = numpy.maximum((numpy.abs(x) * 1.6 - (y + 1.0)) / 1.9, y - 0.1)
    lower = numpy.maximum((numpy.abs(x) * 1.4 - (y + 0.62)) / 1.7, y - 0.62)
    return numpy.minimum(upper, lower)


def _cup(x: Any, y: Any) -> Any:
    body = numpy.maximum(numpy.abs(x + 0.15) - (0.6 - 0.12 * (y + 0.6)), numpy.abs(y - 0.1) - 0.75)
    handle = numpy.abs(numpy.hypot(x - 0.48, y - 0.05) - 0.32) - 0.1
    return numpy.minimum(body, handle)


_BODIES: dict[str, Shape] = {"apple": _apple, "ball": _ball, "box": _box, "star": _star, "tree": _tree, "cup": _cup}

#: Segments of a digit: top, upper left, upper right, middle, lower left, lower right, bottom.
_SEGMENTS = (
    "1110111",
    "0010010",
    "1011101",
    "1011011",
    "0111010",
    "1101011",
    "1101111",
    "1010010",
    "1111111",
    "1111011",
)
_PLACES = (
    (0, -1, 1, 0), (-1, -0.5, 0, 1), (1, -0.5, 0, 1), (0, 0, 1, 0), (-1, 0.5, 0, 1), (1, 0.5, 0, 1), (0, 1, 1, 0),
)  # fmt: skip
#: The sign's centre and half extents as parts of the shorter side.
SIGN = (0.16, 0.18, 0.12, 0.14)


def _draw_sign(picture: Any, unit: int, digit: str) -> None:
    middle_x, middle_y, half_width, half_height = SIGN
    extent = int(0.34 * unit) + 1
    y, x = (numpy.mgrid[0:extent, 0:extent].astype(numpy.float32) + 0.5) / unit
    x, y = x - middle_x, y - middle_y
    corner = picture[:extent, :extent]
    x, y = x[: corner.shape[0], : corner.shape[1]], y[: corner.shape[0], : corner.shape[1]]
    _paint(corner, _rectangle(x, y, half_width, half_height), (70, 56, 50), unit)
    _paint(corner, _rectangle(x, y, half_width - 0.014, half_height - 0.014), (252, 250, 236), unit)
    lit = _SEGMENTS[int(digit)] if digit else ""
    for on, (place_x, place_y, flat, upright) in zip(lit, _PLACES, strict=False):
        if on == "1":
            bar = _rectangle(x - place_x * 0.048, y - place_y * 0.078, 0.014 + 0.034 * flat, 0.014 + 0.025 * upright)
            _paint(corner, bar, (30, 26, 36), unit)
