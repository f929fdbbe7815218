"""Sound as files: encoded by the last stage's worker with PyAV, which brings its encoders along."""

from __future__ import annotations

import io
import itertools
import struct
from collections.abc import Iterable
from typing import Any

from omniqueue import errors
from omniqueue.payloads import Tensor

#: Formats by the name clients use, each with its media type.
TYPES = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}
#: Formats whose pieces can be played as they come.
STREAMED = ("wav", "pcm")
#: Slowest and fastest speech, as OpenAI has it.
SPEED = (0.25, 4.0)
#: Lowest and highest ``sample_rate``, in Hz.
RATES = (8_000, 48_000)

#: Container and codec of what is compressed, and the rates its codec knows (None: any), in Hz.
_CODECS: dict[str, tuple[str, str, tuple[int, ...] | None]] = {
    "flac": ("flac", "flac", None),
    "mp3": ("mp3", "libmp3lame", (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)),
    "opus": ("ogg", "libopus", (8000, 12000, 16000, 24000, 48000)),
    "aac": ("adts", "aac", (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)),
}
#: Rates by format, for those that do not know every one.
FORMAT_RATES = {name: rates for name, (_, _, rates) in _CODECS.items() if rates is not None}
_LAYOUTS = {1: "mono", 2: "stereo"}
#: Samples that are converted at once.
_BLOCK = 48_000


def encode(
    audio: Tensor, rate: int, output_format: str, *, speed: float = 1.0, wanted_rate: int | None = None
) -> tuple[bytes, int, float]:
    """A file, its sample rate in Hz and its length in seconds, from float32 sound in -1 to 1.

    ``audio`` has shape (samples,) or (channels, samples), one or two channels. ``speed`` keeps the pitch. The rate
    changes only where the format does not know it, or where another is wanted. Raises EngineError for other sound.
    """
    samples, channels = _checked(audio)
    codec_rates = FORMAT_RATES.get(output_format)
    target = wanted_rate or rate
    if codec_rates is not None and target not in codec_rates:
        target = next((known for known in codec_rates if known > target), codec_rates[-1])
    frames = _converted(_frames(audio, rate, samples, channels), rate, channels, target, speed)
    if output_format in _CODECS:
        content, made = _compressed(frames, output_format, target, channels)
    else:
        data = b"".join(bytes(frame.planes[0])[: frame.samples * channels * 2] for frame in frames)
        made = len(data) // (2 * channels)
        content = data if output_format == "pcm" else wav_header(len(data), target, channels) + data
    return content, target, made / target


def wav_header(nbytes: int, rate: int, channels: int) -> bytes:
    """The header of a WAV file with ``nbytes`` bytes of 16-bit samples."""
    frame = 2 * channels
    facts = struct.pack("<IHHIIHH", 16, 1, channels, rate, rate * frame, frame, 16)
    return b"RIFF" + struct.pack("<I", 36 + nbytes) + b"WAVEfmt " + facts + b"data" + struct.pack("<I", nbytes)


def _checked(audio: Tensor) -> tuple[int, int]:
    channels = audio.shape[0] if len(audio.shape) == 2 else 1
    if audio.dtype != "float32" or len(audio.shape) not in (1, 2) or not audio.nbytes or channels not in _LAYOUTS:
        raise errors.EngineError(
            f"The engine's sound is {audio.dtype} {audio.shape}, not float32 of one or two channels."
        )
    return audio.shape[-1], channels


def _frames(audio: Tensor, rate: int, samples: int, channels: int) -> Iterable[Any]:
    """The sound in blocks, planar as it comes."""
    import av

    view = memoryview(audio.buffer).cast("B")
    for start in range(0, samples, _BLOCK):
        count = min(_BLOCK, samples - start)
        frame = av.AudioFrame(format="fltp", layout=_LAYOUTS[channels], samples=count, align=1)
        frame.sample_rate, frame.pts = rate, start
        for channel in range(channels):
            at = (channel * samples + start) * 4
            frame.planes[channel].update(bytes(view[at : at + count * 4]))
        yield frame


def _converted(frames: Iterable[Any], rate: int, channels: int, target: int, speed: float) -> Iterable[Any]:
    """16-bit interleaved frames at the target rate and speed; what lies outside -1 to 1 is clipped."""
    import av

    layout = _LAYOUTS[channels]
    graph = av.filter.Graph()
    nodes = [graph.add_abuffer(sample_rate=rate, format="fltp", layout=layout)]
    nodes += [graph.add("atempo", str(factor)) for factor in _tempos(speed)]
    nodes.append(graph.add("aresample", str(target)))
    nodes.append(graph.add("aformat", f"sample_fmts=s16:channel_layouts={layout}"))
    nodes.append(graph.add("abuffersink"))
    for one, other in itertools.pairwise(nodes):
        one.link_to(other)
    graph.configure()
    for frame in frames:
        graph.push(frame)
        yield from _pulled(graph)
    graph.push(None)
    yield from _pulled(graph)


def _pulled(graph: Any) -> Iterable[Any]:
    import av

    while True:
        try:
            yield graph.pull()
        except (av.error.BlockingIOError, av.error.EOFError):
            return


def _tempos(speed: float) -> list[float]:
    """One step of ffmpeg's filter changes the tempo by two at most without a loss of sound."""
    steps = []
    while speed > 2.0:
        steps.append(2.0)
        speed /= 2.0
    while speed < 0.5:
        steps.append(0.5)
        speed /= 0.5
    return steps if speed == 1.0 else [*steps, speed]


def _compressed(frames: Iterable[Any], output_format: str, rate: int, channels: int) -> tuple[bytes, int]:
    import av

    container_name, codec, _ = _CODECS[output_format]
    file = io.BytesIO()
    made = 0
    # Bit-exact: an Ogg file would otherwise have a number of its own drawn at random.
    with av.open(file, "w", format=container_name, options={"fflags": "+bitexact"}) as container:
        stream: Any = container.add_stream(codec, rate=rate, layout=_LAYOUTS[channels])
        for frame in frames:
            made += frame.samples
            frame.pts = None
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode(None):
            container.mux(packet)
    return file.getvalue(), made
