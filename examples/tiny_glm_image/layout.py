"""How GLM-Image lays a picture out in tokens, and what the tokens of this world mean.

The prompt is followed by both grids' sizes in words; then the model writes a preview of about 16 x 16 cells, the
picture's own cells, and the end token. Rows and columns are told by three-part rotary positions. The layout is
vLLM-Omni's ``glm_image`` input processor and ``get_mrope_input_positions``, which a test compares with this.

GLM-Image's codebook is learned and its entries mean something. Here the meaning is given: an entry is a part of a
setting, of a sign or of an object of one colour, and a cell of 32 x 32 pixels has the entry of what is at its middle.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy
import torch

from examples.tiny_glm_image import parts, world

#: A cell is this many pixels wide and high.
CELL = 32
#: Rows and columns of 32 x 32 pixel cells that pictures are trained at: mostly 256 x 256 and 320 x 192 pixels.
SIZES = [(8, 8)] * 9 + [(6, 10)] * 8 + [(10, 6)] * 2 + [(1, 1), (2, 2), (4, 4), (4, 2), (3, 5), (8, 12)]
#: The largest picture, in cells.
MOST_CELLS = 256
#: Parts in each direction: of a setting, a sign, an object.
_SETTING, _SIGN, _OBJECT = 16, 6, 8
_COLOURS = list(world.COLOURS)
_FIRST_SIGN = len(world.SETTINGS) * _SETTING**2
_FIRST_OBJECT = _FIRST_SIGN + len(world.SETTINGS) * _SIGN**2
#: Entries of the codebook that are in use: 1024 parts of settings, 144 of signs and 3072 of objects.
CODES = _FIRST_OBJECT + len(_COLOURS) * len(world.OBJECTS) * _OBJECT**2
#: An object's parts reach a little over its edge, in units of its radius.
_REACH = 1.15


def preview(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of the preview of a picture of so many cells."""
    ratio = rows / columns
    return max(1, int(math.sqrt(ratio) * 16)), max(1, int(math.sqrt(1 / ratio) * 16))


def suffix(rows: int, columns: int) -> str:
    """What follows the prompt: both grids' sizes, and the token that begins an image."""
    small_rows, small_columns = preview(rows, columns)
    return f"<sop>{rows} {columns}<eop><sop>{small_rows} {small_columns}<eop><|dit_token_{parts.IMAGE_START}|>"


@functools.lru_cache(maxsize=1024)
def image_positions(rows: int, columns: int) -> Any:
    """Rotary positions of preview and picture, int64 (3, tokens), counted from the first token after the prompt."""
    grids, begin = [], 0
    for high, wide in (preview(rows, columns), (rows, columns)):
        row = torch.arange(high).repeat_interleave(wide)
        column = torch.arange(wide).repeat(high)
        grids.append(torch.stack([torch.zeros_like(row), row, column]) + begin)
        begin += max(high, wide)
    return torch.cat(grids, dim=1)


def codes(scene: world.Scene, rows: int, columns: int) -> Any:
    """The scene's tokens row by row, int64 (rows * columns). A sign has the same ones whatever its digit."""
    y, x = numpy.mgrid[0:rows, 0:columns] + 0.5
    unit = min(rows, columns)
    setting = world.SETTINGS.index(scene.setting)
    made = setting * _SETTING**2 + _part(y / rows, _SETTING) * _SETTING + _part(x / columns, _SETTING)
    if scene.digit:
        middle_x, middle_y, half_width, half_height = world.SIGN
        across, down = (x / unit - middle_x) / half_width, (y / unit - middle_y) / half_height
        part = _part((down + 1) / 2, _SIGN) * _SIGN + _part((across + 1) / 2, _SIGN)
        on_it = (abs(across) < 1) & (abs(down) < 1)
        made = numpy.where(on_it, _FIRST_SIGN + setting * _SIGN**2 + part, made)
    radius = world.radius(scene) * unit
    across, down = (x - scene.x * columns) / radius, (y - scene.y * rows) / radius
    part = _part((down / _REACH + 1) / 2, _OBJECT) * _OBJECT + _part((across / _REACH + 1) / 2, _OBJECT)
    thing = _COLOURS.index(scene.colour) * len(world.OBJECTS) + world.OBJECTS.index(scene.object)
    # A third of a cell more: what a cell shows of an object need not be at its middle.
    on_it = (abs(across) < 1 + 0.35 / radius) & (abs(down) < 1 + 0.35 / radius)
    made = numpy.where(on_it, _FIRST_OBJECT + thing * _OBJECT**2 + part, made)
    return torch.from_numpy(made.reshape(-1))


def confuse(codes: Any, share: float, random: numpy.random.Generator) -> Any:
    """Some of an object's cells made those of another object or colour at the same place; all else is as it was.

    A model that reads such cells cannot copy what the object is from its neighbours, and has to look at the prompt.
    """
    things = torch.from_numpy(random.integers(len(_COLOURS) * len(world.OBJECTS), size=codes.shape))
    hit = torch.from_numpy(random.random(codes.shape) < share) & (codes >= _FIRST_OBJECT)
    return torch.where(hit, _FIRST_OBJECT + things * _OBJECT**2 + (codes - _FIRST_OBJECT) % _OBJECT**2, codes)


def in_front(codes: Any) -> Any:
    """Bool: which of the tokens are parts of an object or a sign."""
    return codes >= _FIRST_SIGN


def _part(place: Any, count: int) -> Any:
    """Which of ``count`` equal parts of 0 to 1 a place is in, int64."""
    return numpy.clip((place * count).astype(numpy.int64), 0, count - 1)


def meanings(width: int, generator: Any) -> Any:
    """A start for embeddings, float32 (CODES, width): each entry the sum of random vectors of what it means.

    Entries that share a colour, an object, a setting or a place begin alike, as they would in a learned codebook.
    """
    code = torch.arange(CODES)
    settings = code < _FIRST_SIGN
    objects = code >= _FIRST_OBJECT
    on_sign, on_object = code - _FIRST_SIGN, code - _FIRST_OBJECT
    setting = torch.where(settings, code // _SETTING**2, on_sign // _SIGN**2)
    thing = on_object // _OBJECT**2
    place = torch.where(settings, code % _SETTING**2, torch.where(objects, on_object % _OBJECT**2, on_sign % _SIGN**2))
    side = torch.where(settings, _SETTING, torch.where(objects, _OBJECT, _SIGN))
    kind = settings.long() + 2 * objects.long()
    groups = [
        torch.where(objects, 4 + thing // len(world.OBJECTS), setting),
        torch.where(objects, thing % len(world.OBJECTS), 6 + kind),
        kind * _SETTING + place // side,
        kind * _SETTING + place % side,
    ]
    return sum(torch.randn(64, width, generator=generator)[group] for group in groups) / 2
