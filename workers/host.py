"""The engine host: one engine on one event loop, and everything a claimed stage needs around it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from omniqueue import calls, chain, errors, media, params, store
from omniqueue.engines.base import Engine, StageOutput, StageRequest
from omniqueue.hotpath import HotPath
from omniqueue.payloads import PayloadStore
from omniqueue.pipeline import Pipeline, Stage
from omniqueue.store import Claim, Store
from workers import inputs
from workers.gate import Gate
from workers.outcomes import Outcomes, patiently
from workers.pieces import Pieces
from workers.running import Key, Running, emptied, steps
from workers.seats import Seats

log = logging.getLogger(__name__)

#: How long an engine may take to let go of a request whose deadline has passed, in seconds.
_ABORT_PATIENCE_S = 5.0
#: How long a message that cannot start waits before the record is asked again whether it is still wanted, in seconds.
_TURN_S = 1.0

T = TypeVar("T")


class StageHost:
    """Runs one stage's claims in one engine; its coroutines are for its own loop."""

    def __init__(
        self,
        pipe: Pipeline,
        stage: Stage,
        engine: Engine,
        records: Store,
        payloads: PayloadStore,
        media_store: media.MediaStore,
        worker: str,
    ) -> None:
        self.pipe, self.stage, self.engine = pipe, stage, engine
        self.store, self.payloads, self.media, self.worker = records, payloads, media_store, worker
        self._pieces = Pieces(records)
        self.draining = False
        self._running: dict[Key, Running] = {}
        self._lock = threading.Condition()
        self._gate = Gate()
        #: For what intake.py begins, whichever connection to the broker it comes by.
        self.seats = Seats(stage.max_num_seqs)
        self.hot = HotPath(records, worker)
        self.outcomes = Outcomes(pipe, stage, records, payloads, media_store, self.hot)
        self.dead = self.outcomes.dead
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(ThreadPoolExecutor(stage.max_num_seqs + 4, "aside"))
        self._thread = threading.Thread(target=self.loop.run_forever, name="engine-loop", daemon=True)
        self._thread.start()

    def free(self) -> int:
        """How many more attempts can run; none beside one that is to be alone, so that others get their messages."""
        return 0 if self._gate.closed else self.seats.free()

    def begin(self, work: Coroutine[Any, Any, bool]) -> asyncio.Task[bool]:
        """Run an attempt; on the loop."""
        attempt = self.loop.create_task(work)
        self.seats.take(attempt)
        return attempt

    def over(self, attempt: asyncio.Task[bool]) -> None:
        """An attempt that was begun has ended."""
        self.seats.leave(attempt)
        with self._lock:
            self._lock.notify_all()

    def call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop, from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    # -- the path of a claim -----------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def claimed(self, job_id: str, stage_id: int, given: Claim | str = "") -> AsyncIterator[Claim | str]:
        """A claim, or why there is none. A stage's last attempt gets this worker to itself for the block.

        ``given`` is the claim, or why there is none, where it came with the message.
        """
        if isinstance(given, Claim):  # its lease is prolonged while it waits for its turn
            with self._holding(given):
                while not await self._gate.enter(False, _TURN_S):
                    pass
                try:
                    yield await self._kept(given)
                finally:
                    self._gate.leave(False)
            return
        if given not in ("", "alone"):
            yield self._told(given, job_id, stage_id)
            return
        alone = given == "alone"
        while True:
            entered = await self._gate.enter(alone, _TURN_S)
            try:
                answer: Claim | str = "alone"
                if entered or alone:
                    # Not alone yet: asking again says that the message is in good hands, and ends the wait at last.
                    answer = await self.claim(job_id, stage_id, alone=alone and entered)
                if answer != "alone":
                    with self._holding(answer) if isinstance(answer, Claim) else contextlib.nullcontext():
                        yield answer
                    return
            finally:
                if entered:
                    self._gate.leave(alone)
                if alone:
                    self.seats.changed.set()
            alone = entered or alone

    async def claim(self, job_id: str, stage_id: int, *, alone: bool = False) -> Claim | str:
        """Claim a stage, waiting out a short absence of Redis; a message lost here is enqueued again by the reaper."""
        if stage_id != self.stage.stage_id:
            log.error("action=wrong_stage job=%s stage=%s worker_stage=%s", job_id, stage_id, self.stage.stage_id)
            return "early"
        if self.draining:  # the message is spent: enqueue the stage for another replica
            await asyncio.to_thread(chain.republish, self.pipe, self.store, store.Owed(job_id, stage_id))
            return "draining"
        if self.dead.is_set():
            return "dead"
        call = calls.claim(self.pipe, job_id, stage_id, self.worker, alone=alone)
        return self._told(await patiently(lambda: self.hot.make(call)), job_id, stage_id)

    async def _kept(self, given: Claim) -> Claim | str:
        """A claim that came with its message, unless this process begins nothing any more: then it is handed back."""
        if not self.draining and not self.dead.is_set():
            return given
        await self.outcomes.give_up(given, errors.HandedBack(), retry=True, counted=False)
        return "draining" if self.draining else "dead"

    def _told(self, answer: Claim | str, job_id: str, stage_id: int) -> Claim | str:
        """The answer to a claim; the log says what the operator has to mend."""
        if answer == "mismatch":
            log.error(
                "action=wrong_config job=%s stage=%s config=%s: the job was accepted for another topology; give this "
                "worker the router's stage config",
                job_id,
                stage_id,
                self.pipe.path,
            )
        return answer

    async def run(self, claim: Claim) -> Sequence[StageOutput]:
        """All items of a claim, through the engine at once.

        Raises what the engine raises, Stopped (cancelled, superseded or expired) or HandedBack (shutting down).
        """
        with self._holding(claim) as running, inputs.mapped(self.payloads, self.stage, claim) as given:
            running.task = self.loop.create_task(self._engine(running, given))
            running.task.add_done_callback(running.let_go)
            if running.stop:  # told to stop before there was anything to cancel
                running.task.cancel()
            late = self.loop.call_later(claim.remaining_s, self._late, running)
            try:
                return await running.ended
            finally:
                late.cancel()
                running.task = None  # stopped, it holds the frame that holds all of this (see emptied)
                self.seats.let_go(asyncio.current_task())

    async def _engine(self, running: Running, given: inputs.Inputs) -> None:
        outputs = await emptied(self._items(running, given))
        if not running.ended.done():
            running.ended.set_result(outputs)

    def _late(self, running: Running) -> None:
        late = errors.Stopped("The deadline passed while the stage ran.")
        self._stop(running, late)
        self.loop.call_later(_ABORT_PATIENCE_S, running.fail, late)

    @contextlib.contextmanager
    def _holding(self, claim: Claim) -> Iterator[Running]:
        """In hand from the claim until its outcome is recorded: all that time its lease is prolonged."""
        key = (claim.job_id, claim.stage_id, claim.attempt)
        with self._lock:
            outermost = key not in self._running
            running = self._running.setdefault(key, Running(claim))
        try:
            yield running
        finally:
            if outermost:
                with self._lock:
                    del self._running[key]
                    self._lock.notify_all()

    async def _items(self, running: Running, given: inputs.Inputs) -> list[StageOutput]:
        job = running.claim.request
        if int(job.get("n", 1)) == 1:  # the common case, without a task of its own
            return [await self._item(running, given, 0)]
        tasks = [asyncio.ensure_future(self._item(running, given, index)) for index in range(int(job.get("n", 1)))]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            # One item's failure ends the job: the others must not go on taking the engine's time.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _item(self, running: Running, given: inputs.Inputs, index: int) -> StageOutput:
        claim = running.claim

        def progress(done: int, total: int) -> None:
            running.progress[index] = steps(done, total)
            running.moved_at = time.monotonic()

        request = StageRequest(
            # What an engine leaves in shared memory under it has a payload's name, and so is swept like one.
            request_id=f"{self.payloads.name(claim.job_id, claim.stage_id, claim.attempt)}-{index}",
            job=claim.request,
            index=index,
            params=params.stage_params(claim.request, self.stage, index),
            sources={stage_id: outputs[index] for stage_id, outputs in given.sources.items()},
            inputs=given.media,
            say=self._pieces.of(claim, self.stage, index),
        )
        try:
            return await self.engine.generate(request, progress)
        except (SystemExit, KeyboardInterrupt) as exc:  # would end the loop, and all others' requests with it
            raise errors.EngineError(f"The engine raised {type(exc).__name__}.") from exc

    def disown(self) -> None:
        """After a lost connection: what Redis gave this worker, and it never heard of, is owed again."""
        for owed in self.store.unheard(self.pipe.name, self.worker, [claim for claim, _ in self.held()]):
            chain.republish(self.pipe, self.store, owed)

    # -- stopping ----------------------------------------------------------------------------------------------------

    def stop(self, key: Key, why: errors.EngineError) -> None:
        """Abort a running claim in the engine; unknown keys are ignored."""
        with self._lock:
            running = self._running.get(key)
        if running is not None:
            self._stop(running, why)

    def _stop(self, running: Running, why: errors.EngineError) -> None:
        running.stop = running.stop or why
        self.loop.call_soon_threadsafe(lambda: running.task.cancel() if running.task else None)

    def held(self) -> list[tuple[Claim, tuple[int, int]]]:
        """Claims in hand, with their progress."""
        with self._lock:
            return [(running.claim, running.total_progress()) for running in self._running.values()]

    def moved_at(self) -> float | None:
        """When anything last moved in the engine (monotonic, in seconds); None when nothing runs there."""
        with self._lock:
            moved = [r.moved_at for r in self._running.values() if r.task is not None and not r.ended.done()]
        return max(moved, default=None)

    def drain(self, grace_s: float, hand_back_now: Callable[[], bool]) -> None:
        """Let what runs finish, at most ``grace_s``; then hand it back to its queue."""
        self.draining = True
        deadline = time.monotonic() + grace_s
        with self._lock:
            while (self._running or self.seats.taken()) and time.monotonic() < deadline and not hand_back_now():
                self._lock.wait(timeout=0.2)
            left = list(self._running)
        for key in left:
            self.stop(key, errors.HandedBack())
        with self._lock:
            self._lock.wait_for(lambda: not self._running, timeout=10.0)

    def ask_health(self) -> Future[None]:
        """The engine's answer to whether it can take more requests: EngineDead when it cannot."""
        return self.call(self.engine.check_health())

    def surrender(self) -> None:
        """Give back everything in hand, as failures that count: this process is about to leave with a broken engine."""
        for claim, _ in self.held():
            with contextlib.suppress(errors.OmniqueueError):
                self.outcomes.fail(claim, errors.EngineDead(), retry=True, counted=True)

    def close(self) -> None:
        """Close the engine and its loop; may be called twice."""
        self.engine.close()
        if self.loop.is_closed():
            return
        self.call(self._end())
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self.loop.close()

    async def _end(self) -> None:
        self.hot.close()
        await asyncio.sleep(0)  # in which the connections close
        self.loop.stop()


def worker_name(stage: Stage, host: str) -> str:
    """A name for this process in the records: stage, host, pid and a start time, so that a reused pid differs."""
    return f"{stage.queue}@{host}.{os.getpid()}.{int(time.time() * 1000):x}".replace(":", "_")
