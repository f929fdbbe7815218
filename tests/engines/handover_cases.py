"""The pipelines that are served stage by stage and compared with vLLM-Omni in one go, and the requests for each.

It imports nothing of omniqueue's and no engine: ``native_pipeline.py``, which is vLLM-Omni's own, reads it as well.
"""

from __future__ import annotations

import base64
import io
import math
import struct
import wave
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy


@dataclass(frozen=True)
class Request:
    """One request in both forms: the prompt as vLLM-Omni takes it, and the job as omniqueue's router writes it."""

    name: str
    prompt: Mapping[str, Any]
    job: Mapping[str, Any]
    #: Goes to every stage, as the job's seed does; also seeds the generator of stages that draw from the global one.
    seed: int = 42
    #: What vLLM-Omni's own client gives a stage beside its defaults, by stage id; omniqueue finds it in the job.
    params: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    #: The size in pixels (width, height) of a picture that comes with the request; see :func:`shown`.
    picture: tuple[int, int] | None = None


@dataclass(frozen=True)
class Pipeline:
    """A pipeline by the name of its checkpoint writer and stage config in ``tests/engines/checkpoints``."""

    name: str
    requests: tuple[Request, ...]
    #: Stages whose outputs native ``Omni`` and omniqueue must agree on, with what of them ("tokens", "audio", "image").
    compared: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    #: What vLLM-Omni's code for the model reads from the environment; {model} stands for the checkpoint's folder.
    environment: Mapping[str, str] = field(default_factory=dict)

    def variables(self, model: str) -> dict[str, str]:
        """The environment of processes that load the checkpoint."""
        return {name: value.format(model=model) for name, value in self.environment.items()}


def text(name: str, prompt: str, *, seed: int = 42, **more: Any) -> Request:
    """A request of nothing but a text, answered by whatever the pipeline ends in; ``more`` goes into both forms."""
    return Request(name, {"prompt": prompt, **more}, {"kind": "speech", "prompt": prompt, "seed": seed, **more}, seed)


def shown(request: Request) -> Any:
    """The picture that comes with a request, uint8 (height, width, 3): a slope in each colour."""
    import numpy

    assert request.picture is not None
    width, height = request.picture
    x, y = numpy.meshgrid(numpy.arange(width), numpy.arange(height))
    return numpy.stack([x * 255 // width, y * 255 // height, (x * y * request.seed) % 256], axis=-1).astype(numpy.uint8)


def painting(
    name: str,
    prompt: str,
    width: int,
    height: int,
    *,
    seed: int,
    steps: int,
    guidance: float | None = None,
    stage: int = 1,
    picture: tuple[int, int] | None = None,
    tokens: int | None = None,
    **more: Any,
) -> Request:
    """A request for a picture of a size in pixels.

    ``stage`` is the one that paints. ``tokens`` are how many a picture has, where the first stage writes them, which
    vLLM-Omni has to be told. ``more`` goes into both forms.
    """
    asked: dict[str, Any] = {"height": height, "width": width, "num_inference_steps": steps}
    asked |= {"guidance_scale": guidance} if guidance is not None else {}
    size = {"target_h": height, "target_w": width}
    plain = {"prompt": prompt, "modalities": ["image"], "height": height, "width": width, "mm_processor_kwargs": size}
    job = {"kind": "image", "prompt": prompt, "n": 1, "seed": seed, "images": int(picture is not None), **asked, **more}
    first = {"extra_args": size, **({"max_tokens": tokens + 1, "min_tokens": tokens} if tokens else {})}
    return Request(name, {**plain, **more}, job, seed, {**({0: first} if stage else {}), stage: asked}, picture)


def say(name: str, prompt: str, voice: str, *, seed: int = 42) -> Request:
    """A text for Qwen3-TTS: vLLM-Omni's ``Omni`` has it beside the prompt, in lists of one; its length is counted."""
    said = {"text": [prompt], "task_type": ["CustomVoice"], "language": ["Auto"], "speaker": [voice]}
    job = {"kind": "audio", "prompt": prompt, "voice": voice, "seed": seed}
    return Request(name, {"additional_information": said}, job, seed)


def repeat(name: str, prompt: str, pitch_hz: float, *, seed: int = 42) -> Request:
    """A text for CosyVoice3 in a voice to repeat: a second of a tone, and what it is supposed to say."""
    tokens = {"min_tokens": 8, "max_tokens": 24}
    rate_hz, said = 24000, "a voice that reads"
    tone = [int(8000 * math.sin(2 * math.pi * pitch_hz * tick / rate_hz)) for tick in range(rate_hz)]
    job = {
        "kind": "audio",
        "prompt": prompt,
        "seed": seed,
        "ref_audio": f"data:audio/wav;base64,{base64.b64encode(_wav(tone, rate_hz)).decode()}",
        "ref_text": said,
        "stage_params": {"0": tokens},
    }
    native = {
        "prompt": prompt,
        "multi_modal_data": {"audio": (numpy.array(tone, dtype=numpy.float32) / 32768, rate_hz)},
        "mm_processor_kwargs": {
            "prompt_text": f"You are a helpful assistant.<|endofprompt|>{said}",
            "sample_rate": rate_hz,
        },
    }
    return Request(name, native, job, seed, {0: tokens})


def sound(name: str, said: str, length_s: float, *, seed: int = 42, steps: int = 4) -> Request:
    """A text for AuK, in a turn of its chat with the mark that no recording comes with it, and a length in seconds."""
    turn = _chat(f"{said}|<no_prompt_audio>|", "You are a helpful assistant.")
    native = {"prompt": turn, "additional_information": {"auk": {"gen_seconds": length_s}}}
    asked = {"num_inference_steps": steps}
    job = {"kind": "audio", "prompt": said, "seconds": length_s, "seed": seed, **asked}
    return Request(name, native, job, seed, {1: asked})


def _wav(samples: list[int], rate_hz: int) -> bytes:
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes(struct.pack(f"<{len(samples)}h", *samples))
    return made.getvalue()


def _chat(user: str, system: str | None = None) -> str:
    turns = [("system", system), ("user", user)]
    made = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns if said)
    return made + "<|im_start|>assistant\n"


_HUNYUAN = (
    painting("square", "a red ball on a blue sea", 128, 128, seed=5, steps=3, guidance=2.0),
    painting("wide", "the nice world", 160, 96, seed=11, steps=2, guidance=3.0),
)

PIPELINES = {
    one.name: one
    for one in (
        Pipeline(
            "qwen2_5_omni",
            (
                text("hello", _chat("say hello to the nice world", "You are a helpful voice")),
                text("short", _chat("the voice of the world"), seed=7),
                text("long", _chat("a red ball on a blue sea " * 6), seed=11),
            ),
            {0: ("tokens",), 1: ("tokens",), 2: ("audio",)},
        ),
        Pipeline(
            "qwen3_tts",
            (
                say("hello", "say hello to the nice world", "vivian"),
                say("short", "the voice of the world", "serena", seed=7),
                say("long", "a red ball on a blue sea " * 6, "vivian", seed=11),
            ),
            {0: ("tokens",), 1: ("audio",)},
        ),
        Pipeline(
            "qwen3_omni_moe",
            (
                text("hello", _chat("say hello to the nice world", "You are a helpful voice")),
                text("short", _chat("the voice of the world"), seed=7),
                text("long", _chat("a red ball on a blue sea " * 6), seed=11),
            ),
            {0: ("tokens",), 1: ("tokens",), 2: ("audio",)},
        ),
        Pipeline(
            "cosyvoice3",
            (
                repeat("high", "say hello to the nice world", 880.0),
                repeat("low", "the voice of the world", 110.0, seed=7),
            ),
            {0: ("tokens",), 1: ("audio",)},
        ),
        Pipeline(
            "mimo_audio",
            (
                text("hello", _chat("say hello to the nice world")),
                text("voice", _chat("the voice of the world")),
                text("long", _chat("a red ball on a blue sea " * 3), seed=7),
            ),
            {0: ("tokens",), 1: ("audio",)},
            {"MIMO_AUDIO_TOKENIZER_PATH": "{model}/audio_tokenizer"},
        ),
        Pipeline(
            "higgs_multimodal_qwen3",
            (
                text("hello", "<|tts|><|text|>say hello to the nice world<|audio|>"),
                text("voice", "<|tts|><|text|>the voice of the world<|audio|>", seed=7),
                text("again", "<|tts|><|text|>the voice of the world<|audio|>", seed=11),
            ),
            {0: ("tokens",), 1: ("audio",)},
        ),
        Pipeline(
            "joyai_vl_interaction",
            (
                text("hello", _chat("say hello to the nice world")),
                text("voice", _chat("the voice of the world"), seed=7),
                text("long", _chat("a red ball on a blue sea " * 6), seed=11),
            ),
            {0: ("tokens",), 1: ("tokens",), 2: ("audio",)},
        ),
        Pipeline(
            "auk",
            (
                sound("hello", "say hello to the nice world", 0.4),
                sound("voice", "the voice of the world", 0.3, seed=7, steps=3),
                sound("again", "the voice of the world", 0.3, seed=11),
            ),
            {0: ("tokens",), 1: ("audio",)},
        ),
        Pipeline(
            "glm_image",
            (
                painting("edit", 'a red ball, "4"', 64, 64, seed=5, steps=4, picture=(96, 64), tokens=4),
                painting("wide edit", "a calm blue sea", 96, 64, seed=11, steps=3, picture=(64, 128), tokens=6),
                painting("no picture", 'a green box, "7"', 64, 64, seed=7, steps=4, guidance=3.0, tokens=260),
            ),
            {0: ("tokens",), 1: ("image",)},
        ),
        Pipeline(
            "bagel",
            (
                painting("square", "a red ball", 64, 64, seed=5, steps=4),
                painting("wide", "the nice world", 96, 64, seed=11, steps=3),
                painting("negative", "a red ball", 64, 64, seed=5, steps=4, negative_prompt="a blue sea"),
            ),
            {1: ("image",)},
        ),
        Pipeline("hunyuan_image3", _HUNYUAN, {0: ("tokens",), 1: ("image",)}),
        Pipeline("hunyuan_image3_reuse", _HUNYUAN, {0: ("tokens",), 1: ("image",)}),
    )
}
