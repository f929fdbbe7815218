"""Sounds that clients send, such as a voice to speak in: read through once, then kept as they came.

The only place that opens a client's sound, and only ever as bytes in hand.
"""

from __future__ import annotations

import base64
import io

from omniqueue import errors

#: Longest sound that is taken, in seconds; vLLM-Omni takes no longer one to speak like.
MAX_S = 30.0
#: How files begin, by PyAV's names. Nothing else is tried: some of its readers open what a file names.
_STARTS = {
    "wav": (b"RIFF",),
    "flac": (b"fLaC",),
    "ogg": (b"OggS",),
    "mp3": (b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2"),
}


class BadSound(errors.InvalidRequest):
    """The file is not a sound that can be read."""

    code = "invalid_audio"


def check(content: bytes, param: str) -> None:
    """Raise BadSound for what is no whole sound of WAV, FLAC, MP3 or Ogg, or is longer than half a minute."""
    import av

    wrong = f"{param} must be a whole sound as WAV, FLAC, MP3 or Ogg"
    kind = _kind(content)
    if kind is None:
        raise BadSound(f"{wrong}.", param=param)
    seconds = 0.0
    try:
        with av.open(io.BytesIO(content), "r", format=kind) as container:
            for frame in container.decode(audio=0):
                seconds += frame.samples / frame.sample_rate
                if seconds > MAX_S:
                    raise BadSound(f"{param} is longer than {MAX_S:g} s.", param=param)
    except (av.FFmpegError, ValueError, IndexError) as exc:
        raise BadSound(f"{wrong}: {exc}.", param=param) from None
    if not seconds:
        raise BadSound(f"{param} has no sound in it.", param=param)


def data_url(content: bytes) -> str:
    """The sound as engines take it, which open no addresses."""
    return f"data:audio/{_kind(content) or 'wav'};base64,{base64.b64encode(content).decode()}"


def _kind(content: bytes) -> str | None:
    return next((kind for kind, starts in _STARTS.items() if content.startswith(starts)), None)
