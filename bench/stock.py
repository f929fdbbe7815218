"""What is compared with: stock Celery. A chain of tasks that pass their payload on, and ``AsyncResult.get()``."""

from __future__ import annotations

import os

import celery

app = celery.Celery("bench.stock", broker=os.environ["BENCH_REDIS_URL"], backend=os.environ["BENCH_RESULT_URL"])


@app.task(name="stock.hop")  # type: ignore[untyped-decorator]
def hop(payload: str) -> str:
    """One stage that does nothing."""
    return payload


def chain(stages: int, payload: str) -> celery.canvas.Signature:
    """One task a stage, each on its stage's queue."""
    first = hop.s(payload).set(queue="stock0")
    return celery.chain(first, *[hop.s().set(queue=f"stock{k}") for k in range(1, stages)])
