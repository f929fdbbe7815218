"""Denoising steps seen from outside: how far a request is, and its end between two steps once it is cancelled.

vLLM-Omni 0.30 tells neither, and of its diffusion models only one ends a cancelled request before its last step. On a
single device the model runs in this process, so its noise scheduler can be watched; where it runs elsewhere, requests
have no progress and a cancelled one keeps the device to its end.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from omniqueue.engines.base import Progress

#: From a stage's client to the pipeline object, when all of it is in this process.
_PATH = ("_engine", "executor", "driver_worker", "worker", "model_runner", "pipeline")


class StepWatch:
    """Knows which requests the pipeline is working on and tells each one's listener of every step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, Progress] = {}
        self._stopped: set[str] = set()
        self._working: tuple[str, ...] = ()
        self._done = 0

    def attach(self, client: Any) -> bool:
        """Watch the pipeline behind a stage client; False when it is in another process or has no scheduler."""
        pipeline = functools.reduce(lambda found, name: getattr(found, name, None), _PATH, client)
        scheduler = getattr(pipeline, "scheduler", None)
        if pipeline is None or not callable(getattr(scheduler, "step", None)):
            return False
        # Of the class, not of the object: some pipelines copy their scheduler for each request.
        scheduler.__class__ = self._watched(type(scheduler))
        pipeline.forward = self._around(pipeline.forward)
        return True

    @contextmanager
    def listen(self, request_id: str, progress: Progress) -> Iterator[None]:
        """Call ``progress(done, total)`` after each step of the request, from the engine's thread."""
        with self._lock:
            self._listeners[request_id] = progress
        try:
            yield
        finally:
            with self._lock:
                self._listeners.pop(request_id, None)
                if request_id not in self._working:  # dropped before its turn
                    self._stopped.discard(request_id)

    def stop(self, request_id: str) -> None:
        """End the request before its next step, once every request it is computed together with is stopped as well."""
        with self._lock:
            self._stopped.add(request_id)

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def watched(batch: Any, *args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._working, self._done = tuple(getattr(batch, "request_ids", ())), 0
            try:
                return forward(batch, *args, **kwargs)
            finally:
                with self._lock:
                    self._stopped.difference_update(self._working)
                    self._working = ()

        return watched

    def _watched(self, scheduler: type[Any]) -> type[Any]:
        watch = self

        class Watched(scheduler):  # type: ignore[misc]
            @functools.wraps(scheduler.step)
            def step(self, *args: Any, **kwargs: Any) -> Any:
                watch._before_step()
                result = super().step(*args, **kwargs)
                watch._after_step(len(self.timesteps))
                return result

        Watched.__name__ = scheduler.__name__
        Watched.__qualname__ = scheduler.__qualname__
        return Watched

    def _before_step(self) -> None:
        with self._lock:
            over = bool(self._working) and self._stopped.issuperset(self._working)
        if over:
            from vllm_omni.diffusion.data import DiffusionRequestAbortedError

            raise DiffusionRequestAbortedError("The request was cancelled between two denoising steps.")

    def _after_step(self, total: int) -> None:
        with self._lock:
            self._done += 1
            done = self._done
            told = [self._listeners[one] for one in self._working if one in self._listeners]
        for progress in told:
            progress(done, total)
