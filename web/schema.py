"""The request bodies, as types: the one place that says which fields there are and what they may hold.

OpenAI's fields that cannot be honoured here are listed with the values that change nothing; any other value is refused
by name, since a 200 with something else than what was asked would be worse.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from omniqueue import params

#: Longest ``request_timeout_s`` of one request: a day.
MAX_TIMEOUT_S = 86_400.0

Seconds = Annotated[float, Meta(ge=0.1, le=MAX_TIMEOUT_S)]
#: Not blank (params.check_prompt), which the document says too.
Prompt = Annotated[str, Meta(extra_json_schema={"minLength": 1, "pattern": r"\S"})]
#: WIDTHxHEIGHT in pixels, or "auto" for the model's default (params.parse_size).
Size = Annotated[str, Meta(extra_json_schema={"pattern": "^(auto|[1-9][0-9]{0,5}x[1-9][0-9]{0,5})$"})]
Priority = Annotated[int, Meta(ge=0, le=9)]
Scale = Annotated[float, Meta(ge=0, le=20)]
#: A file of a form: PNG, JPEG or WebP.
Upload = Annotated[bytes, Meta(extra_json_schema={"format": "binary"})]
#: http, https where the server allows it, or data.
Url = Annotated[str, Meta(max_length=500_000)]


class Common(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What every request that becomes a job may say."""

    #: A served model name; without it the first pipeline serves.
    model: str | None = None
    #: The caller's own label; kept in the job's record, without any effect.
    user: Annotated[str, Meta(max_length=256)] | None = None
    #: Seconds until the job's deadline; the stage config's request_timeout_s otherwise.
    request_timeout_s: Seconds | None = None
    #: 0, the most urgent, to 9.
    priority: Priority = 0


class Picture(Common, frozen=True, kw_only=True):
    """A picture from a prompt: the fields that the synchronous call and the job share."""

    prompt: Prompt
    negative_prompt: str | None = None
    n: Annotated[int, Meta(ge=1)] = 1
    #: For an edit, "auto" is the size of the first picture.
    size: Size | None = None
    seed: Annotated[int, Meta(ge=0, le=params.MAX_SEED)] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1)] | None = None
    guidance_scale: Scale | None = None
    #: These three only where the model honours them: its stage config's extra_fields.
    guidance_scale_2: Scale | None = None
    true_cfg_scale: Scale | None = None
    flow_shift: Annotated[float, Meta(ge=0, le=100)] | None = None
    output_format: Literal["png", "jpeg", "webp"] = "png"
    #: Quality of jpeg and webp, 0 to 100; a lossless webp at 100. A png is never lossy.
    output_compression: Annotated[int, Meta(ge=0, le=100)] = 100
    #: One quality only: what num_inference_steps says.
    quality: Literal["auto", "standard"] | None = None
    #: Pictures have no transparency.
    background: Literal["auto", "opaque"] | None = None
    #: Nothing is moderated here.
    moderation: Literal["auto", "low"] | None = None
    #: No model here takes a style by name; it belongs into the prompt.
    style: None = None


class Awaited(Picture, frozen=True, kw_only=True):
    """A picture whose request is answered when it is made."""

    #: As OpenAI's current image models and vLLM-Omni answer; "url" has to be asked for.
    response_format: Literal["b64_json", "url"] = "b64_json"
    #: Partial pictures are not made, so a picture comes whole or not at all.
    stream: Annotated[bool, Meta(extra_json_schema={"enum": [False]})] | None = None
    partial_images: Literal[0] | None = None
    #: Whether the answer tells how long each stage took.
    return_stage_metrics: bool = False


class ImageGeneration(Awaited, frozen=True, kw_only=True):
    """POST /v1/images/generations."""


class ImageEdit(Awaited, frozen=True, kw_only=True):
    """POST /v1/images/edits: a form with the pictures as files, or by URL where the server allows that."""

    image: Annotated[list[Upload], Meta(max_length=64)] = []
    image_array: Annotated[list[Upload], Meta(max_length=64)] = msgspec.field(name="image[]", default_factory=list)
    url: Annotated[list[Url], Meta(max_length=64)] = []
    url_array: Annotated[list[Url], Meta(max_length=64)] = msgspec.field(name="url[]", default_factory=list)
    #: As large as the first picture; OpenAI's name and vLLM-Omni's.
    mask: Upload | None = None
    mask_image: Upload | None = None
    reference_image: Upload | None = None
    #: How far from the first picture the result may go; only where the model honours it.
    strength: Annotated[float, Meta(ge=0, le=1)] | None = None
    #: No model here takes it.
    input_fidelity: None = None


class ImageJob(Picture, frozen=True, kw_only=True):
    """POST /v1/jobs with "type": "image"."""

    type: Literal["image"] = "image"
