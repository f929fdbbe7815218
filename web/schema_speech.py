"""POST /v1/audio/speech and /v1/audio/generate: what a request may say."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from omniqueue import audio, params, sounds
from web import answers, schema

SLOWEST, FASTEST = audio.SPEED
LOWEST_HZ, HIGHEST_HZ = audio.RATES
_EXTRA = "Where the model's extra_fields list it."
#: A sound by its address.
Sample = Annotated[
    str,
    Meta(
        max_length=1_000_000,
        description=f"data URL, or http(s) where allowed: WAV, FLAC, MP3 or Ogg of at most {sounds.MAX_S:g} s.",
    ),
]


class Sound(schema.Common, frozen=True, kw_only=True):
    """What every request for sound may say."""

    input: Annotated[str, Meta(description="What to say, or the sound to make; a model's longest is max_prompt_chars.")]
    response_format: Literal["wav", "pcm", "flac", "mp3", "opus", "aac"] = "wav"
    speed: Annotated[float, Meta(ge=SLOWEST, le=FASTEST, description="Faster above 1; the pitch stays.")] = 1.0
    sample_rate: (
        Annotated[
            int,
            Meta(
                ge=LOWEST_HZ,
                le=HIGHEST_HZ,
                description="In Hz; without it the model's own, or the next that the format knows.",
            ),
        ]
        | None
    ) = None
    stream: Annotated[bool, Meta(description="Send the file in pieces as soon as it is made.")] | None = None
    stream_format: (
        Annotated[Literal["audio", "sse"], Meta(description="sse: as server-sent events, which begin at once.")] | None
    ) = None
    seed: Annotated[int, Meta(ge=0, le=params.MAX_SEED)] | None = None


class Speech(Sound, frozen=True, kw_only=True):
    """POST /v1/audio/speech."""

    voice: Annotated[str, Meta(description="One of the model's voices (GET /v1/models), or default.")] | None = None
    language: (
        Annotated[str, Meta(min_length=1, max_length=64, description=f"One that the model speaks, or Auto. {_EXTRA}")]
        | None
    ) = None
    instructions: (
        Annotated[str, Meta(min_length=1, description=f"How to say it, in words of your own. {_EXTRA}")] | None
    ) = None
    ref_audio: Annotated[Sample, Meta(description=f"A voice to speak in. {_EXTRA}")] | None = None
    ref_text: Annotated[str, Meta(min_length=1, description=f"What is said in ref_audio. {_EXTRA}")] | None = None


class AudioGeneration(Sound, frozen=True, kw_only=True):
    """POST /v1/audio/generate: sound by a diffusion model, from a description."""

    audio_length: Annotated[float, Meta(gt=0, le=3600, description="In seconds, before speed.")] | None = None
    audio_start: (
        Annotated[float, Meta(ge=0, le=3600, description="Where it begins in the model's timeline, in seconds.")] | None
    ) = None
    negative_prompt: str | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, Meta(gt=0, le=1000)] | None = None


class Voices(answers.Answer, frozen=True, kw_only=True):
    """The names that ``voice`` may be; ``default`` is every model's own."""

    voices: list[str]
