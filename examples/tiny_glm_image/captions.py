"""Captions of scenes, English and Chinese, in wordings for training and others that are held out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from examples.tiny_glm_image import world

_COLOURS_ZH = dict(zip(world.COLOURS, ("红色", "橙色", "黄色", "绿色", "蓝色", "紫色", "粉色", "棕色"), strict=True))
_OBJECTS_ZH = dict(zip(world.OBJECTS, ("苹果", "球", "盒子", "星星", "树", "杯子"), strict=True))
_SETTINGS_EN = {
    "table": ("on a white table", "on the white table"),
    "meadow": ("on a green meadow", "in the green meadow"),
    "sea": ("on a blue sea", "in the blue sea"),
    "night": ("in a dark night", "in the dark night"),
}
_SETTINGS_ZH = {
    "table": ("白色的桌子上", "白色桌子上"),
    "meadow": ("绿色的草地上", "绿色草地上"),
    "sea": ("蓝色的大海上", "蓝色大海上"),
    "night": ("黑暗的夜里", "黑夜里"),
}

#: What training is told. ``{a}`` is a or an, ``{o}`` the object, ``{c}`` its colour, ``{s}`` the setting.
WORDINGS = (
    "{a} {c} {o} {s}",
    "{a} {c} {o} {s}.",
    "a picture of {a} {c} {o} {s}",
    "a drawing of {a} {c} {o} {s}",
    "one {c} {o} {s}",
    "the {c} {o} {s}",
    "draw {a} {c} {o} {s}",
    "please paint {a} {c} {o} {s}",
    "show me {a} {c} {o} {s}",
    "{s}, {a} {c} {o}",
    "{s} there is {a} {c} {o}",
    "{a} {o}, {c}, {s}",
    "{a} {o} that is {c}, {s}",
    "there is {a} {c} {o} {s}",
    "the {o} {s} is {c}",
    "{s}, {a} {o}: the {o} is {c}",
    "{s}一个{c}的{o}",
    "{s}有一个{c}的{o}",
    "{s}的{c}{o}",
    "画一个{c}的{o}，在{s}",
    "一个{c}的{o}在{s}",
    "一张图：{s}的{c}{o}",
    "请画{s}的一个{c}{o}",
)
#: What only evaluation says.
HELD_OUT_WORDINGS = (
    "please draw {a} {c} {o} {s}",
    "a painting of {a} {c} {o} {s}.",
    "i want {a} {c} {o} {s}",
    "{s}, one {c} {o}",
    "{a} {o} {s}, the {o} is {c}",
    "{s}放着一个{c}的{o}",
    "请画一个{c}的{o}，在{s}",
    "一张画：{s}有一个{c}{o}",
)
_SIGNS = (
    ' with the number "{d}"',
    " and a sign “{d}”",
    ' with a sign that says "{d}"',
    ", with the digit '{d}'",
    "，牌子上写着「{d}」",
    "，还有数字“{d}”",
)


def words() -> list[str]:
    """The words that captions are made of, each to be one token: English ones with the space before them."""
    found = [
        f" {word}"
        for word in (
            *world.COLOURS,
            *world.OBJECTS,
            *world.SETTINGS,
            "white",
            "dark",
            "the",
            "in",
            "on",
            "an",
            "a",
            "is",
        )
    ]
    found += [" picture", " drawing", " there", " that", " sign", " number", " digit", " with", " and", " of", " one"]
    found += [*_COLOURS_ZH.values(), *_OBJECTS_ZH.values(), "白色", "桌子上", "草地上", "大海上", "黑", "夜里"]
    return [*found, "一个", "的", "“", "”", "，"]


def caption(scene: world.Scene, random: numpy.random.Generator, wordings: Sequence[str] = WORDINGS) -> str:
    """One of many ways to ask for the scene, in English or Chinese."""
    wording = wordings[int(random.integers(len(wordings)))]
    return write_caption(scene, wording, int(random.integers(2)), int(random.integers(6)), bool(random.integers(2)))


def write_caption(scene: world.Scene, wording: str, variant: int = 0, sign: int = 0, capital: bool = True) -> str:
    """The caption by choice: ``variant`` 0 or 1 of the setting's words, ``sign`` 0 to 5 of the sign's."""
    chinese = not wording.isascii()
    if chinese:
        words = {
            "c": _COLOURS_ZH[scene.colour],
            "o": _OBJECTS_ZH[scene.object],
            "s": _SETTINGS_ZH[scene.setting][variant],
        }
    else:
        words = {"c": scene.colour, "o": scene.object, "s": _SETTINGS_EN[scene.setting][variant]}
    after = wording.partition("{a} ")[2]
    next_word = words["c"] if after.startswith("{c}") else words["o"]
    text = wording.format(a="an" if next_word[0] in "aeiou" else "a", **words)
    if scene.digit:
        ending = "." if text.endswith(".") else ""
        text = text.removesuffix(".") + _SIGNS[4 + sign % 2 if chinese else sign % 4].format(d=scene.digit) + ending
    return text[0].upper() + text[1:] if capital else text


def held_out_prompts(count: int = 200) -> list[tuple[world.Scene, str]]:
    """Different prompts of combinations and wordings that training never saw, the same on every call."""
    known = world.combinations(held_out=True)
    found: dict[str, world.Scene] = {}
    index = 0
    while len(found) < count:
        colour, thing, setting = known[index % len(known)]
        turn = index // len(known)
        digit = world.DIGITS[(index // 2 + turn) % 10] if (turn + index) % 2 else ""
        scene = world.Scene(colour, thing, setting, digit)
        wording = HELD_OUT_WORDINGS[(turn + index) % len(HELD_OUT_WORDINGS)]
        text = write_caption(scene, wording, turn // 2 % 2, index, capital=index % 3 > 0)
        found.setdefault(text, scene)
        index += 1
    return [(scene, text) for text, scene in found.items()]
