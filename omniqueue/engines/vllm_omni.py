"""The vLLM-Omni engine: one stage of a pipeline, run by a one-stage ``AsyncOmni`` in this process and its children."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

from omniqueue import errors
from omniqueue.engines import children, environment, omni_output, omni_params, omni_prompt, omni_stage, omni_steps
from omniqueue.engines.base import Loaded, Progress, Report, StageOutput, StageRequest
from omniqueue.pipeline import Pipeline, Stage

logger = logging.getLogger(__name__)

#: How long the engine's processes may take to end after it was told to, in seconds, before they are killed.
_END_PATIENCE_S = 10.0


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
        self._processor: Callable[..., Any] | None = None
        self._readers: tuple[str, ...] = ()
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
        omni_stage.check_hand_over(self._source, stage.stage_id, stage.deploy)
        self._stage = stage
        self._diffusion = stage.execution_type == "diffusion"
        self._processor, self._readers = _processors(self._source, stage.stage_id)
        omni_output.refuse_nan_pixels()
        report("building the engine")
        self._build(pipeline, stage, model)
        steps = self._diffusion and self._steps.attach(self._omni.engine.stage_pools[0].stage_client)
        facts = {
            "pipeline": self._source.model_type,
            **versions,
            "load_s": round(time.monotonic() - began, 1),
            "steps": steps,
            "pids": [process.pid for process in self._children.alive()],
        }
        return Loaded(topology=omni_stage.topology(self._source), facts=facts)

    def _build(self, pipeline: Pipeline, stage: Stage, model: str) -> None:
        view = omni_stage.one_stage(self._source, stage.stage_id)
        config = omni_stage.deploy_config(
            pipeline,
            stage,
            view.model_type,
            cpu=environment.is_cpu_build(),
            visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        )
        timeout_s = int(pipeline.init_timeout_s)
        try:
            with _own_streams(), self._children.record(), omni_stage.registered(view, config) as path:
                self._omni = _one_stage_omni()(
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
        task = asyncio.current_task()
        if task is not None:
            self._running[request.request_id] = task
        try:
            params, limit = self._params(request)
            prompt = self._prompt(await self._conversed(request), params)
            progress(0, 0)
            with self._steps.listen(request.request_id, self._on_loop(progress)):
                output = await self._stoppable(request.request_id, prompt, params)
            return self._output(output, params, limit)
        finally:
            self._running.pop(request.request_id, None)

    async def _conversed(self, request: StageRequest) -> StageRequest:
        """A conversation as a prompt, by the chat template of the first stage's model, when that one writes text."""
        if request.job.get("voice"):
            raise errors.EngineRejected("voice: vLLM-Omni's models are not given one here yet.", param="voice")
        first = self._stage is not None and not self._stage.input_sources
        if (
            "messages" not in request.job
            or self._diffusion
            or not first
            or request.job.get("kind") in ("image", "video")
        ):
            return request
        return dataclasses.replace(request, job=omni_prompt.conversed(request.job, await self._omni.get_tokenizer()))

    def _params(self, request: StageRequest) -> tuple[Any, int | None]:
        params = omni_params.resolve(
            self._omni.default_sampling_params_list[0], request.params, self._omni.sampling_constraints_list[0]
        )
        if self._diffusion:
            return params, None
        limit = omni_params.token_limit(self._readers, request.job)
        omni_params.limit_tokens(params, limit)
        omni_params.tell_size(params, request.job)
        return params, limit

    def _prompt(self, request: StageRequest, params: Any) -> Any:
        if self._stage is None or not self._stage.input_sources:
            return omni_prompt.from_job(request.job, request.inputs)
        source = self._source.get_stage(self._stage.stage_id)
        prompt = omni_prompt.from_sources(
            request,
            self._stage.input_sources,
            self._processor,
            diffusion=self._diffusion,
            requires_multimodal_data=bool(source.requires_multimodal_data),
            context=self._context(params),
        )
        return prompt if self._diffusion else self._tokens_request(request.request_id, prompt, params)

    def _context(self, params: Any) -> dict[str, Any]:
        """What vLLM-Omni hands to processors that ask for it by name."""
        if self._diffusion:
            return {"sampling_params": params}
        config = self._omni.engine.stage_pools[0].stage_vllm_config.model_config
        return {"next_stage_hf_config": config.hf_config, "target_model_config": config}

    def _tokens_request(self, request_id: str, prompt: Mapping[str, Any], params: Any) -> Any:
        """Later language-model stages take tokens as they are; the first stage's preprocessing is not for them."""
        from vllm_omni.engine.orchestrator import build_engine_core_request_from_tokens

        config = self._omni.engine.stage_pools[0].stage_vllm_config.model_config
        request = build_engine_core_request_from_tokens(request_id, dict(prompt), params, model_config=config)
        request.external_req_id = request_id
        return request

    def _on_loop(self, progress: Progress) -> Progress:
        loop = asyncio.get_running_loop()
        return lambda done, total: _tell(loop, progress, done, total)

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

        if isinstance(exc, ValueError | VLLMClientError):  # vLLM-Omni's OmniClientError is a ValueError
            return errors.EngineRejected(str(exc), param=getattr(exc, "parameter", None))
        try:
            await self.check_health()
        except errors.EngineDead as dead:
            return dead
        if isinstance(exc, EngineDeadError):
            return errors.EngineDead(f"The engine died: {exc}")
        return errors.EngineError(f"{type(exc).__name__}: {exc}")

    def _output(self, output: Any, params: Any, limit: int | None) -> StageOutput:
        stage = self._stage
        assert stage is not None
        converted = omni_output.convert(
            output, diffusion=self._diffusion, final=stage.final_output, final_type=stage.final_output_type
        )
        if limit is not None and converted.data.get("finish_reason") == "length":
            _check_complete(len(converted.data["cumulative_token_ids"]), limit - 1, params.max_tokens)
        return StageOutput({**converted.data, "resolved": omni_params.describe(params)}, converted.tensors)

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


def _check_complete(made: int, needed: int, max_tokens: int) -> None:
    """Refuse a picture that was cut short: no later stage could use it. ``needed`` leaves out the end mark."""
    if made >= needed:
        return
    if made >= max_tokens:
        raise errors.EngineRejected(
            f"max_tokens is {max_tokens}, and a picture of this size has {needed} tokens.", param="max_tokens"
        )
    raise errors.EngineRejected(
        f"The prompt leaves room for {made} of the picture's {needed} tokens; shorten it or ask for a smaller size.",
        param="prompt",
    )


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


def _one_stage_omni() -> type[Any]:
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    class OneStageOmni(AsyncOmni):  # type: ignore[misc]
        """Keeps request ids as they are: ours are unique, and requests built from tokens must carry the same one."""

        @staticmethod
        def _get_unique_request_id(external_request_id: str) -> str:
            return external_request_id

    return OneStageOmni


def _processors(source: Any, stage_id: int) -> tuple[Callable[..., Any] | None, tuple[str, ...]]:
    """The stage's own input processor, and the dotted paths of those that read its output."""
    stage = source.get_stage(stage_id)
    path = stage.sync_process_input_func or stage.custom_process_input_func
    module, _, name = (path or "").rpartition(".")
    processor = getattr(import_module(module), name) if path else None
    readers = [one for one in source.stages if stage_id in one.input_sources]
    paths = [one.sync_process_input_func or one.custom_process_input_func for one in readers]
    return processor, tuple(one for one in paths if one)
