"""The size grammar, the limits of a request, and what of it each stage is given."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniqueue import errors, params
from omniqueue.pipeline import FrameRule, Pipeline, SizeRule, Stage
from tests.unit import support

RULE = SizeRule(multiple=32, min_side=64, max_side=512, max_area=512 * 256, default=(256, 128))
AR = Stage(stage_id=0, name="ar", queue="q0", execution_type="llm_ar")
DIT = Stage(stage_id=1, name="dit", queue="q1", execution_type="diffusion")


@pytest.fixture
def pipe() -> Pipeline:
    return support.pipeline(2, size=RULE, max_n=4, max_steps=50, max_prompt_chars=100)


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"), [("64x64", (64, 64)), ("256x128", (256, 128)), ("512x256", (512, 256)), ("64x512", (64, 512))]
)
def test_a_size_is_width_x_height(text: str, size: tuple[int, int]) -> None:
    assert params.parse_size(text, RULE) == size


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "64", "64x", "x64", "64x64x64", "0x64", "64x0", "0x0", "64X64", "64×64", "64*64", "64 x 64",
        " 64x64", "64x64 ", "\t64x64", "64x64\n", "\n64x64", "64x64\0", "064x64", "64x064", "+64x64", "-64x64",
        "64x-64", "64.0x64", "6e1x64", "0x40x64", "64_0x64", "１２８x128", "128x１２８", "٦٤x64", "६४x64", "²x64",
        "auto", "1000000x64", "64x" + "9" * 5000,
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="size must be WIDTHxHEIGHT in pixels, such as 256x128") as caught:
        params.parse_size(text, RULE)
    assert caught.value.param == "size"
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("100x64", "multiples of 32"),
        ("64x65", "multiples of 32"),
        ("32x64", "from 64 to 512"),
        ("64x544", "from 64 to 512"),
        ("512x512", "262,144 pixels; at most 131,072"),
        ("999968x64", "from 64 to 512"),
    ],
)
def test_a_size_that_the_model_cannot_make_is_refused_and_says_why(text: str, says: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=says) as caught:
        params.parse_size(text, RULE, "dimensions")
    assert caught.value.param == "dimensions"


@given(st.text(max_size=12) | st.from_regex(r"[0-9]{1,4}[xX×][0-9]{1,4}", fullmatch=True))
def test_no_text_is_rounded_or_repaired(text: str) -> None:
    try:
        width, height = params.parse_size(text, RULE)
    except errors.InvalidRequest:
        return
    assert f"{width}x{height}" == text
    params.check_size(width, height, RULE)


# -- a picture's job ---------------------------------------------------------------------------------------------------


def test_a_job_has_the_defaults_that_belong_to_the_request_and_no_others(pipe: Pipeline) -> None:
    job = params.image_job(pipe, prompt="p", negative_prompt=None, size=None, n=None)
    assert job == {"kind": "image", "prompt": "p", "n": 1, "width": 256, "height": 128, "seed": job["seed"]}
    assert 0 <= job["seed"] < 2**31


def test_what_is_given_is_kept_as_it_is(pipe: Pipeline) -> None:
    job = params.image_job(
        pipe, prompt=" 苹果 ", negative_prompt="", size="64x96", n=4, seed=0, num_inference_steps=50, guidance_scale=0.0
    )
    assert job == {
        "kind": "image",
        "prompt": " 苹果 ",
        "negative_prompt": "",
        "n": 4,
        "seed": 0,
        "num_inference_steps": 50,
        "guidance_scale": 0.0,
        "width": 64,
        "height": 96,
    }


def test_seeds_differ_from_request_to_request(pipe: Pipeline) -> None:
    assert len({params.image_job(pipe, prompt="p")["seed"] for _ in range(20)}) > 15


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": " \t\n\u3000"}, "prompt"),
        ({"prompt": "p" * 101}, "prompt"),
        ({"prompt": "a\0b"}, "prompt"),
        ({"prompt": "a\ud800b"}, "prompt"),
        ({"negative_prompt": "n" * 101}, "negative_prompt"),
        ({"negative_prompt": "\udfff"}, "negative_prompt"),
        ({"negative_prompt": "\0"}, "negative_prompt"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 5}, "n"),
        ({"num_inference_steps": 51}, "num_inference_steps"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": -3}, "num_inference_steps"),
        ({"size": "64x64 "}, "size"),
    ],
)
def test_what_is_out_of_its_limits_is_refused_by_name(pipe: Pipeline, fields: dict[str, Any], param: str) -> None:
    given = fields if param == "prompt" else {"prompt": "p", **fields}
    with pytest.raises(errors.InvalidRequest, match=param) as caught:
        params.image_job(pipe, **given)
    assert (caught.value.param, caught.value.status) == (param, 400)


# -- what each stage gets ----------------------------------------------------------------------------------------------

JOB = {
    "kind": "image",
    "prompt": "p",
    "width": 64,
    "height": 32,
    "num_inference_steps": 7,
    "guidance_scale": 0.0,
    "temperature": 0.5,
    "max_tokens": 9,
    "seed": 40,
}


def test_each_stage_is_given_what_is_its_own() -> None:
    assert params.stage_params(JOB, AR, 0) == {"temperature": 0.5, "max_tokens": 9, "seed": 40}
    dit = {"width": 64, "height": 32, "num_inference_steps": 7, "guidance_scale": 0.0, "seed": 40}
    assert params.stage_params(JOB, DIT, 0) == dit


def test_what_was_not_asked_is_not_there_so_that_the_config_stands() -> None:
    assert params.stage_params({"prompt": "p", "temperature": None}, AR, 0) == {}
    assert params.stage_params({"prompt": "p"}, DIT, 3) == {}


def test_each_item_has_a_seed_of_its_own_in_every_stage() -> None:
    for stage in (AR, DIT):
        assert [params.stage_params(JOB, stage, index)["seed"] for index in range(4)] == [40, 41, 42, 43]


def test_the_largest_seed_and_item_stay_within_63_bits() -> None:
    most = params.stage_params({"seed": params.MAX_SEED}, AR, 1000)["seed"]
    assert most < 2**63


def test_what_is_said_for_one_stage_wins_there_and_only_there() -> None:
    job = {**JOB, "stage_params": {"0": {"temperature": 0.9, "top_k": 5}, "1": {"seed": 7}}}
    ar = params.stage_params(job, AR, 2)
    assert (ar["temperature"], ar["top_k"], ar["seed"]) == (0.9, 5, 42)
    assert params.stage_params(job, DIT, 2)["seed"] == 7
    assert params.stage_params(job, dataclasses.replace(AR, stage_id=2), 2)["temperature"] == 0.5


def test_no_parameter_belongs_to_both_families() -> None:
    assert not set(params.DIFFUSION_PARAMS) & set(params.LLM_PARAMS)


@pytest.mark.parametrize(
    ("seconds", "fps", "step", "count"),
    [(4, 16, 1, 64), (4, 16, 4, 65), (0.01, 16, 4, 1), (0.1, 16, 4, 5), (1 / 3, 24, 1, 8), (5, 23.976, 1, 120)],
)
def test_a_length_is_the_smallest_number_of_frames_that_lasts_so_long(
    seconds: float, fps: float, step: int, count: int
) -> None:
    rule = FrameRule(step=step, max_frames=500)
    assert params.frames_of(seconds, fps, rule) == count
    params.check_frames(count, rule)
    assert count / fps >= seconds - 1e-6


@pytest.mark.parametrize(("count", "step"), [(0, 1), (242, 1), (6, 4), (4, 4), (-1, 4)])
def test_frames_that_a_model_does_not_make_are_refused(count: int, step: int) -> None:
    with pytest.raises(errors.InvalidRequest) as refused:
        params.check_frames(count, FrameRule(step=step))
    assert refused.value.param == "num_frames"
