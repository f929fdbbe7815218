"""The official client, unmodified, against ``omniqueue up``: real text, sound and video on small checkpoints; fakes.

One start serves all of it, so the tests only ask; those that kill something use a fake pipeline of their own.
"""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import openai
import pytest
import yaml
from PIL import Image

from omniqueue import demo, topology
from tests.engines import reference

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore:The Sora API is scheduled")]

START_S = 300.0
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
#: Twenty words, one each 0.15 s, and a lease that lapses soon.
SLOW = {
    "base_config": "fake_text.yaml",
    "pipeline": "slow_text",
    "served_model_name": "slow-text",
    "lease_s": 1,
    "stages": [
        {"stage_id": 0, "engine": "fake", "engine_args": {"delay_s": 0.15, "steps": 20}, "final_output_type": "text"}
    ],
}
WORDS = " ".join(f"word{number}" for number in range(20))


@dataclass
class Served:
    """A running ``omniqueue up`` of seven pipelines, and the client."""

    port: int
    folder: Path
    #: An openai.OpenAI; Any, since its types know OpenAI's own models and sizes only.
    client: Any

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return json.load(answer)

    def post(self, path: str, **body: Any) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            content: bytes = answer.read()
            return content

    def job(self, completion_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/v1/jobs/{completion_id.rpartition('-')[2]}")
        return found


def config(folder: Path, name: str, **changes: Any) -> str:
    """A shipped config with changes, as a file."""
    changes.setdefault("base_config", f"{name}.yaml")
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**changes, "base_config": str(topology.shipped() / changes["base_config"])}))
    return str(path)


@pytest.fixture(scope="module")
def served(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("openai")
    small = reference.write_tiny_diffusion(folder / "checkpoints")
    configs = [
        config(folder, "smollm2", model=str(smollm2)),
        config(folder, "wan", model=str(small["wan"])),
        # The tiny one's longest.
        config(folder, "stable_audio", model=str(small["stable_audio"]), max_audio_s=2.9),
    ]
    configs += [config(folder, "slow_text", **SLOW), "fake_image", "fake_speech", "fake_video"]
    port = demo.free_port()
    command = [sys.executable, "-m", "omniqueue.cli", "up", *configs, "--port", str(port), "--run-dir", str(folder)]
    with open(folder / "up.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=reference.environment())
    try:
        deadline = time.monotonic() + START_S
        while "ready    http" not in (said := (folder / "up.log").read_text()):
            assert process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.2)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60.0)
        with client:
            yield Served(port, folder, client)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=90)


# -- models and errors -------------------------------------------------------------------------------------------------


def test_every_pipeline_is_a_model(served: Served) -> None:
    names = {model.id for model in served.client.models.list()}
    assert names == {"smollm2", "wan", "stable-audio", "slow-text", "fake-image", "fake-speech", "fake-video"}
    assert served.client.models.retrieve("wan").id == "wan"


def test_a_bad_field_is_a_bad_request_that_names_it(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        served.client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=9.0)
    assert (refused.value.param, refused.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.BadRequestError) as refused:
        served.client.audio.speech.create(model="fake-speech", voice="nobody", input="x")
    assert refused.value.param == "voice"


def test_a_conversation_that_is_too_long_for_the_model_is_a_bad_request(served: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi " * 4000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="messages: they have"):
            served.client.chat.completions.create(model="smollm2", messages=messages, stream=stream)


def test_an_unknown_model_is_not_found(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        served.client.chat.completions.create(model="nope", messages=QUESTION)
    assert missing.value.code == "model_not_found"


# -- text, really ------------------------------------------------------------------------------------------------------


def test_a_real_model_answers(served: Served) -> None:
    answer = served.client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=16)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (37, 8, 45)


def test_a_real_model_streams_its_answer(served: Served) -> None:
    stream = served.client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Count from one to twenty."}],
        temperature=0,
        max_tokens=48,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    # Tokens are gathered for an instant, so a chunk may hold several; all at the end would be one.
    assert sum(1 for text in texts if text) > 3
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens <= 48
    whole = served.client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Count from one to twenty."}],
        temperature=0,
        max_tokens=48,
    )
    assert "".join(texts) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == whole.choices[0].finish_reason


def test_a_real_model_honours_n_seed_stop_and_logprobs(served: Served) -> None:
    def ask(seed: int) -> list[str | None]:
        made = served.client.chat.completions.create(
            model="smollm2", messages=QUESTION, n=3, seed=seed, temperature=1.0, max_tokens=8
        )
        return [choice.message.content for choice in made.choices]

    first = ask(1)
    assert len(set(first)) > 1
    assert ask(1) == first
    assert ask(2)[:2] == first[1:]
    answer = served.client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, stop=["France"], logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].message.content == "The capital of "
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    entry = answer.choices[0].logprobs.content[0]
    assert (entry.token, entry.bytes, len(entry.top_logprobs)) == ("The", [84, 104, 101], 2)
    assert entry.logprob < 0


def test_a_client_that_leaves_cancels_its_job(served: Served) -> None:
    stream = served.client.chat.completions.create(
        model="slow-text", messages=[{"role": "user", "content": WORDS}], stream=True
    )
    completion = next(iter(stream)).id
    stream.close()
    deadline = time.monotonic() + 10
    while (state := served.job(completion)["status"]) not in ("cancelled", "succeeded"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert state == "cancelled"


def test_a_stream_survives_the_death_of_its_worker(served: Served) -> None:
    stream = served.client.chat.completions.create(
        model="slow-text", messages=[{"role": "user", "content": WORDS}], stream=True
    )
    text, killed, completion = "", False, ""
    for chunk in stream:
        completion = chunk.id
        text += chunk.choices[0].delta.content or ""
        if "word4" in text and not killed:
            worker = served.job(completion)["stages"][0]["worker"]
            os.kill(int(worker.rsplit(".", 2)[1]), signal.SIGKILL)
            killed = True
    assert text == WORDS
    assert served.job(completion)["stages"][0]["attempt"] == 2


# -- pictures, sound and video -----------------------------------------------------------------------------------------


def test_pictures_come_as_bytes_and_as_urls(served: Served) -> None:
    made = served.client.images.generate(model="fake-image", prompt="a boat", size="64x32", n=2)
    for entry in made.data:
        with Image.open(io.BytesIO(base64.b64decode(entry.b64_json))) as picture:
            assert picture.size == (64, 32)
    made = served.client.images.generate(model="fake-image", prompt="a boat", response_format="url")
    assert made.data
    with urllib.request.urlopen(str(made.data[0].url), timeout=30) as answer:
        assert answer.headers["Content-Type"] == "image/png"


def test_speech_goes_to_a_file_and_is_streamed(served: Served, tmp_path: Path) -> None:
    speech = served.client.audio.speech
    path = tmp_path / "speech.mp3"
    with speech.with_streaming_response.create(
        model="fake-speech", voice="alloy", input="Hello there", response_format="mp3"
    ) as answer:
        answer.stream_to_file(path)
    with av.open(str(path)) as container:
        assert container.streams.audio[0].codec.name.startswith("mp3")
    with speech.with_streaming_response.create(
        model="fake-speech", voice="nova", input="Hello there", response_format="wav", extra_body={"stream": True}
    ) as answer:
        content = b"".join(answer.iter_bytes(1024))
    with wave.open(io.BytesIO(content)) as file:
        assert file.getnframes() == 24_000
    whole = speech.create(model="fake-speech", voice="nova", input="Hello there", response_format="pcm", speed=2.0)
    assert len(whole.read()) == pytest.approx(24_000, rel=0.05)


def test_a_real_model_makes_a_stereo_sound(served: Served) -> None:
    fields = {"model": "stable-audio", "input": "rain on a roof", "audio_length": 1.0, "num_inference_steps": 3}
    made = [served.post("/v1/audio/generate", seed=seed, **fields) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]
    with wave.open(io.BytesIO(made[0])) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 44_100, 44_100)
        samples = memoryview(file.readframes(44_100)).cast("h")
    assert samples[::2].tolist() != samples[1::2].tolist()
    with pytest.raises(openai.BadRequestError) as refused:
        served.client.post("/audio/generate", body={**fields, "audio_length": 3.0}, cast_to=object)
    assert refused.value.param == "audio_length"


def test_a_video_is_made_polled_downloaded_and_deleted(served: Served, tmp_path: Path) -> None:
    videos = served.client.videos
    video = videos.create_and_poll(
        model="fake-video",
        prompt="a boat",
        seconds="4",
        size="320x192",
        poll_interval_ms=100,
    )
    assert (video.status, video.progress, video.seconds) == ("completed", 100, "4")
    path = tmp_path / "video.mp4"
    videos.download_content(video.id).write_to_file(path)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height, stream.frames) == (320, 192, 32)
    assert video.id in [one.id for one in videos.list()]
    assert videos.delete(video.id).deleted is True
    with pytest.raises(openai.NotFoundError):
        videos.retrieve(video.id)


def test_a_real_model_makes_a_video(served: Served) -> None:
    more = {"num_frames": 5, "fps": 8, "num_inference_steps": 2, "seed": 1, "negative_prompt": "rain"}
    video = served.client.videos.create_and_poll(
        model="wan",
        prompt="a boat",
        size="48x32",
        extra_body=more,
        poll_interval_ms=100,
    )
    assert video.status == "completed", video.error
    content = served.client.videos.download_content(video.id).read()
    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height, stream.frames, float(stream.average_rate or 0)) == (48, 32, 5, 8.0)
    with pytest.raises(openai.BadRequestError) as refused:
        served.client.videos.create(model="wan", prompt="a boat", extra_body={"num_frames": 6})
    assert refused.value.param == "num_frames"
