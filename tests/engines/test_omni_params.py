"""Request over stage config, the pipeline's constraints last, and nothing dropped in silence."""

from __future__ import annotations

from typing import Any

import pytest

from omniqueue import errors
from omniqueue.engines import environment, omni_params

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

GLM = "vllm_omni.model_executor.stage_input_processors.glm_image.ar2diffusion"


@pytest.fixture(scope="module")
def tokens() -> Any:
    """A language-model stage's defaults, as its stage config gives them."""
    environment.prepare("")
    import vllm_omni  # noqa: F401
    from vllm import SamplingParams

    return SamplingParams(temperature=0.9, top_p=0.75, stop_token_ids=[16385], max_tokens=4353, seed=42)


@pytest.fixture(scope="module")
def diffusion() -> Any:
    environment.prepare("")
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    return OmniDiffusionSamplingParams(seed=42, num_inference_steps=50, guidance_scale=1.5, height=1024, width=1024)


def test_the_request_wins_over_the_config_and_the_rest_stays(tokens: Any) -> None:
    params = omni_params.resolve(tokens, {"seed": 7, "temperature": 0.5}, {})
    assert (params.seed, params.temperature, params.top_p, params.max_tokens) == (7, 0.5, 0.75, 4353)
    assert tokens.seed == 42


def test_the_pipelines_constraints_win_and_its_stop_tokens_are_added(tokens: Any) -> None:
    params = omni_params.resolve(tokens, {"stop_token_ids": [5], "detokenize": False}, {"stop_token_ids": [8294, 5]})
    assert params.stop_token_ids == [5, 8294]
    assert omni_params.resolve(tokens, {"detokenize": False}, {"detokenize": True}).detokenize is True


def test_a_language_model_answers_once_at_the_end(tokens: Any) -> None:
    assert omni_params.resolve(tokens, {}, {}).output_kind.name == "FINAL_ONLY"


def test_a_diffusion_stage_makes_one_output(diffusion: Any) -> None:
    params = omni_params.resolve(diffusion, {"num_inference_steps": 4, "width": 64}, {})
    assert (params.num_inference_steps, params.width, params.height) == (4, 64, 1024)
    assert params.num_outputs_per_prompt == 1


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("temprature", 1, "did you mean temperature"),
        ("guidance_scale", 2.0, "no parameter 'guidance_scale'"),
        ("n", 2, "no parameter 'n'"),
        ("output_kind", 1, "no parameter"),
        ("_eos_token_id", 3, "no parameter"),
        ("max_tokens", "many", "max_tokens: Expected"),
        ("seed", 1.5, "seed: Expected"),
        ("top_p", 7.0, "top_p"),
    ],
)
def test_a_language_model_refuses_what_it_does_not_know(tokens: Any, name: str, value: Any, said: str) -> None:
    with pytest.raises(errors.EngineRejected, match=said):
        omni_params.resolve(tokens, {name: value}, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1.0),
        ("num_outputs_per_prompt", 4),
        ("lora_request", {"lora_path": "/etc"}),
        ("latents", [0.0]),
        ("generator", 1),
        ("past_key_values", []),
        ("quality", "medium"),
    ],
)
def test_a_diffusion_stage_refuses_what_is_not_the_clients(diffusion: Any, name: str, value: Any) -> None:
    with pytest.raises(errors.EngineRejected, match=name):
        omni_params.resolve(diffusion, {name: value}, {})


def test_json_keys_of_a_logit_bias_become_numbers(tokens: Any) -> None:
    assert omni_params.resolve(tokens, {"logit_bias": {"16385": -100}}, {}).logit_bias == {16385: -100.0}


def test_what_was_used_is_json(tokens: Any, diffusion: Any) -> None:
    used = omni_params.describe(omni_params.resolve(tokens, {"seed": 7}, {}))
    assert used == {"temperature": 0.9, "top_p": 0.75, "stop_token_ids": [16385], "max_tokens": 4353, "seed": 7}
    used = omni_params.describe(omni_params.resolve(diffusion, {"guidance_scale": 3}, {}))
    assert used == {"seed": 42, "num_inference_steps": 50, "guidance_scale": 3.0, "height": 1024, "width": 1024}


@pytest.mark.parametrize(
    ("height", "width", "count"), [(1024, 1024, 1281), (64, 64, 261), (128, 64, 22 * 11 + 8 + 1), (32, 32, 258)]
)
def test_a_pictures_tokens_are_counted_by_the_readers_processor(height: int, width: int, count: int) -> None:
    assert omni_params.token_limit((GLM,), {"height": height, "width": width}) == count


def test_without_a_size_or_without_a_count_there_is_no_limit() -> None:
    assert omni_params.token_limit((GLM,), {"prompt": "x"}) is None
    assert omni_params.token_limit(("json.decoder.JSONDecoder",), {"height": 64, "width": 64}) is None


@pytest.mark.parametrize(("configured", "limit", "used"), [(4353, 261, 261), (100, 261, 100), (None, 261, 261)])
def test_the_limit_never_raises_max_tokens(tokens: Any, configured: int | None, limit: int, used: int) -> None:
    params = omni_params.resolve(tokens, {"max_tokens": configured}, {})
    omni_params.limit_tokens(params, limit)
    assert params.max_tokens == used
    assert params.min_tokens == min(limit - 1, used)


def test_the_size_is_told_beside_the_prompt(tokens: Any) -> None:
    params = omni_params.resolve(tokens, {"extra_args": {"voice": "a"}}, {})
    omni_params.tell_size(params, {"height": 96, "width": 64})
    assert params.extra_args == {"voice": "a", "target_h": 96, "target_w": 64}
