"""The heart: what happens when a stage's message arrives."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import celery
from celery.exceptions import Ignore

from omniqueue import errors, logs, tracing
from omniqueue.store import Claim

if TYPE_CHECKING:
    from workers.host import StageHost

log = logging.getLogger(__name__)


#: As messages, Flower and logs call the task.
NAME = "omniqueue.run_stage"


@celery.shared_task(name=NAME, acks_late=True, ignore_result=True)  # type: ignore[untyped-decorator]
def run_stage(job_id: str, stage_id: int) -> None:
    """Run one stage of one job; returning lets the chain go on, Ignore ends it here."""
    from workers import stage_worker

    host = stage_worker.host()
    if not attempt_stage(host, job_id, stage_id):
        raise Ignore
    if host.store.holds_queues:  # the rest of the chain was enqueued as this stage was recorded, in one step with it
        run_stage.request.chain = None


async def attempt(host: StageHost, job_id: str, stage_id: int, given: Claim | str = "") -> bool:
    """Claim, run, record. True when the stage is done, so that the chain goes on (or ends, after the last stage).

    ``given`` is the claim, or why there is none, where it came with the message.
    """
    async with host.claimed(job_id, stage_id, given) as claim:
        if isinstance(claim, str):
            log.info("action=not_claimed job=%s stage=%s why=%s", job_id, stage_id, claim)
            return claim == "done"  # finished before: only pass it on
        facts = {"job": job_id, "stage": stage_id, "attempt": claim.attempt}
        origin = await asyncio.to_thread(host.store.trace, job_id, stage_id) if tracing.active() else None
        with logs.about(**facts), tracing.attempt(origin, host.stage, claim) as tell:
            try:
                output = await host.run(claim)
                outcome = await host.outcomes.record(claim, output)
                tell(outcome)
            except Exception as exc:  # noqa: BLE001 - whatever an engine raises ends in the job record
                known = exc if isinstance(exc, errors.OmniqueueError) else _unexpected(exc)
                outcome = await _failed(host, claim, known)
                tell(outcome, error=known)
                exc.__traceback__ = None  # its frames hold what the stage read, and would until garbage is collected
            log.info("action=stage_ended job=%s stage=%s attempt=%s outcome=%s", *facts.values(), outcome)
        # A job may end before the pipeline does, when what was asked for is made early: then the chain ends as well.
        return outcome == "next" or (outcome == "succeeded" and claim.stage_id == host.pipe.stages[-1].stage_id)


def attempt_stage(host: StageHost, job_id: str, stage_id: int) -> bool:
    """The same for a thread that is not the host's loop."""
    return host.call(attempt(host, job_id, stage_id)).result()


async def _failed(host: StageHost, claim: Claim, known: errors.OmniqueueError) -> str:
    """Record a failed attempt; work that the failure did not cause is owed again."""
    retry = isinstance(known, (errors.EngineDead, errors.HandedBack)) or type(known) is errors.PayloadError
    counted = not isinstance(known, errors.HandedBack)
    return await host.outcomes.give_up(claim, known, retry=retry, counted=counted)


def _unexpected(exc: Exception) -> errors.EngineError:
    log.exception("action=engine_raised")
    text = f"{type(exc).__name__}: {exc}"
    return errors.EngineError(text[:2000])
