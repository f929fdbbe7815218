"""A stage that is given another prompt than the router was: what the picture shows gives it away."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from omniqueue.engines.base import StageOutput
from tests import drawing
from tests.engines.stage_process import StageProcess

pytestmark = pytest.mark.engine

SCENE, PROMPT = drawing.ASKED[0]
OTHER_SCENE, OTHER_PROMPT = drawing.ASKED[2]


def job(prompt: str) -> dict[str, Any]:
    return {"kind": "image", "prompt": prompt, "n": 1, "seed": 42, "width": 256, "height": 256}


def tokens(ar: StageProcess, prompt: str) -> StageOutput:
    return ar.generate(job(prompt)).result()


def pixels(dit: StageProcess, prompt: str, source: StageOutput) -> Any:
    [tensor] = dit.generate(job(prompt), {0: source}).result().tensors.values()
    return numpy.frombuffer(tensor.buffer, numpy.uint8).reshape(tensor.shape)[..., :3]


def test_the_same_prompt_at_both_stages_is_drawn(ar: StageProcess, dit: StageProcess) -> None:
    assert drawing.missing(pixels(dit, PROMPT, tokens(ar, PROMPT)), SCENE) == []


def test_another_prompt_at_the_first_stage_is_noticed(ar: StageProcess, dit: StageProcess) -> None:
    drawn = pixels(dit, PROMPT, tokens(ar, OTHER_PROMPT))
    assert drawing.missing(drawn, SCENE) == ["colour", "object", "setting"]


def test_another_prompt_at_the_second_stage_is_noticed(ar: StageProcess, dit: StageProcess) -> None:
    drawn = pixels(dit, OTHER_PROMPT, tokens(ar, PROMPT))
    assert drawing.missing(drawn, SCENE) == ["digit"]
    assert drawing.missing(drawn, OTHER_SCENE) == ["colour", "object", "setting"]
