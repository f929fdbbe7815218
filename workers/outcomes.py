"""How an attempt ends in its job's record: with its output, or with why there is none."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from omniqueue import calls, chain, errors, media, store
from omniqueue.engines.base import StageOutput
from omniqueue.hotpath import HotPath
from omniqueue.payloads import Item, PayloadStore, Reference
from omniqueue.pipeline import Pipeline, Stage
from omniqueue.store import Claim, Store
from workers import result, usage

#: How long recording an outcome may be tried while Redis is away, in seconds.
_RECORD_PATIENCE_S = 60.0
#: Outputs from this size on are written in a thread: so long a copy would hold up every request on the loop.
_LARGE_BYTES = 32 << 20

T = TypeVar("T")


class Outcomes:
    """Records what became of a stage's claims; its coroutines are for the engine's loop."""

    def __init__(
        self,
        pipe: Pipeline,
        stage: Stage,
        records: Store,
        payloads: PayloadStore,
        media_store: media.MediaStore,
        hot: HotPath,
    ) -> None:
        self.pipe, self.stage, self.hot = pipe, stage, hot
        self.store, self.payloads, self.media = records, payloads, media_store
        #: Set when the engine can take no more requests: the process must be restarted.
        self.dead = threading.Event()

    def _is_last(self, claim: Claim) -> bool:
        """Whether the job ends here: at the pipeline's last stage, or at the last one that makes what was asked."""
        return self.stage.stage_id == int(claim.request.get("last_stage", self.pipe.stages[-1].stage_id))

    async def record(self, claim: Claim, outputs: Sequence[StageOutput]) -> str:
        """Store the outputs and record them if the claim still holds; otherwise drop them. Returns the outcome."""
        resolved = outputs[0].data.get("resolved", {}) if outputs else {}
        reference, ended, message = None, None, None
        if self._is_last(claim):
            slow = not result.is_plain(claim, self.stage, outputs)
            ended = await _aside(slow, lambda: self._encoded(claim, outputs))
        else:
            large = sum(t.nbytes for output in outputs for t in output.tensors.values()) >= _LARGE_BYTES
            reference = await _aside(large, lambda: self._put(claim, outputs))
            following = store.Owed(claim.job_id, claim.stage_id + 1)
            message = chain.message(self.pipe, self.store, following, claim.priority)
        call = calls.finish(claim, reference, resolved, ended, message, usage.of(outputs, reference))
        outcome = await patiently(lambda: self.hot.make(call))
        if outcome != "next":
            slow = outcome != "succeeded" or claim.attempt > 1
            kept = None if outcome == "succeeded" else ended
            await _aside(slow, lambda: self._release(claim, outcome, reference, kept))
        return outcome

    def _encoded(self, claim: Claim, outputs: Sequence[StageOutput]) -> dict[str, Any]:
        texts = result.texts(self.payloads, claim, self.pipe, self.stage)
        return result.store(self.media, claim, outputs, self.stage, texts)

    def _put(self, claim: Claim, outputs: Sequence[StageOutput]) -> Reference:
        name = self.payloads.name(claim.job_id, claim.stage_id, claim.attempt)
        return self.payloads.keep(name, [Item(output.data, output.tensors) for output in outputs])

    async def give_up(self, claim: Claim, error: errors.OmniqueueError, *, retry: bool, counted: bool) -> str:
        """Record an attempt that ended without a result; what is owed again is enqueued at once."""
        return await patiently(lambda: asyncio.to_thread(self.fail, claim, error, retry, counted))

    def fail(self, claim: Claim, error: errors.OmniqueueError, retry: bool, counted: bool) -> str:
        """The same, from a thread. Returns what store.py's ``fail`` returns."""
        if isinstance(error, errors.EngineDead):
            self.dead.set()
        code = error.code or "server_error"
        outcome = self.store.fail(claim, code, error.message, retry=retry, counted=counted, param=error.param)
        if outcome == "queued":
            chain.republish(self.pipe, self.store, store.Owed(claim.job_id, claim.stage_id))
        elif outcome != "stale":
            self._release(claim, outcome, None, None)
        return outcome

    def _release(
        self, claim: Claim, outcome: str, reference: Reference | None, ended: Mapping[str, Any] | None
    ) -> None:
        """Remove this host's files of a job that is over (or of an attempt that came too late)."""
        host = self.payloads.host
        mine = [reference.name] if reference and reference.is_file(host) else []
        read = [*claim.references.values(), *([claim.input_reference] if claim.input_reference else [])]
        earlier = [ref.name for ref in read if ref.is_file(host)]
        over = outcome != "stale" or not self._is_live(claim.job_id)
        self.payloads.release(mine + (earlier if over else []))
        self.media.remove(ended)
        if over and claim.attempt > 1 and self._is_last(claim):
            # A worker that was killed had no time to remove what it had stored.
            self.media.remove_attempts(claim.job_id, range(1, claim.attempt))

    def _is_live(self, job_id: str) -> bool:
        """In doubt it is: the sweep will see."""
        try:
            return job_id in self.store.running([job_id])
        except errors.BrokerUnavailable:
            return True


async def _aside(slow: bool, work: Callable[[], T]) -> T:
    """In a thread what takes long, or it would hold up the loop; the rest is done before a thread would have begun."""
    return await asyncio.to_thread(work) if slow else work()


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Try again while Redis is away: workers outlive its restarts."""
    deadline = time.monotonic() + _RECORD_PATIENCE_S
    while True:
        try:
            return await call()
        except errors.BrokerUnavailable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)
