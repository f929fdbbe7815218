"""Plain vLLM with a real small language model: chat template, many at once, aborts, and an end without leftovers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from omniqueue import configfile, errors
from omniqueue.engines import vllm
from omniqueue.engines.base import Engine
from tests.engines.stage_process import StageProcess

SMOLLM2 = "smollm2.yaml"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16}


def ask(question: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "text", "messages": [{"role": "user", "content": question}], **fields}


# -- without an engine -------------------------------------------------------------------------------------------------


def test_it_keeps_to_the_protocol() -> None:
    assert isinstance(vllm.VllmEngine(), Engine)


def test_a_stage_entry_becomes_engine_arguments() -> None:
    pipe = configfile.load(SMOLLM2)
    known = {"dtype", "max_num_seqs", "max_model_len", "max_num_batched_tokens", "enable_prefix_caching"}
    made = vllm.engine_arguments(pipe, pipe.stages[0], known, cpu=False)
    assert made == {
        "dtype": "bfloat16",
        "max_num_seqs": 16,
        "disable_log_stats": True,
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": True,
    }
    assert vllm.engine_arguments(pipe, pipe.stages[0], known, cpu=True)["enforce_eager"] is True


def test_an_argument_that_plain_vllm_lacks_is_named() -> None:
    pipe = configfile.load(SMOLLM2)
    with pytest.raises(errors.ConfigError, match=r"stages\[0\].max_model_len: .* did you mean model_len"):
        vllm.engine_arguments(pipe, pipe.stages[0], {"model_len", "max_num_seqs"}, cpu=True)


# -- with one ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def writer(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StageProcess]:
    stage = StageProcess(0, smollm2, tmp_path_factory.mktemp("writer"), SMOLLM2)
    try:
        stage.started()
        yield stage
    finally:
        stage.close()


@pytest.mark.engine
def test_it_answers_by_its_chat_template_in_pieces_that_make_the_whole(writer: StageProcess) -> None:
    answer = writer.generate(ask("What is the capital of France?"), overrides={**GREEDY, "logprobs": 2})
    output = answer.result()
    assert output.data["text"] == "The capital of France is Paris."
    assert output.data["finish_reason"] == "stop"
    # The template adds the model's own system message: seven words alone would be about eight tokens.
    assert output.data["usage"] == {"prompt_tokens": 37, "completion_tokens": 8}
    pieces = answer.said()
    assert "".join(piece["text"] for piece in pieces) == output.data["text"]
    assert sum(piece["tokens"] for piece in pieces) == 8
    assert len(output.data["logprobs"]) == 8
    assert output.data["logprobs"][0]["token"] == "The"
    assert [len(entry["top"]) for entry in output.data["logprobs"]] == [2] * 8


@pytest.mark.engine
def test_many_at_once_each_get_their_own_answer(writer: StageProcess) -> None:
    countries = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo"}
    asked = {
        city: writer.generate(ask(f"What is the capital of {name}?"), overrides=GREEDY)
        for name, city in countries.items()
    }
    for city, answer in asked.items():
        assert city in answer.result().data["text"]


@pytest.mark.engine
def test_a_seed_gives_the_same_words_again_and_another_seed_others(writer: StageProcess) -> None:
    def say(seed: int) -> str:
        params = {"temperature": 1.0, "max_tokens": 12, "seed": seed}
        return str(writer.generate(ask("Tell me something."), overrides=params).result().data["text"])

    assert say(1) == say(1)
    assert say(1) != say(2)


@pytest.mark.engine
def test_stop_and_length_end_it_and_say_so(writer: StageProcess) -> None:
    question = ask("What is the capital of France?")
    stopped = writer.generate(question, overrides={**GREEDY, "stop": ["France"]}).result()
    assert (stopped.data["text"], stopped.data["finish_reason"]) == ("The capital of ", "stop")
    short = writer.generate(question, overrides={**GREEDY, "max_tokens": 3}).result()
    assert (len(short.data["token_ids"]), short.data["finish_reason"]) == (3, "length")


@pytest.mark.engine
@pytest.mark.parametrize("how", ["cancel", "abort"])
def test_a_stopped_request_ends_soon(writer: StageProcess, how: str) -> None:
    stopped = writer.generate(ask("Tell me a very long story."), overrides={"min_tokens": 1500}, key=f"{how}ed")
    time.sleep(0.5)
    began = time.monotonic()
    writer.tell(how, request=stopped.key)
    with pytest.raises(errors.OmniqueueError, match="Cancelled"):
        stopped.result()
    assert time.monotonic() - began < 10.0


@pytest.mark.engine
@pytest.mark.parametrize(
    ("question", "params", "said", "param"),
    [
        ("hi " * 3000, {}, "messages: they have 3,0", "messages"),
        ("hi", {"max_tokens": 2048}, "max_tokens is 2,048", "max_tokens"),
        ("hi", {"temperature": -1.0}, "temperature", "temperature"),
        ("hi", {"temprature": 1.0}, "did you mean temperature", "temprature"),
        ("hi", {"logit_bias": {"999999": 1.0}}, "out-of-vocab", "logit_bias"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    writer: StageProcess, question: str, params: dict[str, Any], said: str, param: str
) -> None:
    with pytest.raises(errors.EngineRejected, match=said) as caught:
        writer.generate(ask(question), overrides=params).result()
    assert caught.value.param == param


@pytest.mark.engine
def test_an_engine_whose_process_is_killed_says_so_and_leaves_nothing(writer: StageProcess) -> None:
    """The last test of the module: it ends the engine."""
    assert "error" not in writer.tell("health").result(timeout=10.0)
    pids = writer.started()["facts"]["pids"]
    running = writer.generate(ask("Tell me a very long story."), overrides={"min_tokens": 1500})
    time.sleep(0.5)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(errors.EngineDead):
        running.result()
    assert writer.tell("health").result(timeout=10.0)["error"]["type"] == "EngineDead"
    assert writer.close() == []
    assert not any(psutil.pid_exists(pid) for pid in pids)
