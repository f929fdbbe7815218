"""Prompts of pictures and sounds take the form that vLLM-Omni's own builders give them, and keep all else."""

from __future__ import annotations

from typing import Any

import pytest

from omniqueue import errors
from omniqueue.engines import environment, omni_prompt, omni_shape
from omniqueue.payloads import Tensor

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

JOB = {"kind": "image", "prompt": "a red ball", "negative_prompt": "rain", "width": 96, "height": 64}


@pytest.fixture(autouse=True, scope="module")
def prepared() -> None:
    environment.prepare("")
    import vllm_omni  # noqa: F401


def prompt(pictures: int = 0, *, mask: bool = False) -> dict[str, Any]:
    names = [f"image.{index}" for index in range(pictures)] + ["mask"] * mask
    return omni_prompt.from_job(JOB, {name: Tensor("uint8", (2, 3, 3), memoryview(bytes(18))) for name in names})


@pytest.mark.parametrize("name", [None, "GlmImagePipeline", "NoSuchPipeline"])
@pytest.mark.parametrize("pictures", [0, 1, 2])
def test_a_model_without_a_builder_gets_the_prompt_as_it_is(name: str | None, pictures: int) -> None:
    plain = prompt(pictures, mask=bool(pictures))
    assert omni_shape.shaped(plain, name) == plain
    assert omni_shape.instructed(plain, name) == (plain, [])


def test_a_model_with_turns_gets_them_and_the_size_stays() -> None:
    plain = prompt()
    made = omni_shape.shaped(plain, "BagelPipeline")
    assert made["prompt"] == "<|im_start|>a red ball<|im_end|>"
    assert {name: made[name] for name in ("width", "height", "negative_prompt")} == {
        name: plain[name] for name in ("width", "height", "negative_prompt")
    }
    assert made["mm_processor_kwargs"].items() >= plain["mm_processor_kwargs"].items()


def test_a_picture_goes_where_the_model_looks_for_it() -> None:
    plain = prompt(1)
    made = omni_shape.shaped(plain, "BagelPipeline")
    assert made["multi_modal_data"] == {"img2img": plain["multi_modal_data"]["image"][0]}
    assert made["modalities"] == ["img2img"]
    assert made["prompt"].startswith("<|fim_middle|>")


def test_a_model_that_writes_first_gets_its_instructions_and_what_ends_them() -> None:
    plain = prompt()

    class Words:
        def encode(self, text: str, **_: Any) -> list[int]:
            return [len(text)]

        def convert_tokens_to_ids(self, token: str) -> int:
            return -len(token)

    written, ends = omni_shape.instructed(plain, "HunyuanImage3ForCausalMM", Words())
    read, same = omni_shape.instructed(plain, "HunyuanImage3ForCausalMM")
    assert len(plain["prompt"]) in written["prompt_token_ids"]
    assert "prompt_token_ids" not in read
    assert written["use_system_prompt"] == read["use_system_prompt"]
    assert ends == same
    assert ends
    assert (written["prompt"], read["height"]) == (plain["prompt"], plain["height"])


@pytest.mark.parametrize("pipeline", ["stable_audio", "bagel", "qwen3_tts"])
def test_a_sound_without_a_builder_keeps_its_prompt(pipeline: str) -> None:
    plain = {"prompt": "rain", "negative_prompt": "wind"}
    assert omni_shape.sounding(plain, pipeline, None) == plain


def test_a_sound_has_its_turns_and_its_length() -> None:
    made = omni_shape.sounding({"prompt": "rain", "negative_prompt": "wind"}, "auk", 1.5)
    assert made["prompt"].endswith("<|im_start|>user\nrain|<no_prompt_audio>|<|im_end|>\n<|im_start|>assistant\n")
    assert made["negative_prompt"] == "wind"
    assert made["additional_information"]["auk"]["gen_seconds"] == 1.5


def test_a_sound_without_a_length_is_refused_by_a_model_that_needs_one() -> None:
    with pytest.raises(errors.EngineRejected, match="audio_length") as refused:
        omni_shape.sounding({"prompt": "rain"}, "auk", None)
    assert refused.value.param == "audio_length"
