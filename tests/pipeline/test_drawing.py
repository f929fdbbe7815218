"""What is in the pictures that the product draws: a prompt that reaches a stage changed makes another picture."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest

from examples.tiny_glm_image import evaluator
from tests import drawing
from tests.pipeline.conftest import Product
from tests.pipeline.test_product import NAME, picture

pytestmark = pytest.mark.engine


def draw(product: Product, prompt: str, seed: int = 42) -> Any:
    return picture(
        product, {"model": NAME, "prompt": prompt, "size": "256x256", "seed": seed, "response_format": "b64_json"}
    )


def test_six_pictures_show_the_colour_object_setting_and_digit_that_were_asked(product: Product) -> None:
    with ThreadPoolExecutor(len(drawing.ASKED)) as clients:
        drawn = list(clients.map(lambda asked: draw(product, asked[1]), drawing.ASKED))
    wrong = {text: drawing.missing(one, scene) for one, (scene, text) in zip(drawn, drawing.ASKED, strict=True)}
    assert {text: fields for text, fields in wrong.items() if fields} == {}


def test_a_red_and_a_blue_apple_of_one_seed_lie_on_the_same_table(product: Product) -> None:
    red, blue = (draw(product, f"A {colour} apple on a white table") for colour in ("red", "blue"))
    assert (evaluator.read(red).colour, evaluator.read(blue).colour) == ("red", "blue")
    table = evaluator.surroundings(red, blue)
    assert 0.4 < table.mean() < 0.95
    difference = numpy.abs(red.astype(int) - blue.astype(int)).mean(axis=2)
    assert difference[table].mean() < 3.0
    assert difference[~table].mean() > 10 * difference[table].mean()
