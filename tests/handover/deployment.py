"""A pipeline's requests answered by real Celery workers; everything that a test compares, and what is left at the end.

All workers run from the start, one engine each. While the last stage's is stopped (SIGSTOP), the others do their part
of every job, and what they stored can be read: it goes as soon as its job ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import yaml

from omniqueue import chain, media
from omniqueue.engines.base import StageOutput
from omniqueue.job import Job
from omniqueue.payloads import Item, Reference, Tensor
from omniqueue.store import Claim, Owed
from tests.engines import checkpoints, reference
from tests.engines.handover_cases import Pipeline, Request, shown
from tests.process.cluster import Cluster, Process, running

#: How long the engines may take to start, and a pipeline's requests to be answered, in seconds.
PATIENCE_S = 400.0
#: What a stage's output holds for a later stage beside tokens and text.
_BESIDE = ("payload", "cache")


@dataclass(frozen=True)
class File:
    """What a client gets, with the facts of it in the job's record."""

    content: bytes
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Answers:
    """What became of a pipeline's requests, by name."""

    #: What each stage but the last stored, by stage id; all requests were in flight together.
    stored: Mapping[str, Mapping[int, StageOutput]]
    files: Mapping[str, File]
    #: The same requests later, one after the other, in the other order.
    alone: Mapping[str, File]
    #: Jobs whose last stage found no payload, or one with nothing in it: "missing" and "empty".
    doomed: Mapping[str, Job]
    #: What the workers left behind as they ended: payloads, segments and lock files, keys of Redis, torn files.
    left: Sequence[str]


def answers(pipeline: Pipeline, checkpoint: Path) -> Answers:
    """Start a worker for every stage, have everything answered, end them."""
    stages = yaml.safe_load(checkpoints.config(pipeline.name).read_text(encoding="utf-8"))
    stages["lease_s"] = 60  # a stopped worker still claims what it had asked for, and must not be given up for it
    environ = {**reference.environment(), **pipeline.variables(str(checkpoint)), "OMNIQUEUE_MODEL": str(checkpoint)}
    with running(stages, environ=environ) as cluster:
        workers = [cluster.worker(stage.stage_id, ready=False) for stage in cluster.pipe.stages]
        for worker in workers:
            cluster.wait_ready(worker, PATIENCE_S)
        with stopped(workers[-1]):
            jobs = {request.name: submitted(cluster, request) for request in pipeline.requests}
            stored = {name: read(cluster, job_id) for name, job_id in jobs.items()}
            first = pipeline.requests[0]
            doomed = {"empty": handed(cluster, first, emptied(stored[first.name]))}
            doomed["missing"] = handed(cluster, first, stored[first.name])
            cluster.payloads.release([file(cluster, doomed["missing"])])
        files = {name: result(cluster, job_id) for name, job_id in jobs.items()}
        failed = {name: cluster.ended(job_id, PATIENCE_S) for name, job_id in doomed.items()}
        alone = {one.name: result(cluster, submitted(cluster, one)) for one in reversed(pipeline.requests)}
        for worker in workers:
            worker.signal(signal.SIGTERM)
        assert [worker.wait(60.0) for worker in workers] == [0 for _ in workers]
        return Answers(stored, files, alone, failed, left(cluster))


@contextlib.contextmanager
def stopped(worker: Process) -> Iterator[None]:
    """The worker takes nothing for a while."""
    worker.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.signal(signal.SIGCONT)


def submitted(cluster: Cluster, request: Request, *, publish: bool = True) -> str:
    """The id of a job for the request, with its picture as the router stores it."""
    inputs = {}
    if request.picture is not None:
        picture = numpy.ascontiguousarray(shown(request))
        inputs = {"image.0": Tensor("uint8", picture.shape, memoryview(picture).cast("B"))}
    return cluster.accept(request.job, inputs=inputs, publish=publish)


def read(cluster: Cluster, job_id: str) -> dict[int, StageOutput]:
    """What every stage but the last has stored, once they have; copies, since the payloads go with the job."""
    earlier = cluster.pipe.stages[:-1]
    job = cluster.when_stage(job_id, earlier[-1].stage_id, "done", PATIENCE_S)
    made = {}
    for stage in job.stages[: len(earlier)]:
        assert stage.reference is not None
        with cluster.payloads.open(Reference.from_json(stage.reference)) as payload:
            [item] = payload.items
            copies = {name: Tensor(t.dtype, t.shape, bytes(t.buffer)) for name, t in item.tensors.items()}
            made[stage.stage_id] = StageOutput(dict(item.data), copies)
    return made


def handed(cluster: Cluster, request: Request, outputs: Mapping[int, StageOutput]) -> str:
    """The id of a job whose stages but the last have been done by this process, with these outputs, each in a file."""
    job_id, last = submitted(cluster, request, publish=False), cluster.pipe.stages[-1].stage_id
    for stage_id, output in outputs.items():
        claim = cluster.store.claim(cluster.pipe, job_id, stage_id, "a test")
        assert isinstance(claim, Claim), claim
        name = cluster.payloads.name(job_id, stage_id, claim.attempt)
        made = cluster.payloads.put(name, [Item(output.data, output.tensors)])
        following, message = Owed(job_id, stage_id + 1), None
        if following.stage_id == last:  # without a message nobody takes a stage before this process does
            message = chain.message(cluster.pipe, cluster.store, following, claim.priority)
        assert cluster.store.finish(claim, made, {}, message=message) == "next"
    return job_id


def emptied(outputs: Mapping[int, StageOutput]) -> dict[int, StageOutput]:
    """The same, but for what the last one holds beside tokens and text; or all of it, where it holds no more."""
    *_, (last, output) = outputs.items()
    kept = {name: value for name, value in output.data.items() if name not in _BESIDE}
    return {**outputs, last: StageOutput(kept if kept.keys() < output.data.keys() else {})}


def file(cluster: Cluster, job_id: str) -> str:
    """The name of the payload that the last stage will read."""
    reference = cluster.job(job_id).stages[-2].reference
    assert reference is not None
    return Reference.from_json(reference).name


def result(cluster: Cluster, job_id: str) -> File:
    """The job's only file, once it is made."""
    job = cluster.ended(job_id, PATIENCE_S)
    assert job.result is not None, job.error
    [facts] = job.result["data"]
    return File(media.shared(cluster.settings.media_fs_url).read(facts["file"]), facts)


def left(cluster: Cluster) -> list[str]:
    """What no job and no worker needs any more. vLLM-Omni's connectors name what they share after the request."""
    cluster.payloads.close()  # this process has written some as well
    jobs = [job.id for job in cluster.store.jobs(cluster.pipe.name, 100)]
    shared = [name for name in os.listdir("/dev/shm") if any(job_id in name for job_id in jobs)]
    return [*shared, *cluster.leftovers()]
