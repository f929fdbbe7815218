"""Sound as files: exact headers, both channels, clipping, and sounds that are none."""

from __future__ import annotations

import array
import io
import math
import struct
import wave

import av
import pytest

from omniqueue import audio, errors
from omniqueue.payloads import Tensor

RATE = 24_000


def sine(seconds: float = 0.5, channels: int | None = None, loudness: float = 0.5, rate: int = RATE) -> Tensor:
    """440 Hz, and 880 Hz in a second channel."""
    count = round(seconds * rate)
    rows = [
        array.array("f", (loudness * math.sin(2 * math.pi * 440 * (row + 1) * i / rate) for i in range(count)))
        for row in range(channels or 1)
    ]
    shape = (count,) if channels is None else (channels, count)
    return Tensor("float32", shape, b"".join(row.tobytes() for row in rows))


def samples(content: bytes) -> tuple[int, list[int]]:
    """Channels, and the samples of a WAV, interleaved."""
    with wave.open(io.BytesIO(content)) as file:
        return file.getnchannels(), memoryview(file.readframes(file.getnframes())).cast("h").tolist()


def test_a_wav_says_its_length_to_the_byte() -> None:
    content, rate, seconds = audio.encode(sine(), RATE, "wav")
    assert (rate, seconds) == (RATE, 0.5)
    assert len(content) == 44 + 24_000
    assert struct.unpack("<4sI4s4sIHHIIHH4sI", content[:44]) == (
        b"RIFF", len(content) - 8, b"WAVE", b"fmt ", 16, 1, 1, RATE, RATE * 2, 2, 16, b"data", 24_000,
    )  # fmt: skip
    assert content[44:] == audio.encode(sine(), RATE, "pcm")[0]


def test_the_samples_are_those_that_came_in() -> None:
    channels, found = samples(audio.encode(sine(), RATE, "wav")[0])
    assert channels == 1
    expected = [0.5 * math.sin(2 * math.pi * 440 * i / RATE) * 32768 for i in range(len(found))]
    assert max(abs(one - other) for one, other in zip(found, expected, strict=True)) <= 1


def test_both_channels_are_kept_apart() -> None:
    channels, found = samples(audio.encode(sine(channels=2), RATE, "wav")[0])
    assert channels == 2
    assert found[::2] == samples(audio.encode(sine(channels=1), RATE, "wav")[0])[1]
    assert found[1::2] != found[::2]


def test_what_is_too_loud_is_clipped_and_does_not_wrap() -> None:
    _, found = samples(audio.encode(sine(loudness=3.0), RATE, "wav")[0])
    assert (max(found), min(found)) == (32767, -32768)
    quiet = samples(audio.encode(sine(), RATE, "wav")[0])[1]
    assert all(one * other >= 0 for one, other in zip(found, quiet, strict=True))


@pytest.mark.parametrize("output_format", ["flac", "mp3", "opus", "aac"])
@pytest.mark.parametrize("rate", [8_000, 22_050, 37_800, 44_100, 96_000])
def test_a_rate_that_a_format_does_not_know_becomes_one_that_it_does(output_format: str, rate: int) -> None:
    content, said, seconds = audio.encode(sine(channels=2, rate=rate), rate, output_format)
    with av.open(io.BytesIO(content), "r") as container:
        stream = container.streams.audio[0]
        made = sum(frame.samples for frame in container.decode(stream))
        assert stream.layout.name == "stereo"
        assert made / stream.rate == pytest.approx(0.5, abs=0.15)
        assert stream.rate == (48_000 if output_format == "opus" else said)
    assert seconds == pytest.approx(0.5, abs=0.01)
    if output_format == "flac":
        assert said == rate


@pytest.mark.parametrize("speed", [0.25, 0.3, 1.0, 2.0, 2.7, 4.0])
def test_speed_is_the_ratio_of_the_lengths(speed: float) -> None:
    _, _, seconds = audio.encode(sine(4.0), RATE, "pcm", speed=speed)
    assert seconds == pytest.approx(4.0 / speed, rel=0.03)


def test_the_same_sound_gives_the_same_bytes() -> None:
    for output_format in audio.TYPES:
        once, again = (audio.encode(sine(), RATE, output_format)[0] for _ in range(2))
        assert once == again, output_format


@pytest.mark.parametrize(
    "sound",
    [
        Tensor("float32", (0,), b""),
        Tensor("float32", (3, 10), bytes(120)),
        Tensor("float32", (1, 1, 10), bytes(40)),
        Tensor("int16", (10,), bytes(20)),
    ],
)
def test_other_tensors_are_the_engines_error(sound: Tensor) -> None:
    with pytest.raises(errors.EngineError, match="sound"):
        audio.encode(sound, RATE, "wav")
