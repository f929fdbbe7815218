"""Reads off a picture which colour, object, setting and digit it shows, by drawing every answer and taking the nearest.

There is nothing to train: the answers come from the same code that drew the training pictures. ``own_error`` measures
how often the reading of a true drawing is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy
from PIL import Image

from examples.tiny_glm_image import world

FIELDS = ("colour", "object", "setting", "digit")
#: Length in pixels of the shorter side at which objects and settings are compared, and signs.
_SIDE, _SIGN_SIDE = 64, 128
#: Differences of a channel, of 255: above the first a pixel is not the setting's, and none counts more than the other.
_FOREIGN, _MOST = 34, 90


@dataclass(frozen=True)
class Reading:
    """What a picture shows. ``object`` and ``colour`` are empty when there is nothing but a setting."""

    colour: str
    object: str
    setting: str
    digit: str

    def agrees(self, scene: world.Scene) -> dict[str, bool]:
        """Field by field, whether the picture shows what the scene says."""
        return {field: getattr(self, field) == getattr(scene, field) for field in FIELDS}


def read(picture: Any) -> Reading:
    """Read a picture, uint8 (height, width, 3)."""
    small = _scaled(picture, _SIDE)
    setting = _setting(small)
    mask = _foreign(small, setting)
    if mask.sum() < 12:
        return Reading("", "", setting, _digit(picture, setting))
    colour = _colour(small[mask])
    mask = _around_colour(mask, small, colour)
    return Reading(colour, _object(small, mask, setting, colour), setting, _digit(picture, setting))


def own_error(scenes: Iterable[world.Scene], height: int, width: int) -> dict[str, float]:
    """Part of true drawings that are read wrongly, for each field."""
    agreed = [read(world.render(scene, height, width)).agrees(scene) for scene in scenes]
    return {field: 1.0 - sum(one[field] for one in agreed) / len(agreed) for field in FIELDS}


def surroundings(*pictures: Any) -> Any:
    """Bool (height, width): where all these pictures of one size show their setting and no object; signs are left out.

    The border of the object is left out too.
    """
    masks = []
    for picture in pictures:
        setting = _setting(_scaled(picture, _SIDE))
        masks.append(_foreign(picture.astype(numpy.float32), setting))
    taken = numpy.logical_or.reduce(masks)
    taken = _spread(taken, max(2, min(taken.shape) // 32))
    unit = min(taken.shape)
    taken[: int(0.34 * unit), : int(0.3 * unit)] = True
    return ~taken


def _scaled(picture: Any, side: int) -> Any:
    height, width = picture.shape[:2]
    scale = side / min(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return numpy.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BOX), numpy.float32)


def _distance(one: Any, other: Any) -> float:
    return float(numpy.minimum(numpy.abs(one - other), _MOST).mean())


def _setting(small: Any) -> str:
    height, width = small.shape[:2]
    return min(world.SETTINGS, key=lambda name: _distance(small, world.background(name, height, width)))


def _foreign(picture: Any, setting: str) -> Any:
    """Where there is something before the setting; the sign's place is left out."""
    height, width = picture.shape[:2]
    mask = numpy.abs(picture - world.background(setting, height, width)).max(-1) > _FOREIGN
    unit = min(height, width)
    mask[: int(0.34 * unit), : int(0.3 * unit)] = False
    return mask


def _colour(pixels: Any) -> str:
    """Every pixel votes for the nearest colour, if one is near."""
    palette = numpy.asarray(list(world.COLOURS.values()), numpy.float32)
    distance = numpy.abs(pixels[:, None] - palette).sum(-1)
    votes = numpy.exp(-distance / 40.0).sum(0)
    return list(world.COLOURS)[int(votes.argmax())]


def _around_colour(mask: Any, small: Any, colour: str) -> Any:
    """The part of a mask that hangs together with the middle of what has the colour."""
    distance = numpy.abs(small - numpy.asarray(world.COLOURS[colour], numpy.float32)).sum(-1)
    ys, xs = numpy.nonzero(mask & (distance <= max(120.0, float(distance[mask].min()))))
    nearest = int(((ys - numpy.median(ys)) ** 2 + (xs - numpy.median(xs)) ** 2).argmin())
    # Lines a pixel or two thick are the setting's, drawn a little off.
    thick = mask & _spread(~_spread(~mask, 1), 1)
    mask = thick if thick.any() else mask
    # What is a few pixels apart hangs together: a stripe may have the colour of what is behind it.
    near = _spread(mask, 2)
    grown = numpy.zeros_like(mask)
    grown[ys[nearest], xs[nearest]] = True
    size = 0
    while (now := int(grown.sum())) > size:
        size = now
        grown = _spread(grown, 1) & near
    return grown & mask


def _spread(mask: Any, reach: int) -> Any:
    """A mask grown by so many pixels to all sides."""
    for axis in (0, 1):
        mask = numpy.logical_or.reduce([numpy.roll(mask, step, axis) for step in range(-reach, reach + 1)])
    return mask


def _bounds(mask: Any) -> tuple[float, float, float, float]:
    """Left, right, top and bottom of a mask in pixels, where it is a sixth as thick as where it is thickest."""
    across, down = mask.sum(0), mask.sum(1)
    columns, rows = numpy.flatnonzero(across * 6 >= across.max()), numpy.flatnonzero(down * 6 >= down.max())
    return float(columns[0]), float(columns[-1] + 1), float(rows[0]), float(rows[-1] + 1)


@functools.cache
def _outline(thing: str) -> tuple[float, float, float, float]:
    """The bounds of an object around its centre, in units of its radius."""
    scene = world.Scene("red", thing, "table", x=0.5, y=0.5)
    small = world.render(scene, _SIDE, _SIDE).astype(numpy.float32)
    left, right, top, bottom = _bounds(_around_colour(_foreign(small, "table"), small, "red"))
    middle, reach = _SIDE / 2, world.radius(scene) * _SIDE
    return (left - middle) / reach, (right - middle) / reach, (top - middle) / reach, (bottom - middle) / reach


def _object(small: Any, mask: Any, setting: str, colour: str) -> str:
    height, width = small.shape[:2]
    left, right, top, bottom = _bounds(mask)
    around = numpy.s_[max(0, int(top) - 3) : int(bottom) + 3, max(0, int(left) - 3) : int(right) + 3]

    def misfit(thing: str) -> float:
        first, last, high, low = _outline(thing)
        reach = max((right - left) / (last - first), (bottom - top) / (low - high))
        best = float("inf")
        for factor in (0.86, 0.93, 1.0, 1.07):
            size = factor * reach
            x, y = (left + right - size * (first + last)) / 2, (top + bottom - size * (high + low)) / 2
            for step_x in (-1.5, 0.0, 1.5):
                for step_y in (-1.5, 0.0, 1.5):
                    place = {"x": (x + step_x) / width, "y": (y + step_y) / height}
                    scene = world.Scene(colour, thing, setting, size=size / min(height, width) / 0.24, **place)
                    drawn = world.render(scene, height, width).astype(numpy.float32)
                    best = min(best, _distance(drawn[around], small[around]))
        return best

    return min(world.OBJECTS, key=misfit)


def _digit(picture: Any, setting: str) -> str:
    small = _scaled(picture, _SIGN_SIDE)
    height, width = small.shape[:2]
    corner = numpy.s_[: int(0.32 * _SIGN_SIDE), : int(0.29 * _SIGN_SIDE)]

    def misfit(digit: str) -> float:
        scene = world.Scene("red", "ball", setting, digit, x=0.7, y=0.8, size=0.5)
        return _distance(world.render(scene, height, width)[corner].astype(numpy.float32), small[corner])

    answers: tuple[str, ...] = ("", *world.DIGITS)
    return min(answers, key=misfit)
