"""Prompts from jobs and from earlier stages, with processors of every shape that vLLM-Omni has."""

from __future__ import annotations

from typing import Any

import pytest

from omniqueue import errors
from omniqueue.engines import omni_prompt
from omniqueue.engines.base import StageOutput, StageRequest
from omniqueue.payloads import Tensor

JOB = {"kind": "image", "prompt": "猫", "negative_prompt": "dog", "width": 96, "height": 64, "seed": 3}


SECOND = StageOutput({"text": "second"})


def build(processor: Any, diffusion: bool = True, sources: tuple[int, ...] = (0,), left: StageOutput = SECOND) -> Any:
    outputs = {0: StageOutput({"token_ids": [1, 2], "text": "first"}), 1: left}
    return omni_prompt.from_sources(
        StageRequest("j-1-1-0", JOB, 0, {}, outputs),
        2,
        sources,
        processor,
        diffusion=diffusion,
        requires_multimodal_data=True,
        context={"sampling_params": "the parameters", "target_model_config": "the config"},
    )


def test_the_size_is_told_twice() -> None:
    assert omni_prompt.from_job(JOB) == {
        "prompt": "猫",
        "negative_prompt": "dog",
        "modalities": ["image"],
        "height": 64,
        "width": 96,
        "mm_processor_kwargs": {"target_h": 64, "target_w": 96},
    }


def test_the_requests_pictures_go_where_vllm_omni_looks_for_them() -> None:
    def tensor(height: int, width: int, channels: int) -> Tensor:
        return Tensor("uint8", (height, width, channels), bytes([7]) * (height * width * channels))

    inputs = {"image.1": tensor(2, 3, 4), "image.0": tensor(4, 5, 3), "mask": tensor(4, 5, 1)}
    made = omni_prompt.from_job(JOB, inputs)["multi_modal_data"]
    assert made.keys() == {"image", "mask_image"}
    assert [(one.size, one.mode) for one in made["image"]] == [((5, 4), "RGB"), ((3, 2), "RGBA")]
    assert (made["mask_image"].size, made["mask_image"].mode, made["mask_image"].getpixel((4, 3))) == ((5, 4), "L", 7)


def test_a_text_job_has_a_prompt_and_nothing_else() -> None:
    assert omni_prompt.from_job({"kind": "text", "prompt": "hi", "negative_prompt": None}) == {"prompt": "hi"}


def test_without_a_processor_a_diffusion_stage_gets_the_first_prompt() -> None:
    assert build(None) == omni_prompt.from_job(JOB)


def test_without_a_processor_a_language_model_gets_the_tokens() -> None:
    assert build(None, diffusion=False) == {"prompt_token_ids": [1, 2]}


def test_a_processor_is_called_by_position_whatever_its_parameters_are_called() -> None:
    def processor(_outputs: Any, _prompt: Any, _multimodal: bool = False) -> Any:
        return {"ids": _outputs[0].outputs[0].cumulative_token_ids, "said": _prompt["prompt"], "mm": _multimodal}

    assert build(processor) == {"ids": [1, 2], "said": "猫", "mm": True}


def test_a_processor_that_asks_for_more_by_name_gets_it() -> None:
    def processor(
        outputs: Any, prompt: Any, multimodal: bool, _streaming_context: Any = 0, *, target_model_config: Any
    ) -> Any:
        return {"streaming": _streaming_context, "config": target_model_config}

    assert build(processor) == {"streaming": None, "config": "the config"}


def test_a_list_of_one_is_that_one() -> None:
    assert build(lambda outputs, prompt, mm: [{"prompt_token_ids": [0]}], diffusion=False) == {"prompt_token_ids": [0]}


def test_several_sources_come_in_the_order_of_the_topology() -> None:
    made = build(lambda got, prompt, mm: {"texts": [one.outputs[0].text for one in got]}, sources=(1, 0))
    assert made == {"texts": ["second", "first"]}


@pytest.mark.parametrize("nothing", [None, [], {}])
def test_no_input_is_an_error_that_names_the_edge(nothing: Any) -> None:
    with pytest.raises(errors.EngineError, match=r"stage 0 -> stage 2: .*no input"):
        build(lambda outputs, prompt, mm: nothing)


def test_two_inputs_for_one_request_are_an_error() -> None:
    with pytest.raises(errors.EngineError, match="2 inputs instead of one"):
        build(lambda outputs, prompt, mm: [{"a": 1}, {"a": 2}])


def test_a_processor_that_raises_fails_the_request_only() -> None:
    def processor(outputs: Any, prompt: Any, mm: bool) -> Any:
        raise KeyError("codes")

    with pytest.raises(errors.EngineError, match="processor failed: 'codes'"):
        build(processor)


def test_a_source_that_is_not_there_is_named() -> None:
    with pytest.raises(errors.EngineError, match="stage 2 is not there"):
        build(None, sources=(2,))


def test_an_output_with_nothing_in_it_is_named_whatever_the_processor_makes_of_it() -> None:
    empty = StageOutput({"token_ids": [], "text": "", "finish_reason": "stop", "usage": {"completion_tokens": 0}})
    for processor in (None, lambda outputs, prompt, mm: {"prompt": "what nobody planned"}):
        with pytest.raises(errors.EngineError, match="stage 0, 1 -> stage 2: the output of stage 1 is empty"):
            build(processor, sources=(0, 1), left=empty)


def test_a_restored_output_has_tokens_text_and_reason_where_processors_look() -> None:
    output = StageOutput(
        {
            "token_ids": [5],
            "cumulative_token_ids": [4, 5],
            "text": "b",
            "cumulative_text": "ab",
            "prompt_token_ids": [1],
            "finish_reason": "stop",
            "multimodal_output": {"meta/rate": 24000},
        }
    )
    restored = omni_prompt.restore("r", output)
    completion = restored.outputs[0]
    assert (completion.token_ids, completion.cumulative_token_ids) == ([5], [4, 5])
    assert (completion.text, completion.cumulative_text) == ("b", "ab")
    assert restored.prompt_token_ids == [1]
    assert restored.finished
    assert restored.multimodal_output == completion.multimodal_output == {"meta": {"rate": 24000}}


def test_a_restored_output_without_tensors_has_no_multimodal_output() -> None:
    assert omni_prompt.restore("r", StageOutput({"token_ids": [1]})).multimodal_output is None


class Template:
    """A tokenizer as far as conversations are concerned."""

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        if messages[0]["role"] == "system":
            raise ValueError("no system messages")
        return "".join(f"<{one['role']}>{one['content']}" for one in messages) + "<assistant>"


def test_a_conversation_becomes_a_prompt_by_the_models_template() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    job = {"messages": turns, "prompt": "c", "seed": 1}
    assert omni_prompt.conversed(job, Template()) == {**job, "prompt": "<user>a<assistant>b<user>c<assistant>"}
    with pytest.raises(errors.EngineRejected, match=r"messages: .*no system messages"):
        omni_prompt.conversed({"messages": [{"role": "system", "content": "a"}]}, Template())
