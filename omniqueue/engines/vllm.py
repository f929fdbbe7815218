"""The plain vLLM engine: one text stage on an ``AsyncLLM`` in this process and its engine-core child."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from omniqueue import errors
from omniqueue.engines import children, devices, environment, omni_params
from omniqueue.engines.base import Loaded, Progress, Report, StageOutput, StageRequest
from omniqueue.pipeline import Pipeline, Stage

logger = logging.getLogger(__name__)

#: How long the engine's processes may take to end after it was told to, in seconds, before they are killed.
_END_PATIENCE_S = 10.0
#: Keys of a stage's entry that are about the worker, or are handled here, and not the engine's arguments.
_NOT_ENGINE = frozenset(
    {"stage_id", "devices", "num_replicas", "env", "runtime", "async_chunk", "input_connectors", "output_connectors"}
    | {"default_sampling_params", "default_pooling_params", "engine_extras", "subtalker_sampling_params"}
)
#: What a CPU needs whatever a file written for GPUs says.
_CPU_ALWAYS = {"enforce_eager": True, "distributed_executor_backend": "uni"}


class VllmEngine:
    """One text stage. All ``generate`` calls must come from one asyncio loop: answers are handed out there."""

    def __init__(self) -> None:
        self._children = children.ChildProcesses()
        self._llm: Any = None
        self._tokenizer: Any = None
        self._defaults: Mapping[str, Any] = {}
        self._running: dict[str, asyncio.Task[Any]] = {}

    # -- loading -----------------------------------------------------------------------------------------------------

    def start(self, pipeline: Pipeline, stage: Stage, model: str, report: Report) -> Loaded:
        """Load; blocks until requests can be taken. Raises ConfigError for what the user can put right, EngineError."""
        began = time.monotonic()
        versions = environment.check_versions(omni=False)
        model = environment.checked_model(model)
        environment.prepare(model)
        _choose_devices(stage)
        report("importing vllm")
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
        arguments = engine_arguments(pipeline, stage, known, cpu=environment.is_cpu_build())
        report("building the engine")
        try:
            with self._children.record():
                self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **arguments))
            self._tokenizer = self._llm.get_tokenizer()
            self._defaults = dict(stage.default_sampling_params)
            self._sampling({}, 1)  # a default that vLLM does not take should not wait for the first request
        except Exception as exc:
            self.close()
            self._children.end(_END_PATIENCE_S)
            raise errors.EngineError(
                f"vLLM could not load {model}: {exc} (the log above has its own account)."
            ) from exc
        facts = {
            **versions,
            "max_model_len": self._llm.model_config.max_model_len,
            "load_s": round(time.monotonic() - began, 1),
            "pids": [process.pid for process in self._children.alive()],
        }
        return Loaded(facts=facts)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, request: StageRequest, progress: Progress) -> StageOutput:
        """Run one item; its text is said piece by piece as it comes. See :class:`omniqueue.engines.base.Engine`."""
        if self._llm is None:
            raise errors.EngineDead("The engine is not running.")
        task = asyncio.current_task()
        if task is not None:
            self._running[request.request_id] = task
        try:
            prompt_ids = self._prompt(request.job)
            params = self._sampling(request.params, len(prompt_ids))
            made = Completion(prompt_ids)
            try:
                async for answer in self._llm.generate({"prompt_token_ids": prompt_ids}, params, request.request_id):
                    piece = made.add(answer.outputs[0])
                    if request.say is not None and (piece["text"] or piece.get("logprobs")):
                        request.say(piece)
                    progress(len(made.token_ids), params.max_tokens)
            except Exception as exc:
                raise await self._translated(exc) from exc
            return made.output(omni_params.describe(params))
        finally:
            self._running.pop(request.request_id, None)

    def _prompt(self, job: Mapping[str, Any]) -> list[int]:
        """Token ids of the conversation by the model's own chat template, or of a bare prompt."""
        messages = job.get("messages")
        if messages is None:
            return [int(one) for one in self._tokenizer.encode(str(job.get("prompt", "")))]
        try:
            made = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=True, add_generation_prompt=True, return_dict=False
            )
        except Exception as exc:  # a template is a program that comes with the model, and may raise anything
            raise errors.EngineRejected(
                f"messages: the model's chat template refuses them: {exc}", param="messages"
            ) from exc
        return [int(one) for one in made]

    def _sampling(self, overrides: Mapping[str, Any], prompt_tokens: int) -> Any:
        """The stage config's parameters and the request's over them; all the room that is left, unless told less."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        given = {name: omni_params.checked(SamplingParams, name, value) for name, value in overrides.items()}
        values = {**self._defaults, **given}
        room = self._llm.model_config.max_model_len - prompt_tokens
        if room < 1:
            raise errors.EngineRejected(
                f"messages: they have {prompt_tokens:,} tokens, and the model reads and writes at most "
                f"{room + prompt_tokens:,}.",
                param="messages",
            )
        if given.get("max_tokens") is not None and given["max_tokens"] > room:
            raise errors.EngineRejected(
                f"max_tokens is {given['max_tokens']:,}, and after the {prompt_tokens:,} tokens of the messages the "
                f"model has room for {room:,}.",
                param="max_tokens",
            )
        values["max_tokens"] = min(values.get("max_tokens") or room, room)
        try:
            return SamplingParams(**values, output_kind=RequestOutputKind.DELTA)
        except (TypeError, ValueError, VLLMClientError) as exc:
            raise errors.EngineRejected(
                f"The model does not take these parameters: {exc}", param=getattr(exc, "parameter", None)
            ) from exc

    async def _translated(self, exc: Exception) -> errors.EngineError:
        """What the host is told: the request's fault, the engine's end, or this request's failure."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(exc, errors.EngineError):
            return exc
        if isinstance(exc, ValueError | VLLMClientError):
            return errors.EngineRejected(str(exc), param=getattr(exc, "parameter", None))
        if isinstance(exc, EngineDeadError) or self._llm is None or self._llm.errored:
            return errors.EngineDead(f"The engine died: {exc}")
        return errors.EngineError(f"{type(exc).__name__}: {exc}")

    # -- control -----------------------------------------------------------------------------------------------------

    async def abort(self, request_id: str) -> None:
        """Cancel the item's task, which makes vLLM drop it at its next step; unknown ids are ignored."""
        task = self._running.get(request_id)
        if task is not None:
            task.cancel()

    async def check_health(self) -> None:
        """Raise EngineDead when the engine or its process is gone."""
        if self._llm is None:
            raise errors.EngineDead("The engine is not running.")
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._llm.check_health()
        except EngineDeadError as exc:
            raise errors.EngineDead(f"The engine died: {exc}") from exc

    def close(self) -> None:
        """Shut down and leave no child process; those that stay after ten seconds are killed. May be called twice."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        try:
            with contextlib.suppress(RuntimeError):  # the loop of its output task is closed already
                llm.shutdown()
        finally:
            killed = self._children.end(_END_PATIENCE_S)
            if killed:
                logger.warning("action=engine_processes_killed pids=%s", killed)


class Completion:
    """What one request has produced so far."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_ids = list(prompt_ids)
        self.token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] | None = None
        self._finish_reason: str | None = None

    def add(self, delta: Any) -> dict[str, Any]:
        """Take a delta of vLLM's and return it as a piece to say: ``text``, ``tokens`` and perhaps ``logprobs``."""
        self.token_ids += [int(one) for one in delta.token_ids]
        self._texts.append(delta.text)
        self._finish_reason = delta.finish_reason or self._finish_reason
        piece: dict[str, Any] = {"text": delta.text, "tokens": len(delta.token_ids)}
        if delta.logprobs is not None:
            said = [_logprob(token, choices) for token, choices in zip(delta.token_ids, delta.logprobs, strict=False)]
            self._logprobs = [*(self._logprobs or []), *said]
            piece["logprobs"] = said
        return piece

    def output(self, resolved: Mapping[str, Any]) -> StageOutput:
        """The whole answer. Raises EngineError when the request ended without one."""
        if self._finish_reason in (None, "abort"):
            raise errors.EngineError("The request was aborted.")
        text = "".join(self._texts)
        data = {
            "token_ids": self.token_ids,
            "cumulative_token_ids": self.token_ids,
            "text": text,
            "cumulative_text": text,
            "prompt_token_ids": self.prompt_ids,
            "finish_reason": self._finish_reason,
            "usage": {"prompt_tokens": len(self.prompt_ids), "completion_tokens": len(self.token_ids)},
            "resolved": dict(resolved),
        }
        if self._logprobs is not None:
            data["logprobs"] = self._logprobs
        return StageOutput(data)


def _logprob(token_id: int, choices: Mapping[int, Any]) -> dict[str, Any]:
    """One token's entry in OpenAI's shape; the sampled token need not be among the most likely ones."""
    ranked = sorted(choices.items(), key=lambda entry: entry[1].rank or 0)
    chosen = choices.get(token_id)
    return {**_token(chosen), "top": [_token(choice) for _, choice in ranked]}


def _token(choice: Any) -> dict[str, Any]:
    # vLLM has -inf for what a filter took out, which JSON has not.
    value = max(float(choice.logprob), -9999.0) if choice is not None else -9999.0
    return {"token": (choice.decoded_token or "") if choice is not None else "", "logprob": value}


def engine_arguments(pipeline: Pipeline, stage: Stage, known: set[str], *, cpu: bool) -> dict[str, Any]:
    """vLLM's engine arguments from the stage's entry and the top level. Raises ConfigError for one it does not have."""
    entry = {key: value for key, value in stage.deploy.items() if key not in _NOT_ENGINE and value is not None}
    entry |= stage.deploy.get("engine_extras") or {}
    for key in entry:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise errors.ConfigError(
                f"stages[{stage.stage_id}].{key}: plain vLLM has no such argument{hint}", param=key
            )
    # The top level has keys for other engines as well, so there only what vLLM knows is taken.
    arguments = {key: value for key, value in pipeline.deploy.items() if key in known and key != "model"}
    arguments |= {"max_num_seqs": stage.max_num_seqs, "disable_log_stats": True, **entry}
    if cpu:
        arguments |= _CPU_ALWAYS
        arguments.setdefault("dtype", "bfloat16")
    return arguments


def _choose_devices(stage: Stage) -> None:
    """Show vLLM the stage's devices only; it takes the first that it sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if environment.is_cpu_build() or stage.devices is None:
        return
    chosen = devices.logical(stage.devices, visible)
    if chosen is not None and (visible or "").strip():
        seen = [name.strip() for name in str(visible).split(",")]
        chosen = ",".join(seen[int(position)] for position in chosen.split(","))
    os.environ["CUDA_VISIBLE_DEVICES"] = str(chosen)
