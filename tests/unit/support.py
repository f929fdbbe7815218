"""Small pipelines, payload folders and what else several test files build."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from omniqueue.pipeline import Pipeline, SizeRule, Stage
from omniqueue.store import Claim, Store


def pipeline(stages: int = 2, engine_args: Mapping[str, Any] | None = None, **changes: Any) -> Pipeline:
    """A pipeline of fake stages whose name and queues nothing else uses."""
    name = f"p{uuid.uuid4().hex[:8]}"
    built = tuple(
        Stage(
            stage_id=k,
            name=f"part{k}",
            queue=f"{name}.stage{k}",
            engine="fake",
            execution_type="diffusion" if k == stages - 1 else "llm_ar",
            input_sources=tuple(range(k)),
            final_output=k == stages - 1,
            final_output_type="image" if k == stages - 1 else None,
            max_num_seqs=8,
            engine_args=dict(engine_args or {}),
        )
        for k in range(stages)
    )
    size = SizeRule(multiple=8, min_side=8, max_side=1024, default=(64, 32))
    pipe = Pipeline(name=name, stages=built, served_model_names=(name,), size=size)
    return dataclasses.replace(pipe, **changes)


def with_stage(pipe: Pipeline, stage_id: int, **changes: Any) -> Pipeline:
    """The pipeline with one stage changed."""
    stages = tuple(dataclasses.replace(s, **changes) if s.stage_id == stage_id else s for s in pipe.stages)
    return dataclasses.replace(pipe, stages=stages)


def submit(records: Store, pipe: Pipeline, **facts: Any) -> str:
    """A new job's id."""
    return records.submit(pipe, {"prompt": "p"}, **facts).job_id


def claim(records: Store, pipe: Pipeline, job_id: str, stage_id: int = 0, worker: str = "w") -> Claim:
    """A claim that must succeed."""
    answer = records.claim(pipe, job_id, stage_id, worker, alone=True)
    assert isinstance(answer, Claim), answer
    return answer


def lapse(records: Store, pipe: Pipeline, job_id: str, stage_id: int) -> None:
    """Let the lease of a running stage have ended a minute ago."""
    client, prefix = records.client, records.namespace
    ended = float(client.hget(f"{prefix}:job:{job_id}", f"{stage_id}:lease") or 0) - 3600  # type: ignore[arg-type]
    client.hset(f"{prefix}:job:{job_id}", f"{stage_id}:lease", f"{ended:.6f}")
    client.zadd(f"{prefix}:leases:{pipe.name}", {f"{job_id}:{stage_id}": ended}, xx=True)


def overdue(records: Store, pipe: Pipeline, job_id: str) -> None:
    """Let the deadline of a job have passed."""
    client, prefix = records.client, records.namespace
    client.hset(f"{prefix}:job:{job_id}", "deadline", "1.000000")
    client.zadd(f"{prefix}:live:{pipe.name}", {job_id: 1.0}, xx=True)


def earlier(records: Store, pipe: Pipeline, job_id: str, stage_id: int, seconds: float) -> None:
    """Let a stage have been enqueued ``seconds`` earlier than it was."""
    client, key = records.client, f"{records.namespace}:job:{job_id}"
    published = float(client.hget(key, f"{stage_id}:published") or 0) - seconds  # type: ignore[arg-type]
    client.hset(key, f"{stage_id}:published", f"{published:.6f}")
    client.zadd(f"{records.namespace}:wait:{pipe.stage(stage_id).queue}", {job_id: published}, xx=True)


def open_files() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def resident_kib() -> int:
    """Resident memory of this process."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises, whatever it is called with."""

    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call
