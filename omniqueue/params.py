"""From a checked request to what each stage is given: the size grammar, the limits, and request over config.

A *job* is the JSON object kept in the record and handed to every stage. For a picture: ``kind`` ("image"), ``prompt``,
``negative_prompt``, ``n``, ``seed``, ``width`` and ``height`` in pixels, ``num_inference_steps``, ``guidance_scale``,
``output_format``; what the client did not say is absent, so that the stage config's value stands.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from omniqueue import errors
from omniqueue.pipeline import FrameRule, Pipeline, SizeRule, Stage

#: ASCII digits only: \d would take full-width ones, and int() would read them.
_SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")
#: Seeds are kept below this, so that seed + n never leaves 63 bits.
MAX_SEED = 2**63 - 1 - 1024

#: Which parts of a job are parameters of a diffusion stage, and which of a language-model stage.
DIFFUSION_PARAMS = (
    "width", "height", "num_inference_steps", "guidance_scale", "guidance_scale_2", "true_cfg_scale", "strength",
    "num_frames", "fps",
)  # fmt: skip
#: Fields that only some models honour; a pipeline's ``extra_fields`` says which.
EXTRA_FIELDS = ("mask", "reference_image", "strength", "true_cfg_scale", "guidance_scale_2", "flow_shift")
#: The same of speech: how to say a text, and a voice to say it in with what that voice says.
SPEECH_FIELDS = ("language", "instructions", "ref_audio", "ref_text")
LLM_PARAMS = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "stop", "logprobs", "presence_penalty")


def parse_size(text: str, rule: SizeRule, param: str = "size") -> tuple[int, int]:
    """Width and height in pixels from "WIDTHxHEIGHT". Raises InvalidRequest that says what the model can make."""
    match = _SIZE.fullmatch(text)
    if not match:
        raise errors.InvalidRequest(
            f"{param} must be WIDTHxHEIGHT in pixels, such as {rule.default[0]}x{rule.default[1]}, not {text[:40]!r}.",
            param=param,
        )
    width, height = int(match[1]), int(match[2])
    check_size(width, height, rule, param)
    return width, height


def check_size(width: int, height: int, rule: SizeRule, param: str = "size") -> None:
    """Raise InvalidRequest unless the model can make this size; sizes are never rounded."""
    if width % rule.multiple or height % rule.multiple:
        raise errors.InvalidRequest(
            f"{param} {width}x{height}: width and height must be multiples of {rule.multiple}.", param=param
        )
    if not (rule.min_side <= width <= rule.max_side and rule.min_side <= height <= rule.max_side):
        raise errors.InvalidRequest(
            f"{param} {width}x{height}: width and height must be from {rule.min_side} to {rule.max_side} pixels.",
            param=param,
        )
    if width * height > rule.max_area:
        raise errors.InvalidRequest(
            f"{param} {width}x{height} has {width * height:,} pixels; at most {rule.max_area:,} are served.",
            param=param,
        )


def check_frames(count: int, rule: FrameRule, param: str = "num_frames") -> None:
    """Raise InvalidRequest unless the model can make a video of so many frames."""
    if not 1 <= count <= rule.max_frames:
        raise errors.InvalidRequest(f"{param} {count}: from 1 to {rule.max_frames} frames are served.", param=param)
    if rule.step > 1 and count % rule.step != 1:
        raise errors.InvalidRequest(
            f"{param} {count}: this model makes 1 frame more than a multiple of {rule.step}.", param=param
        )


def frames_of(seconds: float, fps: float, rule: FrameRule) -> int:
    """The smallest number of frames that the model can make and that last for ``seconds``."""
    wanted = max(1, math.ceil(seconds * fps - 1e-6))
    return wanted if rule.step == 1 else -(-(wanted - 1) // rule.step) * rule.step + 1


def random_seed() -> int:
    """A seed for a request that has none; it is recorded and returned."""
    return secrets.randbelow(2**31)


def image_job(pipe: Pipeline, **fields: Any) -> dict[str, Any]:
    """The job of a picture request: defaults filled in, limits checked. Raises InvalidRequest that names the field.

    ``fields`` are the request's own, already of the right types; None means not given.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    check_extra(pipe, given)
    check_prompt(pipe, given.get("prompt", ""))
    check_text(pipe, given.get("negative_prompt", ""), "negative_prompt")
    width, height = pipe.size.default
    if "size" in given:
        width, height = parse_size(given.pop("size"), pipe.size)
    if not 1 <= given.get("n", 1) <= pipe.max_n:
        raise errors.InvalidRequest(f"n must be from 1 to {pipe.max_n}.", param="n")
    if not 1 <= given.get("num_inference_steps", 1) <= pipe.max_steps:
        raise errors.InvalidRequest(
            f"num_inference_steps must be from 1 to {pipe.max_steps}.", param="num_inference_steps"
        )
    return {"kind": "image", "n": 1, "seed": random_seed(), **given, "width": width, "height": height}


def check_extra(pipe: Pipeline, names: Iterable[str]) -> None:
    """Raise InvalidRequest for a field that this model does not honour."""
    for name in names:
        if name in (*EXTRA_FIELDS, *SPEECH_FIELDS) and name not in pipe.extra_fields:
            raise errors.InvalidRequest(f"{name} is not honoured by this model; leave it out.", param=name)


def check_prompt(pipe: Pipeline, prompt: str, param: str = "prompt") -> None:
    """Raise InvalidRequest for a prompt that is blank, too long or not encodable."""
    if not prompt.strip():
        raise errors.InvalidRequest(f"{param} must not be empty.", param=param)
    check_text(pipe, prompt, param)


def check_text(pipe: Pipeline, text: str, param: str) -> None:
    """Raise InvalidRequest for a text that is too long or not encodable; it may be empty, as a negative prompt may."""
    if len(text) > pipe.max_prompt_chars:
        raise errors.InvalidRequest(
            f"{param} has {len(text):,} characters; at most {pipe.max_prompt_chars:,} are served.", param=param
        )
    if "\0" in text:
        raise errors.InvalidRequest(f"{param} must not contain NUL characters.", param=param)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise errors.InvalidRequest(f"{param} must be valid Unicode; it has a lone surrogate.", param=param) from None


def stage_params(job: Mapping[str, Any], stage: Stage, index: int) -> dict[str, Any]:
    """What item ``index`` of a job overrides in one stage's sampling parameters.

    Each stage gets only what is its own; the seed, item by item, goes to every stage.
    """
    names = DIFFUSION_PARAMS if stage.execution_type == "diffusion" else LLM_PARAMS
    params = {name: job[name] for name in names if job.get(name) is not None}
    if stage.execution_type == "diffusion" and job.get("flow_shift") is not None:
        # Where vLLM-Omni's own server puts it; the config's other arguments of this kind stay.
        params["extra_args"] = {**stage.default_sampling_params.get("extra_args", {}), "flow_shift": job["flow_shift"]}
    if job.get("seed") is not None:
        params["seed"] = job["seed"] + index
    params.update(job.get("stage_params", {}).get(str(stage.stage_id), {}))
    return params
