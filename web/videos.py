"""/v1/videos: a video as a job that is asked after, in OpenAI's shape; and at once, in Dynamo's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal

import flask
from werkzeug.routing import BaseConverter

from omniqueue import errors, job, params, store
from omniqueue.pipeline import Pipeline
from web import asks, decode, files, form, jobs, openai_format, openapi, schema_video, submission, video_view
from web.services import Services, current

blueprint = flask.Blueprint("videos", __name__)


class VideoId(BaseConverter):
    """Anything but "sync", which is a path of its own: it takes POST and nothing else."""

    regex = r"(?!sync$)[^/]+"


@blueprint.record
def _converters(state: flask.blueprints.BlueprintSetupState) -> None:
    state.app.url_map.converters["video"] = VideoId


#: How long DELETE waits for a worker to confirm that it has stopped, in seconds.
_STOP_S = 5.0
_FIELDS = (
    "negative_prompt",
    "num_inference_steps",
    "guidance_scale",
    "guidance_scale_2",
    "true_cfg_scale",
    "flow_shift",
)
#: What ``nvext`` may say in place of the request.
_NVEXT = ("fps", "num_frames", "negative_prompt", "num_inference_steps", "guidance_scale", "guidance_scale_2", "seed")


class NotMade(errors.InvalidRequest):
    """The video's job ended without a video; the job says why."""

    status = 422
    code = "video_failed"


@blueprint.post("/v1/videos")
def create() -> flask.Response:
    """Accept a video's job; a request that says how it wants the video waits for it."""
    services = current()
    if flask.request.mimetype == openapi.FORM:
        return _accepted(services, ask_for(services, form.body(schema_video.VideoForm)))
    request = decode.body(schema_video.Video)
    ask = ask_for(services, request)
    if request.nvext is None and request.response_format is None:
        return _accepted(services, ask)
    record = submission.complete(services, ask)
    return openai_format.reply(video_view.made(services, record, request.response_format or "url"))


@blueprint.post("/v1/videos/sync")
def sync() -> flask.Response:
    """Wait for the video and answer with its file."""
    services = current()
    as_form = flask.request.mimetype == openapi.FORM
    request = form.body(schema_video.VideoForm) if as_form else decode.body(schema_video.Video)
    if isinstance(request, schema_video.Video):
        asks.refuse(request, ("response_format",), "has no place here: the answer is the file itself")
    record = submission.complete(services, ask_for(services, request))
    return asks.file(services, video_view.file(record)["file"], video_view.file(record)["content_type"])


@blueprint.get("/v1/videos")
def index() -> flask.Response:
    """Videos by creation time, the newest first unless ``order`` is asc."""
    services = current()
    limit, ascending, after = jobs.page(lambda name: _find(services, name))
    found: list[job.Job] = []
    for record in _videos(services, ascending, after):
        found.append(record)
        if len(found) > limit:
            break
    data = [video_view.of(services, record) for record in found[:limit]]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return openai_format.reply({"object": "list", "data": data, **ends, "has_more": len(found) > limit})


@blueprint.get("/v1/videos/<video:video_id>")
def retrieve(video_id: str) -> flask.Response:
    """One video's job."""
    services = current()
    return openai_format.reply(video_view.of(services, _record(services, video_id)))


@blueprint.get("/v1/videos/<video:video_id>/content")
def content(video_id: str) -> flask.Response:
    """The file."""
    services = current()
    record = _record(services, video_id)
    if flask.request.args.get("variant", "video") != "video":
        raise errors.InvalidRequest("variant must be 'video'; there are no others.", param="variant")
    if not record.state.terminal:
        raise errors.NotFound(f"The video {video_id} is not made yet; its status is {video_view.status(record)}.")
    if record.state is not job.JobState.SUCCEEDED:
        raise NotMade(openai_format.job_error(record)["message"])
    entry = video_view.file(record)
    return asks.file(services, entry["file"], entry["content_type"])


@blueprint.delete("/v1/videos/<video:video_id>")
def delete(video_id: str) -> flask.Response:
    """Forget a video and its file; one that is being made is stopped first."""
    services = current()
    record: job.Job | None = _record(services, video_id)
    if record is not None and not record.state.terminal:
        services.store.cancel(record.id)
        record = _stopped(services, record.id)
    if record is not None:
        services.media.remove(record.result)  # before the record, which is all that knows of it
        services.store.delete(record.id)
    return openai_format.reply({"id": video_id, "object": "video.deleted", "deleted": True})


def _stopped(services: Services, job_id: str) -> job.Job | None:
    """The record once its worker has confirmed. Raises Conflict when that takes too long."""
    until = time.monotonic() + _STOP_S
    while True:
        record = services.store.job(job_id)
        if record is None or record.state.terminal:
            return record
        if time.monotonic() > until:
            raise errors.Conflict("The video is being stopped, and its worker has not confirmed yet; try again.")
        time.sleep(0.05)


# -- from a request to a job -------------------------------------------------------------------------------------------


def ask_for(services: Services, request: schema_video.Video | schema_video.VideoForm) -> submission.Ask:
    """Everything that can be refused is refused here. Raises InvalidRequest."""
    pipe = asks.pipeline(services, request.model, ("video",), "videos")
    given = _given(request)
    params.check_extra(pipe, given)
    params.check_prompt(pipe, request.prompt)
    params.check_text(pipe, given.get("negative_prompt", ""), "negative_prompt")
    if given.get("num_inference_steps", 1) > pipe.max_steps:
        raise errors.InvalidRequest(
            f"num_inference_steps must be from 1 to {pipe.max_steps}.", param="num_inference_steps"
        )
    width, height = _size(pipe, request)
    fps = float(given.pop("fps", pipe.frames.fps))
    facts = {"kind": "video", "prompt": request.prompt, "n": 1, "output_format": "mp4"}
    made = {"width": width, "height": height, "fps": fps, "num_frames": _frames(pipe, request, given, fps)}
    job_fields = {**facts, "seed": params.random_seed(), **given, **made}
    return asks.ask(pipe, request, "videos", job_fields, asks.last_stage(pipe, ("video",)))


def _given(request: schema_video.Video | schema_video.VideoForm) -> dict[str, Any]:
    """What was said, here or in ``nvext``. Raises InvalidRequest for what was said in both places."""
    names = dict.fromkeys((*_FIELDS, *_NVEXT))
    given = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    nvext = getattr(request, "nvext", None)
    for name in _NVEXT:
        value = getattr(nvext, name, None)
        if value is not None and name in given:
            raise errors.InvalidRequest(
                f"nvext.{name} and {name} are the same; give one of them.", param=f"nvext.{name}"
            )
        if value is not None:
            given[name] = value
    return given


def _size(pipe: Pipeline, request: schema_video.Video | schema_video.VideoForm) -> tuple[int, int]:
    sides, param = (request.width, request.height), "size"
    if request.size is not None and sides != (None, None):
        raise errors.InvalidRequest("size and width with height are the same; give one of them.", param="size")
    if request.size is not None and request.size != "auto":
        width, height = params.parse_size(request.size, pipe.size)
    elif request.width is not None and request.height is not None:
        width, height, param = request.width, request.height, "width"
        params.check_size(width, height, pipe.size, param)
    elif sides != (None, None):
        missing = "height" if request.height is None else "width"
        raise errors.InvalidRequest(f"{missing} is missing; width and height go together.", param=missing)
    else:
        width, height = pipe.size.default
    if width % 2 or height % 2:
        raise errors.InvalidRequest(f"{param} {width}x{height}: an mp4's width and height must be even.", param=param)
    return width, height


def _frames(
    pipe: Pipeline, request: schema_video.Video | schema_video.VideoForm, given: dict[str, Any], fps: float
) -> int:
    count, seconds = given.get("num_frames"), request.seconds
    if count is not None and seconds is not None:
        raise errors.InvalidRequest("num_frames and seconds are the same; give one of them.", param="num_frames")
    if seconds is not None:
        count = params.frames_of(float(seconds), fps, pipe.frames)
        if count > pipe.frames.max_frames:
            longest = f"{pipe.frames.max_frames / fps:.3g} s at {fps:g} frames a second"
            raise errors.InvalidRequest(f"seconds must be at most {longest}, not {seconds}.", param="seconds")
    elif count is not None:
        params.check_frames(count, pipe.frames)
    return count if count is not None else pipe.frames.default


# -- from a job to an answer -------------------------------------------------------------------------------------------


def _accepted(services: Services, ask: submission.Ask) -> flask.Response:
    job_id = submission.accept(services, ask, store.new_id()).job_id
    return openai_format.reply(video_view.of(services, _record(services, video_view.PREFIX + job_id)))


def _find(services: Services, video_id: str) -> job.Job | None:
    """The record behind a video's id; other kinds of jobs are not found by it."""
    record = (
        services.store.job(video_id.removeprefix(video_view.PREFIX)) if video_id.startswith(video_view.PREFIX) else None
    )
    return record if record is not None and record.request.get("kind") == "video" else None


def _record(services: Services, video_id: str) -> job.Job:
    record = _find(services, video_id)
    if record is None:
        raise errors.NotFound(f"There is no video {video_id[:100]!r}; it never existed or its time to live has passed.")
    flask.g.job_id = record.id
    return record


def _videos(services: Services, ascending: bool, after: job.Job | None) -> Iterator[job.Job]:
    """All videos in order, from the one behind ``after`` on."""
    while chunk := jobs.listed(services, 100, ascending, after):
        yield from (record for record in chunk if record.request.get("kind") == "video")
        after = chunk[-1]


_ID = openapi.Parameter("video_id", "path", str, "A video's id.")
_JOB = ("X-Omniqueue-Job-Id",)
_MP4 = openapi.Content(("video/mp4",), "The video.")
operations = (
    openapi.Operation(
        method="POST",
        path="/v1/videos",
        summary="Make a video: a job that is asked after, or the video at once with response_format or nvext",
        request=schema_video.Video,
        form=schema_video.VideoForm,
        responses={200: schema_video.VideoAnswer},
        parameters=(openapi.IDEMPOTENCY_KEY,),
        errors=openapi.SUBMITS,
        headers={200: _JOB},
    ),
    openapi.Operation(
        method="POST",
        path="/v1/videos/sync",
        summary="Make a video and wait for its file",
        request=schema_video.Video,
        form=schema_video.VideoForm,
        responses={200: _MP4},
        parameters=(openapi.IDEMPOTENCY_KEY,),
        errors=openapi.SUBMITS,
        headers={200: _JOB},
    ),
    openapi.Operation(
        method="GET",
        path="/v1/videos",
        summary="Videos by creation time",
        responses={200: schema_video.VideoList},
        parameters=jobs.PAGE,
    ),
    openapi.Operation(
        method="GET",
        path="/v1/videos/{video_id}",
        summary="A video's job",
        responses={200: schema_video.VideoAnswer},
        parameters=(_ID,),
        errors=(404,),
        headers={200: _JOB},
    ),
    openapi.Operation(
        method="GET",
        path="/v1/videos/{video_id}/content",
        summary="The video's file",
        responses={200: _MP4, 206: _MP4},
        parameters=(
            _ID,
            openapi.Parameter("variant", "query", Literal["video"], "Only the video itself."),
            files.RANGE,
        ),
        errors=(404, 416, 422),
    ),
    openapi.Operation(
        method="DELETE",
        path="/v1/videos/{video_id}",
        summary="Forget a video and its file; one that is being made is stopped",
        responses={200: schema_video.VideoDeleted},
        parameters=(_ID,),
        errors=(404, 409),
        headers={200: _JOB},
    ),
)
