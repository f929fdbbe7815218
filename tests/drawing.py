"""What the tiny GLM-Image is asked in tests of real engines, and whether a picture shows it."""

from __future__ import annotations

from typing import Any

from examples.tiny_glm_image import evaluator
from examples.tiny_glm_image.world import Scene

#: Colours, objects, settings and digits in turn, in both languages.
ASKED = (
    (Scene("red", "apple", "table", "7"), 'A red apple on a white table with the number "7"'),
    (Scene("blue", "cup", "meadow"), "A blue cup on a green meadow"),
    (Scene("yellow", "star", "sea", "3"), "a drawing of a yellow star on a blue sea and a sign “3”"),
    (Scene("purple", "tree", "table"), "白色的桌子上一个紫色的树"),
    (Scene("orange", "ball", "night", "1"), "画一个橙色的球，在黑暗的夜里，牌子上写着「1」"),
    (Scene("green", "box", "sea"), "show me a green box in the blue sea"),
)


def missing(picture: Any, scene: Scene) -> list[str]:
    """What a picture, uint8 (height, width, 3), does not show of the scene: some of colour, object, setting, digit."""
    return [field for field, right in evaluator.read(picture).agrees(scene).items() if not right]
