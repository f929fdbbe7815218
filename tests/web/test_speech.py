"""Speech and sounds as files, in pieces and as events, with fake engines behind real stage hosts."""

from __future__ import annotations

import base64
import dataclasses
import io
import itertools
import json
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import pytest

from omniqueue import audio, media, params
from omniqueue.engines import fake
from omniqueue.engines.base import Progress, StageOutput, StageRequest
from omniqueue.payloads import Tensor
from omniqueue.pipeline import Pipeline, Stage
from tests.unit.test_sounds import spoken
from tests.web import live, support
from tests.web.live import Live

SPEECH, GENERATE = "/v1/audio/speech", "/v1/audio/generate"
VOICE = spoken()
VOICE_URL = f"data:audio/wav;base64,{base64.b64encode(VOICE).decode()}"


def diffusion(**changes: Any) -> Pipeline:
    """One stage that makes sound by diffusion, as far as anybody can tell."""
    stage = Stage(
        stage_id=0,
        name="dit",
        queue="fake_sound.stage0",
        engine="fake",
        execution_type="diffusion",
        final_output=True,
        final_output_type="audio",
        default_sampling_params={"extra_args": {"kept": 1}},
        max_num_seqs=4,
    )
    pipe = Pipeline("fake_sound", (stage,), served_model_names=("fake-sound",), max_audio_s=5.0, max_steps=50)
    return dataclasses.replace(pipe, **changes)


@pytest.fixture(scope="module")
def served(valkey: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    pipes = [live.shipped("fake_text"), live.shipped("fake_speech"), diffusion()]
    with live.running(valkey, tmp_path_factory.mktemp("speech"), *pipes) as running:
        yield running


def say(served: Live, path: str = SPEECH, **fields: Any) -> Any:
    response = served.post(path, json={"input": "hello", **fields})
    assert response.status_code == 200, response.json
    return response


def sound(content: bytes) -> tuple[str, int, int, int]:
    """Codec, rate, channels and samples."""
    with av.open(io.BytesIO(content), "r") as container:
        stream = container.streams.audio[0]
        samples = sum(frame.samples for frame in container.decode(stream))
        return stream.codec.name, stream.rate, stream.channels, samples


def test_without_a_format_it_is_a_wav_with_an_exact_header(served: Live) -> None:
    response = say(served)
    assert response.content_type == "audio/wav"
    assert response.content_length == len(response.data)
    with wave.open(io.BytesIO(response.data)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth(), file.getnframes()) == (
            24_000, 1, 2, 24_000,
        )  # fmt: skip
    assert len(response.data) == 44 + 48_000
    assert int.from_bytes(response.data[4:8], "little") == len(response.data) - 8


@pytest.mark.parametrize("output_format", list(audio.TYPES))
def test_every_format_that_is_documented_can_be_had(served: Live, output_format: str) -> None:
    response = say(served, response_format=output_format)
    if output_format == "pcm":
        assert response.content_type == "audio/pcm;rate=24000;channels=1"
        assert len(response.data) == 48_000
        return
    assert response.content_type == audio.TYPES[output_format]
    codec, rate, channels, samples = sound(response.data)
    assert codec.startswith({"wav": "pcm_s16le"}.get(output_format, output_format))
    assert rate == (48_000 if output_format == "opus" else 24_000)
    assert channels == 1
    assert samples / rate == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("speed", [0.25, 0.5, 1.5, 4.0])
def test_speed_changes_the_length_and_keeps_the_pitch(served: Live, speed: float) -> None:
    content = say(served, response_format="pcm", speed=speed).data
    samples = memoryview(content).cast("h")
    assert len(samples) / 24_000 == pytest.approx(1 / speed, rel=0.05)
    middle = samples[len(samples) // 4 : len(samples) // 4 * 3]
    crossings = sum(1 for one, other in itertools.pairwise(middle) if one < 0 <= other)
    assert crossings / (len(middle) / 24_000) == pytest.approx(440, rel=0.05)


def test_another_sample_rate_can_be_asked_for(served: Live) -> None:
    codec, rate, _, samples = sound(say(served, sample_rate=16_000).data)
    assert (codec, rate, samples) == ("pcm_s16le", 16_000, 16_000)


def test_voices_differ_and_default_is_none(served: Live) -> None:
    made = {voice: say(served, voice=voice, seed=1).data for voice in ("alloy", "echo", "nova", "default")}
    assert len(set(made.values())) >= 3
    assert made["default"] == say(served, seed=1).data


def test_the_voices_of_a_model_can_be_asked_for(served: Live) -> None:
    assert served.client.get("/v1/audio/voices").json == {"voices": ["alloy", "echo", "nova"]}
    assert served.client.get("/v1/audio/voices?model=fake-sound").json == {"voices": []}
    assert support.error_of(served.client.get("/v1/audio/voices?model=fake-text"), 400)["param"] == "model"
    support.error_of(served.client.get("/v1/audio/voices?model=nope"), 404)


def test_how_to_say_it_and_in_whose_voice_reaches_every_stage(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[StageRequest] = []
    generate = fake.FakeEngine.generate

    async def watched(self: fake.FakeEngine, request: StageRequest, progress: Progress) -> StageOutput:
        sound = bytes(request.inputs["ref_audio"].buffer)
        seen.append(dataclasses.replace(request, inputs={"ref_audio": Tensor("uint8", (len(sound),), sound)}))
        return await generate(self, request, progress)

    monkeypatch.setattr(fake.FakeEngine, "generate", watched)
    manner = {"language": "Auto", "instructions": "whisper it", "ref_text": "what it says"}
    job = served.job(say(served, **manner, ref_audio=VOICE_URL))
    assert {name: job.request[name] for name in manner} == manner
    assert job.request["ref_audio"] is True  # the sound itself is a payload, and not in the record
    assert [request.inputs["ref_audio"].buffer for request in seen] == [VOICE] * 3
    assert all(request.job["instructions"] == "whisper it" for request in seen)


def test_the_text_is_kept_from_the_result(served: Live) -> None:
    record = served.job(say(served, input="a b c"))
    [entry] = record.result["data"]
    assert "text" not in entry
    assert entry["seconds"] == 1.0
    assert record.request["modalities"] == ["audio"]


@pytest.mark.parametrize("output_format", ["wav", "mp3"])
@pytest.mark.parametrize("how", [{"stream": True}, {"stream_format": "audio"}])
def test_a_stream_has_one_header_and_no_length(served: Live, output_format: str, how: dict[str, Any]) -> None:
    whole = say(served, response_format=output_format, seed=1).data
    response = say(served, response_format=output_format, seed=1, **how)
    assert "Content-Length" not in response.headers
    assert response.data == whole
    if output_format == "wav":
        assert whole.count(b"RIFF") == 1


def test_events_bring_the_same_bytes_and_one_end(served: Live) -> None:
    whole = say(served, seed=1).data
    found = live.events(say(served, seed=1, stream_format="sse").response)
    bodies = [json.loads(data) for _, data in found]
    assert [body["type"] for body in bodies] == ["speech.audio.delta"] * (len(bodies) - 1) + ["speech.audio.done"]
    assert b"".join(base64.b64decode(body["audio"]) for body in bodies[:-1]) == whole


def test_events_of_a_job_that_fails_end_with_an_error(valkey: str, tmp_path: Path) -> None:
    with live.running(valkey, tmp_path, live.shipped("fake_speech", raise_on="RAISE")) as served:
        found = live.events(say(served, input="RAISE", stream_format="sse").response)
        assert [name for name, _ in found] == ["error"]
        body = json.loads(found[0][1])
        assert (body["type"], body["error"]["code"]) == ("speech.audio.error", "engine_error")
        support.error_of(served.post(SPEECH, json={"input": "RAISE"}), 500)


def test_events_begin_at_once_and_a_client_that_leaves_them_cancels_its_job(valkey: str, tmp_path: Path) -> None:
    with live.running(valkey, tmp_path, live.shipped("fake_speech", steps=100, delay_s=0.1)) as served:
        response = served.post(SPEECH, json={"input": "x", "stream_format": "sse"})
        assert next(iter(response.response)) == b": accepted\n\n"
        assert not served.job(response).state.terminal
        response.close()
        assert live.eventually(lambda: served.jobs()[0].state.terminal)
        assert served.jobs()[0].state.value == "cancelled"


def test_a_diffusion_model_is_told_length_start_and_steps(served: Live) -> None:
    fields = {"audio_length": 2.0, "audio_start": 1.0, "num_inference_steps": 7, "guidance_scale": 3.0}
    response = say(served, GENERATE, model="fake-sound", negative_prompt="noise", seed=5, **fields)
    assert sound(response.data)[3] == 48_000
    [stage] = served.job(response).stages
    assert stage.params == {
        "num_inference_steps": 7,
        "guidance_scale": 3.0,
        "seed": 5,
        "extra_args": {"kept": 1, "audio_start_in_s": 1.0, "audio_end_in_s": 3.0},
    }
    assert served.job(response).request["negative_prompt"] == "noise"
    assert served.job(response).request["seconds"] == 2.0, "where the prompt of a model such as AuK is made with it"


def test_a_file_that_is_gone_is_our_fault(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    write = media.MediaStore.write

    def lost(place: media.MediaStore, name: str, content: bytes) -> None:
        write(place, name, content)
        place.remove({"data": [{"file": name}]})

    monkeypatch.setattr(media.MediaStore, "write", lost)
    error = support.error_of(served.post(SPEECH, json={"input": "x"}), 500)
    assert "OMNIQUEUE_MEDIA_FS_URL" in error["message"]


BAD = [
    (SPEECH, {"input": ""}, "input"),
    (SPEECH, {"input": None}, "input"),
    (SPEECH, {"input": " \u3000"}, "input"),
    (SPEECH, {"input": "a\0"}, "input"),
    (SPEECH, {"input": "x" * 32_769}, "input"),
    (SPEECH, {"model": "fake-text"}, "model"),
    (SPEECH, {"voice": "nobody"}, "voice"),
    (SPEECH, {"voice": ""}, "voice"),
    (SPEECH, {"voice": "../../etc/passwd"}, "voice"),
    (SPEECH, {"voice": {"id": "x"}}, "voice"),
    (SPEECH, {"model": "fake-sound", "voice": "alloy"}, "voice"),
    (SPEECH, {"response_format": "ogg"}, "response_format"),
    (SPEECH, {"speed": 0.2}, "speed"),
    (SPEECH, {"speed": 4.1}, "speed"),
    (SPEECH, {"sample_rate": 7999}, "sample_rate"),
    (SPEECH, {"sample_rate": 48_001}, "sample_rate"),
    (SPEECH, {"sample_rate": 44_100, "response_format": "opus"}, "sample_rate"),
    (SPEECH, {"sample_rate": 8001, "response_format": "mp3"}, "sample_rate"),
    (SPEECH, {"sample_rate": 47_999, "response_format": "aac", "stream_format": "sse"}, "sample_rate"),
    (GENERATE, {"model": "fake-sound", "sample_rate": 22_050, "response_format": "opus"}, "sample_rate"),
    (SPEECH, {"stream_format": "raw"}, "stream_format"),
    (SPEECH, {"instructions": ""}, "instructions"),
    (SPEECH, {"instructions": "x" * 32_769}, "instructions"),
    (SPEECH, {"language": "x" * 65}, "language"),
    (SPEECH, {"language": 3}, "language"),
    (SPEECH, {"ref_audio": "x"}, "ref_audio"),
    (SPEECH, {"ref_audio": "file:///etc/passwd"}, "ref_audio"),
    (SPEECH, {"ref_audio": "http://127.0.0.1/voice.wav"}, "ref_audio"),
    (SPEECH, {"ref_audio": "data:audio/wav;base64,!"}, "ref_audio"),
    (SPEECH, {"ref_audio": "data:audio/wav;base64,UklGRg=="}, "ref_audio"),
    (SPEECH, {"ref_text": "what it says"}, "ref_text"),
    (SPEECH, {"ref_text": "a\0", "ref_audio": VOICE_URL}, "ref_text"),
    *((SPEECH, {"model": "fake-sound", name: "x"}, name) for name in params.SPEECH_FIELDS),
    (GENERATE, {"ref_audio": VOICE_URL}, "ref_audio"),
    (GENERATE, {"audio_length": 1.0}, "audio_length"),
    (GENERATE, {"negative_prompt": "x"}, "negative_prompt"),
    (GENERATE, {"model": "fake-sound", "audio_length": 5.1}, "audio_length"),
    (GENERATE, {"model": "fake-sound", "audio_length": 0}, "audio_length"),
    (GENERATE, {"model": "fake-sound", "audio_start": 1.0}, "audio_start"),
    (GENERATE, {"model": "fake-sound", "num_inference_steps": 51}, "num_inference_steps"),
    (GENERATE, {"model": "fake-sound", "guidance_scale": 0}, "guidance_scale"),
    (GENERATE, {"model": "fake-sound", "voice": "alloy"}, "voice"),
]


@pytest.mark.parametrize(("path", "change", "param"), BAD)
def test_what_cannot_be_honoured_is_refused_by_name_and_starts_nothing(
    served: Live, path: str, change: dict[str, Any], param: str
) -> None:
    before = len(served.jobs())
    error = support.error_of(served.post(path, json={"input": "x", **change}), 400)
    assert error["param"] == param, error
    assert len(served.jobs()) == before
