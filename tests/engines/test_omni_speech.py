"""A text for a speech model becomes the prompt that vLLM-Omni's own server would have made of it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from omniqueue import errors
from omniqueue.payloads import Tensor
from tests.engines import checkpoints
from tests.unit.test_sounds import spoken

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """What makes prompts for the tiny Qwen3-TTS, given what it asks of a running engine."""
    folder = tmp_path_factory.mktemp("qwen3_tts")
    checkpoints.write("qwen3_tts", folder)
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES
    from vllm_omni.engine.arg_utils import register_omni_models_to_vllm
    from vllm_omni.model_executor.models.qwen3_tts.configuration_qwen3_tts import Qwen3TTSConfig

    from omniqueue.engines import omni_speech

    register_omni_models_to_vllm()
    source = OMNI_PIPELINES["qwen3_tts"]
    model = SimpleNamespace(model=str(folder), hf_config=Qwen3TTSConfig.from_pretrained(folder), async_chunk=False)
    stage = SimpleNamespace(stage_pipeline_config=source.get_stage(0), model_config=None, worker_type="ar")
    engine = SimpleNamespace(model_config=model, stage_configs=[stage], renderer=None, input_processor=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEAKER_SAMPLES_DIR", str(tmp_path_factory.mktemp("voices")))
        made = omni_speech.for_stage(engine, source, 0)
    assert made is not None
    assert omni_speech.for_stage(engine, source, 1) is None
    assert omni_speech.for_stage(engine, OMNI_PIPELINES["qwen2_5_omni"], 0) is None
    yield made
    made.close()


def prepared(speech: Any, **job: Any) -> Any:
    from vllm import SamplingParams

    return asyncio.run(speech.prepare(job, SamplingParams(max_tokens=24)))


def test_the_text_and_the_voice_are_beside_as_many_placeholders_as_the_model_fills(speech: Any) -> None:
    short, params = prepared(speech, prompt="say hello", voice="serena")
    long, _ = prepared(speech, prompt="say hello to the nice world", voice="serena")
    assert short["additional_information"]["text"] == ["say hello"]
    assert short["additional_information"]["speaker"] == ["serena"]
    assert 0 < len(short["prompt_token_ids"]) < len(long["prompt_token_ids"])
    assert params.max_tokens == 24


@pytest.mark.parametrize("voice", [None, "default"])
def test_without_a_voice_it_is_the_models_first(speech: Any, voice: str | None) -> None:
    prompt, _ = prepared(speech, prompt="say hello", voice=voice)
    assert prompt["additional_information"]["speaker"] == ["vivian"]


@pytest.mark.parametrize(
    ("job", "param", "words"),
    [
        ({"prompt": "say hello", "voice": "nobody"}, "voice", "serena, vivian"),
        ({"prompt": "", "voice": "serena"}, "prompt", "empty"),
        ({"messages": [{"role": "user", "content": "hello"}]}, "messages", "/v1/audio/speech"),
        ({"prompt": "say hello", "ref_audio": "http://127.0.0.1/voice.wav"}, "ref_audio", "data URL"),
        ({"prompt": "say hello", "language": "Klingon"}, "language", "English, German"),
        ({"prompt": "say hello", "instructions": "x" * 10_000}, "instructions", "too long"),
    ],
)
def test_what_the_model_does_not_take_is_refused(speech: Any, job: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(errors.EngineRejected, match=words) as refused:
        prepared(speech, **job)
    assert refused.value.param == param


def test_how_to_say_it_is_beside_the_text(speech: Any) -> None:
    prompt, _ = prepared(speech, prompt="say hello", language="german", instructions="whisper it")
    said = prompt["additional_information"]
    assert (said["language"], said["instruct"]) == (["German"], ["whisper it"])


def test_a_sound_that_came_with_the_request_is_handed_on_as_it_is() -> None:
    from omniqueue.engines import omni_speech

    content = spoken("flac")
    inputs = {"ref_audio": Tensor("uint8", (len(content),), memoryview(content))}
    request = omni_speech._request({"prompt": "hello", "ref_audio": True, "ref_text": "what it says"}, inputs)
    assert request.ref_audio == f"data:audio/flac;base64,{base64.b64encode(content).decode()}"
    assert request.ref_text == "what it says"
