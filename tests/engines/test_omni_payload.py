"""Payloads are packed by the pipeline's own hook on what an engine emitted, stored, and given on whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from omniqueue import errors
from omniqueue.engines import omni_edges, omni_payload
from omniqueue.engines.base import StageOutput

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

_HOOKS = "vllm_omni.model_executor.stage_input_processors.qwen2_5_omni."
TO_TALKER = omni_edges.Edge(0, 1, omni_edges.PAYLOAD, "", hook=_HOOKS + "thinker2talker_full_payload")
TO_VOCODER = omni_edges.Edge(1, 2, omni_edges.PAYLOAD, "", hook=_HOOKS + "talker2code2wav_full_payload")
PROMPT = [5, 6, 7]


@pytest.fixture(name="torch", autouse=True)
def imported_torch() -> Any:
    from omniqueue.engines import environment

    environment.prepare("")
    import torch
    import vllm_omni  # noqa: F401

    return torch


def packer(edge: omni_edges.Edge, *, stop: tuple[int, ...] = ()) -> omni_payload.Packer:
    made = omni_payload.Packer(edge, SimpleNamespace())
    params = SimpleNamespace(stop_token_ids=list(stop), ignore_eos=False)
    made.submitted(
        SimpleNamespace(
            request_id="r-1f",
            external_req_id="r",
            prompt_token_ids=PROMPT,
            sampling_params=params,
            additional_information=None,
        )
    )
    return made


def step(tokens: list[int], **emitted: Any) -> Any:
    return SimpleNamespace(request_id="r-1f", new_token_ids=tokens, multimodal_output=emitted or None)


def test_steps_are_joined_and_split_at_the_prompts_end(torch: Any) -> None:
    rows = torch.arange(20, dtype=torch.float32).reshape(5, 4)
    thinker = packer(TO_TALKER)
    thinker.saw([step([11], hidden=rows[:3])])
    thinker.saw([step([12], hidden=rows[3:4])])
    thinker.saw([step([13], hidden=rows[4:])])
    payload = omni_payload.unpack(TO_TALKER, thinker.pack("r"))
    assert torch.equal(payload["embed"]["prefill"], rows[:3])
    assert torch.equal(payload["hidden_states"]["output"], rows[3:])
    assert payload["ids"] == {"prompt": PROMPT, "output": [11, 12, 13]}


def test_the_row_of_a_stop_token_is_left_out_as_in_the_worker(torch: Any) -> None:
    thinker = packer(TO_TALKER, stop=(13,))
    thinker.saw([step([11], hidden=torch.ones(3, 4)), step([13], hidden=torch.ones(1, 4))])
    payload = omni_payload.unpack(TO_TALKER, thinker.pack("r"))
    assert payload["ids"]["output"] == [11]


def test_a_payload_of_tokens_alone_becomes_the_vocoders_prompt() -> None:
    talker = packer(TO_VOCODER)
    talker.saw([step([100]), step([200]), step([8294])])
    payload = omni_payload.unpack(TO_VOCODER, talker.pack("r"))
    prompt = omni_payload.give({"prompt_token_ids": [0, 0]}, payload, generation=True)
    assert prompt["prompt_token_ids"] == [100, 200]


@pytest.mark.parametrize("tokens", [[], [8294], [8292, 8293]])
def test_a_hook_that_makes_nothing_fails_the_request_and_names_the_edge(tokens: list[int]) -> None:
    talker = packer(TO_VOCODER)
    talker.saw([step(tokens)])
    with pytest.raises(errors.EngineError, match=r"stage 1 -> stage 2: nothing to hand over.*talker2code2wav"):
        talker.pack("r")


def test_what_is_forgotten_is_gone(torch: Any) -> None:
    thinker = packer(TO_TALKER)
    thinker.saw([step([11], hidden=torch.ones(3, 4))])
    thinker.forget("r")
    thinker.forget("never there")
    thinker.saw([step([12], hidden=torch.ones(1, 4))])
    assert thinker._requests == thinker._inner == {}
    assert thinker._collector._pending_full_payload_send == {}


@pytest.mark.parametrize("stored", [StageOutput(), StageOutput({"payload": {"ids/output": [1]}})])
def test_a_missing_or_empty_payload_names_the_edge(stored: StageOutput) -> None:
    with pytest.raises(errors.EngineError, match=r"stage 0 -> stage 1: .*no payload"):
        omni_payload.unpack(TO_TALKER, stored)


def test_the_payload_wins_over_the_processor_and_leaves_the_rest() -> None:
    prompt = {"prompt_token_ids": [0], "additional_information": {"speaker": ["a"], "meta": {"x": 1, "y": 1}}}
    made = omni_payload.give(prompt, {"meta": {"y": 2, "next_stage_prompt_len": 3}}, generation=False)
    assert made["additional_information"] == {
        "speaker": ["a"],
        "meta": {"x": 1, "y": 2, "next_stage_prompt_len": 3},
    }
    assert made["prompt_token_ids"] == [0, 0, 0]
    assert prompt["prompt_token_ids"] == [0]
