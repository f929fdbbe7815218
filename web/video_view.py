"""A video's job as the object that clients see."""

from __future__ import annotations

import base64
from typing import Any

from omniqueue import job
from web import asks, files, job_view, openai_format, submission
from web.services import Services

#: What a video's id begins with; the rest is its job's.
PREFIX = "video_"
_STATUS = {
    job.JobState.QUEUED: "queued",
    job.JobState.RUNNING: "in_progress",
    job.JobState.CANCELLING: "in_progress",
    job.JobState.SUCCEEDED: "completed",
}


def status(record: job.Job) -> str:
    """Where a video's job stands, in OpenAI's words."""
    return _STATUS.get(record.state, "failed")


def file(record: job.Job) -> dict[str, Any]:
    """The result's only entry, of a job that has succeeded."""
    entry: dict[str, Any] = (record.result or {})["data"][0]
    return entry


def of(services: Services, record: job.Job) -> dict[str, Any]:
    """The video object."""
    pipe, asked = services.catalog.named(record.pipeline), record.request
    failed = record.state.terminal and record.state is not job.JobState.SUCCEEDED
    told = openai_format.job_error(record) if failed else None
    ended = record.finished_at
    return {
        "id": PREFIX + record.id,
        "object": "video",
        "model": asked["model"],
        "status": status(record),
        "progress": int(100 * job_view.progress(record)),
        "created_at": int(record.created_at),
        "completed_at": int(ended) if ended is not None and not failed else None,
        "expires_at": int(ended + pipe.result_ttl_s) if ended is not None else None,
        "prompt": asked["prompt"],
        "seconds": f"{asked['num_frames'] / asked['fps']:.10g}",
        "size": f"{asked['width']}x{asked['height']}",
        "fps": asked["fps"],
        "num_frames": asked["num_frames"],
        "seed": asked["seed"],
        "error": {"code": told["code"], "message": told["message"]} if told is not None else None,
        "remixed_from_video_id": None,
        **submission.warnings(pipe, record),
    }


def made(services: Services, record: job.Job, response_format: str) -> dict[str, Any]:
    """The video object with the video in it, where Dynamo's clients look for it."""
    entry = file(record)
    if response_format == "url":
        data = {"url": files.url(services, entry["file"])}
    else:
        data = {"b64_json": base64.b64encode(asks.read(services, entry["file"])).decode()}
    took_s = round(record.finished_at - record.created_at, 3) if record.finished_at else None
    return {**of(services, record), "created": int(record.created_at), "data": [data], "inference_time_s": took_s}
