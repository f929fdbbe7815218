"""Two engines in two processes, joined by payloads, make bit for bit what vLLM-Omni makes in one go."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy
import pytest

from omniqueue.engines.base import StageOutput
from tests.engines.cases import CASES, Case
from tests.engines.reference import NativeReference
from tests.engines.stage_process import StageProcess

pytestmark = pytest.mark.engine

BASE = CASES[0]


def pixels(output: StageOutput) -> Any:
    tensor = output.tensors["image"]
    return numpy.frombuffer(tensor.buffer, dtype=numpy.uint8).reshape(tensor.shape)


@pytest.fixture(scope="module")
def tokens(ar: StageProcess) -> dict[str, StageOutput]:
    """The first stage's outputs of all cases, asked for at once."""
    answers = {case.name: ar.generate(case.job()) for case in CASES}
    return {name: answer.result() for name, answer in answers.items()}


@pytest.fixture(scope="module")
def pictures(dit: StageProcess, tokens: dict[str, StageOutput]) -> dict[str, StageOutput]:
    answers = {case.name: dit.generate(case.job(), {0: tokens[case.name]}) for case in CASES}
    return {name: answer.result() for name, answer in answers.items()}


def test_vllm_omni_finds_the_cpu_platform_by_itself(native_reference: NativeReference) -> None:
    assert native_reference.facts["platform"] == "CpuOmniPlatform"
    assert native_reference.facts["ours"]
    assert all(name.startswith("omniqueue.platforms") for name in native_reference.facts["ours"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_prompt_tokens_are_those_of_native_omni(
    case: Case, tokens: dict[str, StageOutput], native_reference: NativeReference
) -> None:
    assert tokens[case.name].data["prompt_token_ids"] == native_reference.tokens[case.name]["prompt_token_ids"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_image_tokens_are_those_of_native_omni(
    case: Case, tokens: dict[str, StageOutput], native_reference: NativeReference
) -> None:
    assert tokens[case.name].data["cumulative_token_ids"] == native_reference.tokens[case.name]["token_ids"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pixels_are_those_of_native_omni(
    case: Case, pictures: dict[str, StageOutput], native_reference: NativeReference
) -> None:
    mine = pixels(pictures[case.name])
    assert mine.shape == (case.height, case.width, 3)
    numpy.testing.assert_array_equal(mine, native_reference.pixels[case.name])


def test_resolved_parameters_are_what_was_asked(
    tokens: dict[str, StageOutput], pictures: dict[str, StageOutput]
) -> None:
    case = CASES[3]
    first, second = tokens[case.name].data["resolved"], pictures[case.name].data["resolved"]
    assert first["seed"] == case.seed
    assert first["temperature"] == 0.6  # from the stage config
    assert first["stop_token_ids"] == [16385]
    assert second["num_inference_steps"] == case.steps
    assert second["guidance_scale"] == case.guidance
    assert (second["width"], second["height"]) == (case.width, case.height)


# -- the comparison above can fail -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "a green ball on a blue sea with the number '4'"},
        {"seed": 43},
        {"width": 128},
        {"height": 96},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_requests_have_other_image_tokens(
    change: dict[str, Any], ar: StageProcess, tokens: dict[str, StageOutput]
) -> None:
    other = ar.generate(dataclasses.replace(BASE, **change).job()).result()
    assert other.data["cumulative_token_ids"] != tokens[BASE.name].data["cumulative_token_ids"]


def test_a_prompt_without_its_size_is_another_prompt(ar: StageProcess, tokens: dict[str, StageOutput]) -> None:
    unsized = {name: value for name, value in BASE.job().items() if name not in ("width", "height")}
    other = ar.generate(unsized, overrides={"max_tokens": 261}).result()
    mine = tokens[BASE.name]
    assert other.data["prompt_token_ids"] != mine.data["prompt_token_ids"]
    assert other.data["cumulative_token_ids"] != mine.data["cumulative_token_ids"]


def test_the_first_stage_must_be_told_the_size_beside_its_prompt(native_reference: NativeReference) -> None:
    told, untold = native_reference.tokens[CASES[3].name], native_reference.tokens["size untold"]
    assert told["prompt_token_ids"] == untold["prompt_token_ids"]
    assert told["token_ids"] != untold["token_ids"]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": 'a red ball on a blue sea with the number "5"'},
        {"seed": 43},
        {"steps": 5},
        {"guidance": 1.6},
        {"guidance": 1.0},
    ],
    ids=str,
)
def test_other_parameters_make_another_picture_of_the_same_tokens(
    change: dict[str, Any], dit: StageProcess, tokens: dict[str, StageOutput], pictures: dict[str, StageOutput]
) -> None:
    other = dit.generate(dataclasses.replace(BASE, **change).job(), {0: tokens[BASE.name]}).result()
    assert (pixels(other) != pixels(pictures[BASE.name])).mean() > 0.1


def test_parameters_that_are_left_out_fall_back_to_the_stage_config(
    dit: StageProcess, tokens: dict[str, StageOutput]
) -> None:
    case = CASES[3]
    asked = dit.generate(case.job(), {0: tokens[case.name]}).result()
    bare = {name: case.job()[name] for name in ("kind", "prompt", "width", "height")}
    plain = dit.generate(bare, {0: tokens[case.name]}).result()
    assert plain.data["resolved"]["num_inference_steps"] == 8
    assert (pixels(plain) != pixels(asked)).mean() > 0.1


def test_other_tokens_make_another_picture(
    dit: StageProcess, tokens: dict[str, StageOutput], pictures: dict[str, StageOutput]
) -> None:
    ids = list(tokens[BASE.name].data["cumulative_token_ids"])
    ids[-2] = (ids[-2] + 1) % 16384  # the last token of the picture; the one after it is never read
    changed = StageOutput({**tokens[BASE.name].data, "token_ids": ids, "cumulative_token_ids": ids})
    other = dit.generate(BASE.job(), {0: changed}).result()
    assert (pixels(other) != pixels(pictures[BASE.name])).mean() > 0.05


def test_glm_image_reads_no_negative_prompt(native_reference: NativeReference, dit: StageProcess, tokens: Any) -> None:
    """vLLM-Omni's pipeline takes an empty one whatever is asked, so a router must not accept it in silence."""
    case = dataclasses.replace(CASES[5], negative_prompt=None)
    same = dit.generate(case.job(), {0: tokens[case.name]}).result()
    numpy.testing.assert_array_equal(pixels(same), native_reference.pixels[case.name])


def test_every_case_has_a_picture_of_its_own(native_reference: NativeReference) -> None:
    seen = {picture.tobytes() for picture in native_reference.pixels.values()}
    assert len(seen) == len(native_reference.pixels)
    for name, picture in native_reference.pixels.items():
        assert picture.std() > 10, f"{name} is nearly one colour"
