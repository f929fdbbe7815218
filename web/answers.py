"""The answers' bodies, as types: what /openapi.json says comes back, and what the tests hold every answer against."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON object that leaves the server."""


class Error(Answer, frozen=True, kw_only=True):
    """What went wrong, in OpenAI's shape."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer, frozen=True, kw_only=True):
    """The body of every error."""

    error: Error


class MadePicture(Answer, frozen=True, kw_only=True):
    """One picture: its URL or its bytes in base64, as response_format asked, and the seed that makes it again."""

    url: str | msgspec.UnsetType = msgspec.UNSET
    b64_json: str | msgspec.UnsetType = msgspec.UNSET
    revised_prompt: None
    seed: int | None


class Metrics(Answer, frozen=True, kw_only=True):
    """How long each stage ran, in seconds, by its name."""

    stage_durations: dict[str, float | None]


class Pictures(Answer, frozen=True, kw_only=True):
    """The pictures of one request."""

    #: Unix seconds.
    created: int
    data: list[MadePicture]
    #: WIDTHxHEIGHT in pixels.
    size: str
    output_format: str
    model: str
    #: What the request said that this model does not use.
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET
    metrics: Metrics | msgspec.UnsetType = msgspec.UNSET


class StageNow(Answer, frozen=True, kw_only=True):
    """Where a live job is."""

    stage_id: int
    name: str | None
    state: str


class Steps(Answer, frozen=True, kw_only=True):
    """Steps done of steps in all."""

    done: int
    total: int


class JobStage(Answer, frozen=True, kw_only=True):
    """One stage of a job; times are Unix seconds."""

    stage_id: int
    name: str | None
    #: The stage in which a job ended has the job's own state.
    state: Literal["waiting", "queued", "running", "done", "failed", "cancelled", "expired"]
    #: How often it was tried.
    attempt: int
    failures: int
    worker: str | None
    queued_at: float | None
    started_at: float | None
    ended_at: float | None
    wait_s: float | None
    run_s: float | None
    progress: Steps | None
    #: What it was run with.
    params: dict[str, Any] | None


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a job made: files by URL, or text."""

    kind: str
    data: list[dict[str, Any]]


class JobError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job has no result."""

    code: str
    message: str
    #: The request's field at fault, where the engine names one.
    param: str | msgspec.UnsetType = msgspec.UNSET


class Job(Answer, frozen=True, kw_only=True):
    """A job; times are Unix seconds."""

    id: str
    object: Literal["job"]
    type: str | None
    status: Literal["queued", "running", "cancelling", "succeeded", "failed", "cancelled", "expired"]
    pipeline: str
    model: str | None
    user: str | None
    #: 0, the most urgent, to 9.
    priority: int
    created_at: float
    deadline: float
    finished_at: float | None
    stage: StageNow | None
    #: Jobs ahead in the queue of the stage it waits for.
    position: int | None
    #: 0 to 1.
    progress: float
    stages: list[JobStage]
    result: JobResult | None
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET
    error: JobError | None


class Jobs(Answer, frozen=True, kw_only=True):
    """A page of jobs."""

    object: Literal["list"]
    data: list[Job]
    first_id: str | None
    last_id: str | None
    has_more: bool


class JobDeleted(Answer, frozen=True, kw_only=True):
    """A finished job was forgotten, with its files."""

    id: str
    object: Literal["job.deleted"]
    deleted: Literal[True]


class Sizes(Answer, frozen=True, kw_only=True):
    """The sizes a model can make, in pixels: both sides multiples of ``multiple``."""

    multiple: int
    min_side: int
    max_side: int
    max_area: int
    default: str


class Frames(Answer, frozen=True, kw_only=True):
    """The videos a model can make: with a ``step`` above 1, one frame more than a multiple of it."""

    step: int
    max: int
    default: int
    fps: float


class Model(Answer, frozen=True, kw_only=True):
    """A name that a request may give as ``model``, and what its pipeline can make."""

    id: str
    object: Literal["model"]
    #: Unix seconds.
    created: int
    owned_by: str
    pipeline: str
    output_types: list[str]
    size: Sizes
    frames: Frames
    #: What speech may ask for as ``voice``.
    voices: list[str]
    #: Longest sound that one request may ask for, in seconds.
    max_audio_s: float
    max_n: int
    #: Most pictures that one request may bring to be edited; 0 when the model edits none.
    max_images: int
    #: Fields that only some models honour, and this one does.
    extra_fields: list[str]
    max_steps: int
    max_prompt_chars: int


class Models(Answer, frozen=True, kw_only=True):
    """Every served name."""

    object: Literal["list"]
    data: list[Model]


class Health(Answer, frozen=True, kw_only=True):
    """The router's process answers."""

    status: Literal["ok"]


class Replica(Answer, frozen=True, kw_only=True):
    """One worker of a stage, by its last heartbeat."""

    worker: str | None
    host: str | None
    pid: int | None
    phase: str | None
    detail: str | None
    concurrency: int | None
    running: int | None
    started_at: float | None


class ReadyStage(Answer, frozen=True, kw_only=True):
    """One stage: can it be done now, by whom, and why not."""

    stage_id: int
    name: str
    queue: str
    ready: bool
    ready_replicas: int
    replicas: list[Replica]
    reason: str | None


class ReadyPipeline(Answer, frozen=True, kw_only=True):
    """One pipeline: ready when every stage is."""

    pipeline: str
    models: list[str]
    ready: bool
    reasons: list[str]
    stages: list[ReadyStage]


class Ready(Answer, frozen=True, kw_only=True):
    """Every stage of every pipeline has a live replica."""

    status: Literal["ready"]
    reasons: list[str]
    pipelines: list[ReadyPipeline]


class NotReady(Answer, frozen=True, kw_only=True):
    """Some stage has no live replica, and why."""

    status: Literal["not_ready"]
    reasons: list[str]
    pipelines: list[ReadyPipeline]
    error: Error


class Queue(Answer, frozen=True, kw_only=True):
    """One stage's queue: jobs that wait and run, and the workers' slots."""

    object: Literal["queue"]
    queue: str
    pipeline: str
    stage_id: int
    name: str
    waiting: int
    oldest_wait_s: float
    running: int
    replicas: int
    capacity: int


class Queues(Answer, frozen=True, kw_only=True):
    """Every stage's queue."""

    object: Literal["list"]
    data: list[Queue]
