"""How a stage's messages are taken: from Redis straight onto the loop that the engine runs on.

Celery's own way of a message leads through kombu's channel, a request object, a thread of the pool and from there to
the engine's loop and back: 0.7 ms of Python and four wake-ups for each hop, most of them for what a stage does not use
(acknowledgements, retries, ETAs, time limits, result backends). Here the loop takes several messages at once, runs each
as a coroutine and tells Celery what it has to know: which tasks are active (``inspect active``, revoke) and, with
``-E``, that they were received, begun and ended. Messages that Celery made for anything else than a stage are given to
Celery, and with a broker that is not the Redis of the records all of them are.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import kombu
import msgspec
from celery.worker import state

from omniqueue import calls, chain, errors, messages, tasks
from omniqueue.store import Claim
from workers.host import StageHost

log = logging.getLogger(__name__)
T = TypeVar("T")

#: How long one question for messages may wait, in seconds; a worker that is told to stop asks for it to end at once.
WAIT_S = 1.0
#: Pause before Redis is asked again after it did not answer, in seconds.
_RETRY_S = 0.2
#: So many turns of the loop after messages were taken the next are asked for: what was taken goes to the engine first.
_TURNS = 4
#: Most messages taken at once: the next ones are for the other replicas.
_MOST = 8


class _Headers(msgspec.Struct):
    id: str
    task: str
    eta: str | None = None
    expires: str | None = None
    root_id: str | None = None
    parent_id: str | None = None


class _Envelope(msgspec.Struct):
    headers: _Headers
    body: str


class _Properties(msgspec.Struct):
    delivery_tag: str


class _Foreign(msgspec.Struct):
    """What kombu needs of a message that is for Celery; without it, it would end the worker."""

    body: str
    headers: dict[str, Any]
    properties: _Properties


_envelope = msgspec.json.Decoder(_Envelope)
_body = msgspec.json.Decoder(tuple[tuple[str, int], msgspec.Raw, msgspec.Raw])


class Running:
    """A message in hand, as far as Celery's remote control and its events ask about it."""

    def __init__(self, intake: Intake, task_id: str, job_id: str, stage_id: int, message: str) -> None:
        self.id, self.name, self.message = task_id, tasks.NAME, message
        self.args = (job_id, stage_id)
        self.time_start = time.time()
        self.began = time.monotonic()
        self._intake = intake

    def info(self, safe: bool = False) -> dict[str, Any]:
        """As Celery's own requests tell."""
        return {
            "id": self.id,
            "name": self.name,
            "args": f"({self.args[0]}, {self.args[1]})" if safe else list(self.args),
            "kwargs": "{}" if safe else {},
            "type": self.name,
            "hostname": self._intake.worker.hostname,
            "time_start": self.time_start,
            "acknowledged": True,
            "delivery_info": {"routing_key": self._intake.host.stage.queue},
            "worker_pid": os.getpid(),
        }

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """Revoked while it runs: its job is cancelled."""
        self._intake.cancel_job(self.args[0])


class Intake(kombu.Consumer):  # type: ignore[misc]
    """The consumer of a stage's queue; Celery starts and stops it from its own thread."""

    def __init__(self, *args: Any, worker: Any, host: StageHost, **options: Any) -> None:
        self.worker, self.host = worker, host
        self._untold: deque[tuple[str, dict[str, Any]]] = deque()
        #: While the loop waits for the most urgent messages; while it does not listen for others.
        self._waiting = asyncio.Event()
        self._silent = asyncio.Event()
        self._silent.set()
        #: Redis was away, and may have given what nobody heard of.
        self._unheard = False
        self._taking: Future[None] | None = None
        self._stopped = threading.Event()
        super().__init__(*args, **options)

    # -- what Celery asks, in its thread -----------------------------------------------------------------------------

    def consume(self, no_ack: bool | None = None) -> None:
        """Begin to take messages."""
        if self._taking is None and self.host.stage.queue in self._queues:
            self._stopped = threading.Event()
            self._taking = self.host.call(self._take(self._stopped))

    def cancel(self) -> None:
        """Take no more; what was taken runs on."""
        if self._taking is not None:
            taking, self._taking = self._taking, None
            self._stopped.set()
            # An engine that holds up the loop holds this up too; what is still taken then runs, or is handed back.
            with contextlib.suppress(errors.OmniqueueError, TimeoutError, FutureTimeout):
                self.host.call(self._stop()).result(timeout=self.host.hot.timeout_s)
                taking.result(timeout=self.host.hot.timeout_s + WAIT_S)

    def cancel_by_queue(self, queue: str) -> None:
        """Remote control: leave the queue, until it is added again; all workers are told of one stage's."""
        self._queues.pop(queue, None)
        if queue == self.host.stage.queue:
            self.cancel()

    def close(self) -> None:
        """As cancel."""
        self.cancel()

    def cancel_job(self, job_id: str) -> None:
        """Remote control revoked a task: that ends its job."""
        self.host.call(asyncio.to_thread(self.host.store.cancel, job_id))

    # -- on the loop -------------------------------------------------------------------------------------------------

    async def _stop(self) -> None:
        self.host.seats.changed.set()
        await self.host.hot.take_no_more()

    async def _take(self, stopped: threading.Event) -> None:
        """Take messages with their claims as long as there is room for more than one, else one without."""
        host, lists = self.host, chain.broker_lists(self.host.stage.queue)
        others = host.loop.create_task(self._take_less_urgent(lists[1:], stopped))
        more = True
        try:
            while not stopped.is_set():
                free = host.free()
                if self._unheard:  # nothing is on its way now that would be taken for what nobody heard of
                    self._unheard = False
                    await self._surely(asyncio.to_thread(host.disown))
                elif free <= 1 and not self._silent.is_set():
                    await self._listen_no_more()  # which may take what room there is
                elif free <= 0:
                    host.seats.changed.clear()
                    await host.seats.changed.wait()
                elif free == 1:
                    await self._surely(host.hot.listen(lists, WAIT_S, self._begin))
                else:
                    most = min(_MOST, -(-free // 2))
                    call = calls.take(host.pipe, host.stage.stage_id, host.worker, most, lists)
                    # As long as messages are left in the lists there is nothing to wait for.
                    if not more:
                        self._waiting.set()
                    taken = await self._surely(host.hot.take(call, self._begin_all, None if more else lists[0], WAIT_S))
                    self._waiting.clear()
                    more = taken is not None and len(taken) == most
                    for _ in range(_TURNS if taken else 0):
                        await asyncio.sleep(0)
            await self._listen_no_more()
        finally:
            others.cancel()

    async def _listen_no_more(self) -> None:
        """Once this returns, no less urgent message is on its way."""
        if not self._silent.is_set():
            await self._surely(self.host.hot.listen_no_more())
            await self._silent.wait()

    async def _surely(self, asked: Awaitable[T]) -> T | None:
        """What Redis answers; None, after a pause, when it did not. A loop that ended would leave the worker deaf."""
        try:
            return await asked
        except errors.BrokerUnavailable:
            self._unheard = True
        except Exception:
            log.exception("action=take_failed")
        await asyncio.sleep(_RETRY_S)
        return None

    async def _take_less_urgent(self, lists: Sequence[str], stopped: threading.Event) -> None:
        """One message at a time that is less urgent than most, while there is no other: a wait is for one list only."""

        def begin(text: str) -> None:
            self._waiting.clear()
            self._begin(text)

        while not stopped.is_set():
            await self._waiting.wait()
            self._silent.clear()
            try:
                await self._surely(self.host.hot.listen(lists, WAIT_S, begin))
            finally:
                self._silent.set()
            if not self._waiting.is_set():  # there is less room now than when the other wait began
                await self._surely(self.host.hot.look_again())

    def _begin_all(self, taken: list[calls.Taken]) -> None:
        """Called as messages and their claims arrive."""
        for text, job_id, claim in taken:
            if not job_id:
                self._begin(text)
                continue
            task_id = messages.task_id(job_id, self.host.stage.stage_id)
            if task_id not in state.revoked:
                self._run(task_id, job_id, self.host.stage.stage_id, text, claim)
                continue
            self._give_to_celery(text)  # which tells monitors
            if isinstance(claim, Claim):
                self.host.begin(self._refuse(claim)).add_done_callback(self.host.over)
            else:
                self.cancel_job(job_id)

    def _begin(self, text: str) -> None:
        """Called as a message arrives."""
        try:
            message = _envelope.decode(text)
            headers = message.headers
            if headers.task != tasks.NAME or headers.eta or headers.expires:
                raise ValueError("for Celery")
            (job_id, stage_id), _, _ = _body.decode(base64.b64decode(message.body))
        except (ValueError, msgspec.MsgspecError):
            self._give_to_celery(text)
            return
        if headers.id in state.revoked:
            self.cancel_job(job_id)
            self._give_to_celery(text)
            return
        self._run(headers.id, job_id, stage_id, text)

    def _run(self, task_id: str, job_id: str, stage_id: int, text: str, claim: Claim | str = "") -> None:
        attempt = self.host.begin(tasks.attempt(self.host, job_id, stage_id, claim))
        running = Running(self, task_id, job_id, stage_id, text)
        attempt.add_done_callback(functools.partial(self._ended, running))
        self.host.loop.call_soon(self._began, running)  # once the attempt has begun

    async def _refuse(self, claim: Claim) -> bool:
        """Revoked before it was taken: its job is cancelled, and nothing runs."""
        await asyncio.to_thread(self.host.store.cancel, claim.job_id)
        await self.host.outcomes.give_up(claim, errors.Stopped("The task was revoked."), retry=False, counted=False)
        return False

    def _began(self, running: Running) -> None:
        state.task_accepted(running)
        if self._is_told():
            given = _envelope.decode(running.message).headers
            called = {"name": running.name, "args": f"({running.args[0]}, {running.args[1]})", "kwargs": "{}"}
            chained = {"root_id": given.root_id, "parent_id": given.parent_id}
            self._tell(running, "received", **called, **chained, retries=0, eta=None, expires=None)
            self._tell(running, "started")

    def _ended(self, running: Running, attempt: asyncio.Task[bool]) -> None:
        self.host.over(attempt)
        state.task_ready(running)
        fault = None if attempt.cancelled() else attempt.exception()
        if fault is not None:
            log.error("action=attempt_failed task=%s", running.id, exc_info=fault)
        if not self._is_told():
            return
        if fault is None and not attempt.cancelled() and attempt.result():
            self._tell(running, "succeeded", result="None", runtime=time.monotonic() - running.began)
        else:
            self._tell(running, "failed", exception="The stage made nothing: see the job's record.", traceback="")

    # -- what Celery is told, in its thread --------------------------------------------------------------------------

    def _give_to_celery(self, text: str) -> None:
        try:
            raw = msgspec.json.decode(text)
            msgspec.convert(raw, _Foreign)
        except msgspec.MsgspecError:
            log.error("action=not_a_message queue=%s text=%.200r", self.host.stage.queue, text)
            return
        self.worker.hub.call_soon(self._receive_callback, raw)

    def _is_told(self) -> bool:
        """Whether monitors listen."""
        dispatcher = self.worker.event_dispatcher
        return dispatcher is not None and dispatcher.enabled and (not dispatcher.groups or "task" in dispatcher.groups)

    def _tell(self, running: Running, what: str, **facts: Any) -> None:
        """An event for monitors; sent by Celery's thread, since sending waits for Redis."""
        self._untold.append((f"task-{what}", {"uuid": running.id, "timestamp": time.time(), **facts}))
        self.worker.hub.call_soon(self._tell_all)

    def _tell_all(self) -> None:
        while self._untold:
            name, facts = self._untold.popleft()
            if (dispatcher := self.worker.event_dispatcher) is not None:
                dispatcher.send(name, **facts)
