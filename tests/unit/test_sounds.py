"""Sounds from clients: whole ones of half a minute at most are taken as they are, everything else is refused."""

from __future__ import annotations

import array
import base64
import math

import pytest

from omniqueue import audio, errors, sounds
from omniqueue.payloads import Tensor

RATE_HZ = 16_000


def spoken(kind: str = "wav", seconds: float = 0.5) -> bytes:
    """A tone as a file."""
    count = int(seconds * RATE_HZ)
    tone = array.array("f", (math.sin(tick / 8) / 2 for tick in range(count)))
    return audio.encode(Tensor("float32", (count,), memoryview(tone).cast("B")), RATE_HZ, kind)[0]


@pytest.mark.parametrize("kind", ["wav", "flac", "mp3", "opus"])
def test_whole_sounds_are_taken_and_handed_on_as_they_came(kind: str) -> None:
    content = spoken(kind)
    sounds.check(content, "ref_audio")
    head, _, data = sounds.data_url(content).partition(";base64,")
    assert head == f"data:audio/{'ogg' if kind == 'opus' else kind}"
    assert base64.b64decode(data) == content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "must be a whole sound as WAV, FLAC, MP3 or Ogg"),
        (b"#EXTM3U\nfile:///etc/passwd\n", "must be a whole sound"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "must be a whole sound"),
        (b"RIFF\x24\0\0\0AVI ", "must be a whole sound"),
        (spoken("flac")[:40], "must be a whole sound"),
        (b"OggS" + b"\0" * 100, "must be a whole sound"),
        (spoken()[:44], "has no sound in it"),
        (spoken(seconds=sounds.MAX_S + 0.1), "is longer than 30 s"),
    ],
    ids=["empty", "playlist", "list", "film", "cut", "zeros", "silent", "long"],
)
def test_what_is_no_whole_sound_or_too_long_is_refused_by_name(content: bytes, words: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=words) as refused:
        sounds.check(content, "ref_audio")
    assert refused.value.param == "ref_audio"
    assert refused.value.code == "invalid_audio"
