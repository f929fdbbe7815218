"""The world of the tiny GLM-Image: what is drawn is what is read, and what is held out stays out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy
import pytest
from PIL import Image, ImageFilter

from examples.tiny_glm_image import captions, evaluator, world

SIZES = ((256, 256), (192, 320), (320, 192), (512, 512), (128, 128))


def some(count: int, held_out: bool = False) -> list[world.Scene]:
    return list(itertools.islice(world.scenes(numpy.random.default_rng(5), held_out), count))


def test_a_scene_is_drawn_the_same_every_time_and_at_any_size() -> None:
    scene = world.Scene("red", "apple", "table", "7")
    assert (world.render(scene, 96, 160) == world.render(scene, 96, 160)).all()
    for height, width in SIZES:
        picture = world.render(scene, height, width)
        assert (picture.shape, picture.dtype) == ((height, width, 3), numpy.uint8)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_true_drawings_are_read_without_error(height: int, width: int) -> None:
    assert set(evaluator.own_error(some(24), height, width).values()) == {0.0}


def test_a_blurred_and_noisy_drawing_is_read_as_well() -> None:
    random = numpy.random.default_rng(0)
    for scene in some(16):
        blurred = Image.fromarray(world.render(scene, 256, 256)).filter(ImageFilter.GaussianBlur(2))
        noisy = numpy.clip(numpy.asarray(blurred) + random.normal(0, 8, (256, 256, 3)), 0, 255).astype(numpy.uint8)
        assert all(evaluator.read(noisy).agrees(scene).values()), scene


@pytest.mark.parametrize(
    "change", [{"colour": "blue"}, {"object": "tree"}, {"setting": "sea"}, {"digit": "8"}, {"digit": ""}]
)
def test_another_colour_object_setting_or_digit_is_noticed(change: dict[str, Any]) -> None:
    scene = world.Scene("red", "apple", "table", "3")
    agreed = evaluator.read(world.render(replace(scene, **change), 256, 256)).agrees(scene)
    assert [field for field, right in agreed.items() if not right] == list(change)


def test_a_setting_alone_has_no_object() -> None:
    reading = evaluator.read(world.background("meadow", 256, 256).astype(numpy.uint8))
    assert (reading.object, reading.colour, reading.setting) == ("", "", "meadow")


def test_only_the_object_differs_between_two_colours() -> None:
    red, blue = (world.render(world.Scene(colour, "apple", "table"), 256, 256) for colour in ("red", "blue"))
    around = evaluator.surroundings(red, blue)
    assert (red[around] == blue[around]).all()
    assert 0.5 < around.mean() < 0.9
    assert (red[~around] != blue[~around]).any()


def test_held_out_combinations_are_not_trained_and_every_word_of_them_is() -> None:
    held_out, trained = world.combinations(held_out=True), world.combinations(held_out=False)
    assert (len(held_out), len(trained)) == (24, 168)
    assert not set(held_out) & set(trained)
    for index in range(3):
        assert {one[index] for one in held_out} == {one[index] for one in trained}
    assert ("red", "apple", "table") in trained


def test_held_out_prompts_are_two_hundred_and_never_trained() -> None:
    held = captions.held_out_prompts()
    assert len({text for _, text in held}) == len(held) == 200
    assert not set(captions.WORDINGS) & set(captions.HELD_OUT_WORDINGS)
    known = set(world.combinations(held_out=False))
    assert not [text for scene, text in held if (scene.colour, scene.object, scene.setting) in known]


def test_captions_say_the_scene_and_quote_the_digit_alone() -> None:
    scene = world.Scene("orange", "apple", "sea", "4")
    assert captions.write_caption(scene, "{a} {c} {o} {s}.") == 'An orange apple on a blue sea with the number "4".'
    assert captions.write_caption(scene, "{s}的{c}{o}") == "蓝色的大海上的橙色苹果，牌子上写着「4」"
    assert captions.write_caption(replace(scene, digit=""), "{a} {c} {o} {s}", capital=False) == (
        "an orange apple on a blue sea"
    )
