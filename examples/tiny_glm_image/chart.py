"""The training curves as a picture, and several pictures as one sheet; Pillow is all it needs."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from PIL import Image, ImageDraw, ImageFont

_TITLES = {"vae": "autoencoder", "ar": "autoregressive model", "dit": "diffusion transformer"}
_WIDTH, _HEIGHT, _MARGIN = 420, 300, 48


def draw(curves: dict[str, Path], out: Path) -> None:
    """Loss by step for each training, on a logarithmic scale; dots are scenes and wordings held out."""
    sheet = Image.new("RGB", (_WIDTH * len(curves), _HEIGHT), "white")
    for index, (name, file) in enumerate(curves.items()):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        sheet.paste(_curve(_TITLES[name], lines), (index * _WIDTH, 0))
    sheet.save(out, optimize=True)


def _curve(title: str, lines: Sequence[dict[str, float]]) -> Image.Image:
    picture = Image.new("RGB", (_WIDTH, _HEIGHT), "white")
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(12)
    values = [line[key] for line in lines for key in ("loss", "held_out") if key in line]
    low, high = math.log(min(values) * 0.9), math.log(max(values) * 1.1)
    steps = lines[-1]["step"]

    def place(step: float, value: float) -> tuple[float, float]:
        across = _MARGIN + (_WIDTH - _MARGIN - 16) * step / steps
        return across, _HEIGHT - 36 - (_HEIGHT - 72) * (math.log(value) - low) / (high - low)

    pen.text((_MARGIN, 10), title, "black", ImageFont.load_default(14))
    for tick in range(5):
        value = math.exp(low + (high - low) * tick / 4)
        across, down = place(0, value)
        pen.line([(across, down), (_WIDTH - 16, down)], (225, 225, 225))
        pen.text((6, down - 7), f"{value:.3g}", "black", font)
        step = steps * tick // 4
        pen.text((place(step, value)[0] - 12, _HEIGHT - 28), f"{step:.0f}", "black", font)
    pen.line([place(line["step"], line["loss"]) for line in lines], (40, 90, 200), 2)
    for line in lines:
        if "held_out" in line:
            across, down = place(line["step"], line["held_out"])
            pen.ellipse([across - 3, down - 3, across + 3, down + 3], (215, 80, 40))
    return picture


def sheet(pictures: Sequence[Any], titles: Sequence[str], columns: int, side: int) -> Image.Image:
    """Pictures, uint8 (height, width, 3), scaled to squares of ``side`` pixels, with up to three lines under each."""
    rows, below = -(-len(pictures) // columns), 42
    made = Image.new("RGB", (columns * (side + 6) + 6, rows * (side + below) + 6), "white")
    pen, font = ImageDraw.Draw(made), ImageFont.load_default(10)
    for index, (picture, title) in enumerate(zip(pictures, titles, strict=True)):
        left, top = 6 + index % columns * (side + 6), 6 + index // columns * (side + below)
        made.paste(Image.fromarray(numpy.asarray(picture)).resize((side, side), Image.Resampling.LANCZOS), (left, top))
        pen.multiline_text((left, top + side + 1), "\n".join(textwrap.wrap(title, side // 6)), "black", font, spacing=1)
    return made
