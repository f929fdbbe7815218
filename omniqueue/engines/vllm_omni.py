"""The vLLM-Omni engine: one stage of a pipeline, run by a one-stage ``AsyncOmni`` in this process and its children."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from omniqueue import errors, handover
from omniqueue.engines import (
    children,
    environment,
    omni_cache,
    omni_connector,
    omni_handover,
    omni_inputs,
    omni_output,
    omni_params,
    omni_seed,
    omni_shape,
    omni_stage,
    omni_steps,
)
from omniqueue.engines.base import Loaded, Progress, Report, StageOutput, StageRequest
from omniqueue.engines.omni_edges import Edge
from omniqueue.pipeline import Pipeline, Stage

logger = logging.getLogger(__name__)

#: How long the engine's processes may take to end after it was told to, in seconds, before they are killed.
_END_PATIENCE_S = 10.0
#: How long a worker may take to seed its generators, in seconds.
_SEED_PATIENCE_S = 60.0


class VllmOmniEngine:
    """One stage of one vLLM-Omni pipeline.

    ``start`` may run in any thread; vLLM-Omni keeps an event loop of its own in a thread of its own. All ``generate``
    calls must come from one asyncio loop, the first one's, on any thread: answers are handed out there.
    """

    def __init__(self) -> None:
        self._children = children.ChildProcesses()
        self._omni: Any = None
        self._stage: Stage | None = None
        self._source: Any = None
        self._diffusion = False
        self._handover: Any = None
        self._cache: omni_cache.CacheEnd | None = None
        #: Holds the requests of a stage that draws from its process's generator, one at a time.
        self._turn = asyncio.Lock()
        self._inputs: Any = None
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._steps = omni_steps.StepWatch()
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- loading -----------------------------------------------------------------------------------------------------

    def start(self, pipeline: Pipeline, stage: Stage, model: str, report: Report) -> Loaded:
        """Load the stage; blocks until it can take requests, for ``pipeline.init_timeout_s`` at most.

        Raises ConfigError for what the user can put right (versions, model, stage config), EngineError otherwise.
        """
        began = time.monotonic()
        versions = environment.check_versions()
        model = environment.checked_model(model)
        environment.prepare(model)
        report("importing vllm_omni")
        import vllm_omni  # noqa: F401  # before any vllm symbol: it replaces classes in vllm's modules

        report("reading the model's configuration")
        self._source = omni_stage.source_pipeline(pipeline, model)
        deploys = {one.stage_id: one.deploy for one in pipeline.stages}
        edges = omni_stage.check_edges(self._source, deploys, handover.connectors(pipeline.deploy, deploys))
        self._handover = omni_handover.Handover(edges, stage.stage_id, self._source.stages[-1].stage_id)
        omni_stage.check_pictures(pipeline, stage, edges)
        self._stage = stage
        self._diffusion = stage.execution_type == "diffusion"
        self._cache = omni_cache.end_of(edges, self._source.get_stage(stage.stage_id), stage.deploy)
        omni_output.refuse_nan_pixels()
        report("building the engine")
        self._build(pipeline, stage, model, [edge for edge in edges if edge.connector is not None])
        self._handover.attach(self._omni)
        self._inputs = omni_inputs.Inputs(self._omni, self._source, stage, self._handover, omni_shape.family(model))
        if self._cache is not None:
            self._cache.attach()
        steps = self._diffusion and self._steps.attach(self._omni.engine.stage_pools[0].stage_client)
        facts = {
            "pipeline": self._source.model_type,
            **versions,
            "load_s": round(time.monotonic() - began, 1),
            "steps": steps,
            "pids": [process.pid for process in self._children.alive()],
        }
        return Loaded(topology=omni_stage.topology(self._source), facts=facts)

    def _build(self, pipeline: Pipeline, stage: Stage, model: str, connected: list[Edge]) -> None:
        cache = self._cache.config if self._cache else None
        view = omni_stage.one_stage(self._source, stage.stage_id, cache, connected)
        config = omni_stage.deploy_config(
            pipeline,
            stage,
            view.model_type,
            cpu=environment.is_cpu_build(),
            visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        )
        timeout_s = int(pipeline.init_timeout_s)
        try:
            with (
                _own_streams(),
                self._children.record(),
                omni_connector.joined(connected, stage.stage_id),
                omni_stage.registered(view, config) as path,
            ):
                self._omni = omni_stage.one_stage_omni()(
                    model=model, deploy_config=path, stage_init_timeout=timeout_s, init_timeout=timeout_s
                )
        except Exception as exc:
            self._children.end(_END_PATIENCE_S)
            raise errors.EngineError(
                f"vLLM-Omni could not load stage {stage.stage_id} of {self._source.model_type} from {model}: {exc} "
                "(the log above has vLLM-Omni's own account)."
            ) from exc

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, request: StageRequest, progress: Progress) -> StageOutput:
        """Run one item; see :class:`omniqueue.engines.base.Engine`.

        ``progress`` is called with (0, 0) at the start, and after each denoising step where those can be seen.
        """
        if self._omni is None or self._stage is None:
            raise errors.EngineDead("The engine is not running.")
        self._loop = asyncio.get_running_loop()
        task, asked_as = asyncio.current_task(), request.request_id
        if task is not None:
            self._running[asked_as] = task
        try:
            request = self._handover.renamed(request)
            with self._handover.running(request):
                prompt, params, limit = await self._inputs.made(request)
                self._handover.check_alone(request.request_id, prompt, params)
                progress(0, 0)
                async with self._seeded(params):
                    with self._steps.listen(request.request_id, self._on_loop(progress)):
                        output, caches = await self._answered(request, prompt, params)
                return self._output(request.request_id, output, caches, params, limit)
        finally:
            self._running.pop(asked_as, None)

    @contextlib.asynccontextmanager
    async def _seeded(self, params: Any) -> AsyncIterator[None]:
        """Where a stage's model draws from its process's generator, one request at a time and from the job's seed.

        Then a job sounds the same on any replica, after a retry, and whatever came before it.
        """
        assert self._stage is not None
        if self._stage.execution_type != omni_stage.GENERATION:
            yield
            return
        async with self._turn:
            seed = getattr(params, "seed", None) or 0
            await self._omni.collective_rpc(omni_seed.METHOD, timeout=_SEED_PATIENCE_S, args=(seed,))
            yield

    def _on_loop(self, progress: Progress) -> Progress:
        loop = asyncio.get_running_loop()
        return lambda done, total: _tell(loop, progress, done, total)

    async def _answered(self, request: StageRequest, prompt: Any, params: Any) -> tuple[Any, list[StageOutput]]:
        """The engine's answer, and the key-value caches that it left for a later stage."""
        cache = self._cache
        if cache is not None and cache.sends and self._handover.hands_cache(request.request_id):
            return await cache.answered(request, prompt, params, self._stoppable, self._handover.running)
        if cache is None or cache.sends:
            return await self._stoppable(request.request_id, prompt, params), []
        with cache.given(request.request_id, request.sources[cache.edge.source]) as companions:
            continued = dataclasses.replace(params, cfg_kv_request_ids=companions or None)
            return await self._stoppable(request.request_id, prompt, continued), []

    async def _stoppable(self, request_id: str, prompt: Any, params: Any) -> Any:
        """Run, and when the task is cancelled tell the denoising loop first: vLLM-Omni's own abort waits for it."""
        running = asyncio.ensure_future(self._run(request_id, prompt, params))
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            self._steps.stop(request_id)
            running.cancel()
            await asyncio.wait([running])
            raise
        return running.result()

    async def _run(self, request_id: str, prompt: Any, params: Any) -> Any:
        answers = self._omni.generate(prompt, request_id=request_id, sampling_params_list=[params])
        last = None
        try:
            async for answer in answers:
                last = answer
        except Exception as exc:
            raise await self._translated(exc) from exc
        return last

    async def _translated(self, exc: Exception) -> errors.EngineError:
        """What the host is told: the request's fault, the engine's end, or this request's failure."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        lost: errors.EngineError | None = self._handover.lost(exc)
        if lost is not None:
            return lost
        if isinstance(exc, ValueError | VLLMClientError):  # vLLM-Omni's OmniClientError is a ValueError
            return errors.EngineRejected(str(exc), param=getattr(exc, "parameter", None))
        try:
            await self.check_health()
        except errors.EngineDead as dead:
            return dead
        if isinstance(exc, EngineDeadError):
            return errors.EngineDead(f"The engine died: {exc}")
        return errors.EngineError(f"{type(exc).__name__}: {exc}")

    def _output(
        self, request_id: str, output: Any, caches: list[StageOutput], params: Any, limit: int | None
    ) -> StageOutput:
        stage = self._stage
        assert stage is not None
        made = omni_output.convert(
            output,
            diffusion=self._diffusion,
            final=stage.final_output,
            final_type=stage.final_output_type,
            emitted=self._handover.emits(request_id),
        )
        if limit is not None and made.data.get("finish_reason") == "length":
            omni_params.check_complete(len(made.data["cumulative_token_ids"]), limit - 1, params.max_tokens)
        left, kept = self._handover.left(request_id), omni_cache.stored(caches)
        resolved = {"resolved": omni_params.describe(params)}
        arrays = {**made.tensors, **left.tensors, **kept.tensors}
        return StageOutput({**made.data, **left.data, **kept.data, **resolved}, arrays)

    # -- control -----------------------------------------------------------------------------------------------------

    async def abort(self, request_id: str) -> None:
        """Cancel the item's task, which makes vLLM-Omni drop it at its next step; unknown ids are ignored."""
        task = self._running.get(request_id)
        if task is not None:
            task.cancel()

    async def check_health(self) -> None:
        """Raise EngineDead when the engine or one of its processes is gone."""
        if self._omni is None:
            raise errors.EngineDead("The engine is not running.")
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._omni.check_health()
        except EngineDeadError as exc:
            raise errors.EngineDead(f"The engine died: {exc}") from exc

    def close(self) -> None:
        """Shut down and leave no child process; those that stay after ten seconds are killed. May be called twice."""
        omni, self._omni = self._omni, None
        if omni is None:
            return
        if self._inputs is not None:
            self._inputs.close()
        self._stop_answers(omni)
        try:
            omni.shutdown()
        finally:
            killed = self._children.end(_END_PATIENCE_S)
            if killed:
                logger.warning("action=engine_processes_killed pids=%s", killed)

    def _stop_answers(self, omni: Any) -> None:
        """End the task that hands out answers, on the loop it belongs to."""
        task, loop = omni.final_output_task, self._loop
        if task is not None and loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the task with it
                loop.call_soon_threadsafe(task.cancel)


def _tell(loop: asyncio.AbstractEventLoop, progress: Progress, done: int, total: int) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
        loop.call_soon_threadsafe(progress, done, total)


@contextlib.contextmanager
def _own_streams() -> Iterator[None]:
    """Undo the prefix that a diffusion stage, which runs in this process, puts before every line written here."""
    streams = [(stream, stream.write) for stream in (sys.stdout, sys.stderr)]
    try:
        yield
    finally:
        for stream, write in streams:
            stream.write = write  # type: ignore[method-assign]
