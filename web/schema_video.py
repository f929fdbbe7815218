"""POST /v1/videos: what a request may say, and what comes back."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from omniqueue import params
from web import answers, schema

_STEPS = Annotated[int, Meta(ge=1, le=100_000)]
_SCALE = Annotated[float, Meta(ge=0, le=20)]
_SEED = Annotated[int, Meta(ge=0, le=params.MAX_SEED)]
_FPS = Annotated[float, Meta(ge=1, le=240, description="Frames a second.")]
_FRAMES = Annotated[int, Meta(ge=1, le=100_000)]


class Nvext(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The same fields where clients of Dynamo have them; the answer then waits for the video."""

    fps: _FPS | None = None
    num_frames: _FRAMES | None = None
    negative_prompt: str | None = None
    num_inference_steps: _STEPS | None = None
    guidance_scale: _SCALE | None = None
    guidance_scale_2: _SCALE | None = None
    seed: _SEED | None = None
    #: No model here takes it yet.
    boundary_ratio: None = None


class Video(schema.Common, frozen=True, kw_only=True):
    """POST /v1/videos as JSON; with ``response_format`` or ``nvext`` the answer waits for the video."""

    prompt: str
    seconds: (
        Annotated[
            Annotated[str, Meta(pattern="^[1-9][0-9]{0,3}$")] | Annotated[float, Meta(gt=0, le=9999)],
            Meta(description="Length; the video has the smallest number of frames that lasts so long."),
        ]
        | None
    ) = None
    size: Annotated[str, Meta(description="WIDTHxHEIGHT in pixels, both even.")] | None = None
    width: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    height: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    num_frames: _FRAMES | None = None
    fps: _FPS | None = None
    negative_prompt: str | None = None
    num_inference_steps: _STEPS | None = None
    guidance_scale: _SCALE | None = None
    guidance_scale_2: _SCALE | None = None
    true_cfg_scale: _SCALE | None = None
    flow_shift: Annotated[float, Meta(gt=0, le=100)] | None = None
    seed: _SEED | None = None
    #: One request, one video.
    num_outputs_per_prompt: Literal[1] | None = None
    response_format: Literal["url", "b64_json"] | None = None
    nvext: Nvext | None = None
    #: No model here begins with a picture yet.
    input_reference: None = None


class VideoForm(schema.Common, frozen=True, kw_only=True):
    """POST /v1/videos as a form."""

    prompt: str
    seconds: Annotated[str, Meta(pattern="^[1-9][0-9]{0,3}$")] | None = None
    size: Annotated[str, Meta(description="WIDTHxHEIGHT in pixels, both even.")] | None = None
    width: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    height: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    num_frames: _FRAMES | None = None
    fps: _FPS | None = None
    negative_prompt: str | None = None
    num_inference_steps: _STEPS | None = None
    guidance_scale: _SCALE | None = None
    guidance_scale_2: _SCALE | None = None
    true_cfg_scale: _SCALE | None = None
    flow_shift: Annotated[float, Meta(gt=0, le=100)] | None = None
    seed: _SEED | None = None


# -- answers -----------------------------------------------------------------------------------------------------------


class VideoError(answers.Answer, frozen=True, kw_only=True):
    """Why there is no video."""

    code: str
    message: str


class VideoData(answers.Answer, frozen=True, kw_only=True):
    """The video as a URL, or its bytes in base64."""

    url: str | UnsetType = UNSET
    b64_json: str | UnsetType = UNSET


class VideoAnswer(answers.Answer, frozen=True, kw_only=True):
    """A video's job, in OpenAI's shape; times are Unix seconds."""

    id: str
    object: Literal["video"]
    model: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    #: Percent.
    progress: int
    created_at: int
    completed_at: int | None
    expires_at: int | None
    prompt: str
    seconds: str
    size: str
    fps: float
    num_frames: int
    seed: int
    error: VideoError | None
    remixed_from_video_id: None
    #: Of a request that waited: what Dynamo's clients look for.
    created: int | UnsetType = UNSET
    data: list[VideoData] | UnsetType = UNSET
    inference_time_s: float | UnsetType | None = UNSET
    warnings: list[str] | UnsetType = UNSET


class VideoList(answers.Answer, frozen=True, kw_only=True):
    """A page of videos."""

    object: Literal["list"]
    data: list[VideoAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoDeleted(answers.Answer, frozen=True, kw_only=True):
    """A video was forgotten, with its file."""

    id: str
    object: Literal["video.deleted"]
    deleted: Literal[True]
