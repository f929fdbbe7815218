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
Prompt = Annotated[
    str,
    Meta(
        description="Not blank; at most the model's max_prompt_chars.",
        extra_json_schema={"minLength": 1, "pattern": r"\S"},
    ),
]
#: WIDTHxHEIGHT in pixels, or "auto" for the model's default (params.parse_size).
Size = Annotated[str, Meta(extra_json_schema={"pattern": "^(auto|[1-9][0-9]{0,5}x[1-9][0-9]{0,5})$"})]
_EXTRA = "Where the model's extra_fields list it."
Priority = Annotated[int, Meta(ge=0, le=9)]
Scale = Annotated[float, Meta(ge=0, le=20)]
#: A file of a form: PNG, JPEG or WebP.
Upload = Annotated[bytes, Meta(extra_json_schema={"format": "binary"})]
#: http, https where the server allows it, or data.
Url = Annotated[str, Meta(max_length=500_000)]


class Common(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What every request that becomes a job may say."""

    model: Annotated[str, Meta(description="A served name; without it the first model that can do it.")] | None = None
    user: Annotated[str, Meta(max_length=256, description="A label of yours; kept with the job.")] | None = None
    request_timeout_s: (
        Annotated[Seconds, Meta(description="Seconds until the job's deadline; else the stage config's.")] | None
    ) = None
    priority: Annotated[Priority, Meta(description="0, the most urgent, to 9.")] = 0


class Picture(Common, frozen=True, kw_only=True):
    """A picture from a prompt: the fields that the synchronous call and the job share."""

    prompt: Prompt
    negative_prompt: Annotated[str, Meta(description="What should not be in it.")] | None = None
    n: Annotated[int, Meta(ge=1, description="How many; picture i has seed + i.")] = 1
    size: (
        Annotated[Size, Meta(description="WIDTHxHEIGHT, or auto: the model's own; of an edit, the first picture's.")]
        | None
    ) = None
    seed: (
        Annotated[int, Meta(ge=0, le=params.MAX_SEED, description="Drawn when left out; the answer tells it.")] | None
    ) = None
    num_inference_steps: Annotated[int, Meta(ge=1, description="At most the model's max_steps.")] | None = None
    guidance_scale: Scale | None = None
    guidance_scale_2: Annotated[Scale, Meta(description=_EXTRA)] | None = None
    true_cfg_scale: Annotated[Scale, Meta(description=_EXTRA)] | None = None
    flow_shift: Annotated[float, Meta(ge=0, le=100, description=_EXTRA)] | None = None
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: Annotated[
        int, Meta(ge=0, le=100, description="Quality of jpeg and webp, which is lossless at 100; png is never lossy.")
    ] = 100
    quality: (
        Annotated[Literal["auto", "standard"], Meta(description="Changes nothing: num_inference_steps says it.")] | None
    ) = None
    background: Annotated[Literal["auto", "opaque"], Meta(description="Changes nothing.")] | None = None
    moderation: Annotated[Literal["auto", "low"], Meta(description="Changes nothing: nothing is moderated.")] | None = (
        None
    )
    #: No model here takes a style by name; it belongs into the prompt.
    style: None = None


class Awaited(Picture, frozen=True, kw_only=True):
    """A picture whose request is answered when it is made."""

    response_format: Annotated[
        Literal["b64_json", "url"], Meta(description="The picture itself, or where to get it.")
    ] = "b64_json"
    #: Partial pictures are not made, so a picture comes whole or not at all.
    stream: Annotated[bool, Meta(description="Pictures come whole.", extra_json_schema={"enum": [False]})] | None = None
    partial_images: Annotated[Literal[0], Meta(description="Changes nothing.")] | None = None
    return_stage_metrics: Annotated[bool, Meta(description="Tell how long each stage took, in metrics.")] = False


class ImageGeneration(Awaited, frozen=True, kw_only=True):
    """POST /v1/images/generations."""


class ImageEdit(Awaited, frozen=True, kw_only=True):
    """POST /v1/images/edits: a form with the pictures as files, or by URL where the server allows that."""

    image: Annotated[
        list[Upload], Meta(max_length=64, description="The pictures, as files; it may come repeatedly.")
    ] = []
    image_array: Annotated[list[Upload], Meta(max_length=64, description="The same.")] = msgspec.field(
        name="image[]", default_factory=list
    )
    url: Annotated[
        list[Url], Meta(max_length=64, description="Pictures by data URL, or by http(s) where allowed.")
    ] = []
    url_array: Annotated[list[Url], Meta(max_length=64, description="The same.")] = msgspec.field(
        name="url[]", default_factory=list
    )
    mask: Annotated[Upload, Meta(description=f"As large as the first picture. {_EXTRA}")] | None = None
    mask_image: Annotated[Upload, Meta(description="Another name of mask.")] | None = None
    reference_image: Annotated[Upload, Meta(description=_EXTRA)] | None = None
    strength: (
        Annotated[float, Meta(ge=0, le=1, description=f"How far from the first picture it may go. {_EXTRA}")] | None
    ) = None
    #: No model here takes it.
    input_fidelity: None = None


class ImageJob(Picture, frozen=True, kw_only=True):
    """POST /v1/jobs with "type": "image"."""

    type: Literal["image"] = "image"
