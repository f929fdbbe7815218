"""What one stage's engine is given for a request: its parameters, and its prompt in vLLM-Omni's form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from omniqueue import errors
from omniqueue.engines import omni_params, omni_prompt, omni_seed, omni_shape, omni_speech, omni_stage
from omniqueue.engines.base import StageRequest
from omniqueue.engines.omni_handover import Handover
from omniqueue.pipeline import Stage

#: How long a worker may take to tell whether its model draws codes, in seconds.
_PATIENCE_S = 60.0


def check_voice(request: StageRequest) -> None:
    """Raise EngineRejected when a model that is not told of voices is asked for one."""
    if request.job.get("voice") not in (None, "default"):
        raise errors.EngineRejected("voice: this model is not given one.", param="voice")


class Inputs:
    """Makes them for one stage on one engine.

    ``family`` is what vLLM-Omni keeps a picture model's prompt builders by.
    """

    def __init__(self, omni: Any, source: Any, stage: Stage, handover: Handover, family: str | None) -> None:
        self._omni = omni
        self._source = source.get_stage(stage.stage_id)
        self._pipeline: str = source.model_type
        self._stage = stage
        self._handover = handover
        self._family = family
        self._diffusion = stage.execution_type == "diffusion"
        self._processor, self._readers = omni_stage.processors(source, stage.stage_id)
        self._speech = omni_speech.for_stage(omni, source, stage.stage_id)
        #: Whether the model draws codes beside the tokens that are sampled.
        self._draws_codes = not self._diffusion and any(
            omni_seed.flat(omni.engine.collective_rpc(omni_seed.OWN, timeout=_PATIENCE_S))
        )

    def close(self) -> None:
        """End what runs beside the engine."""
        if self._speech is not None:
            self._speech.close()

    async def made(self, request: StageRequest) -> tuple[Any, Any, int | None]:
        """The prompt, the parameters, and how many tokens a picture of the request's size has where that is known."""
        said, defaults = await self._said(request)
        params, limit = self._params(request, defaults)
        return said or await self._prompt(request, params), params, limit

    async def _said(self, request: StageRequest) -> tuple[Any, Any]:
        """A speech model's prompt, None for others, and the stage's parameters where the request names none."""
        [defaults] = self._omni.default_sampling_params_list
        talks = "messages" in request.job and self._stage.final_output
        if self._speech is None or talks or request.job.get("kind") != "audio":
            return None, defaults
        return await self._speech.prepare(request.job, defaults, request.inputs)

    def _params(self, request: StageRequest, defaults: Any) -> tuple[Any, int | None]:
        params = omni_params.resolve(defaults, request.params, self._omni.sampling_constraints_list[0])
        if self._diffusion:
            return params, None
        if self._draws_codes:
            omni_params.seed_codes(params)
        limit = omni_params.token_limit(self._readers, request.job)
        omni_params.limit_tokens(params, limit)
        omni_params.tell_size(params, request.job)
        return params, limit

    async def _prompt(self, request: StageRequest, params: Any) -> Any:
        """The prompt; what ends it, where a model's instructions say, goes into ``params``."""
        request = await self._conversed(request)
        first, picture = not self._stage.input_sources, request.job.get("kind") == "image"
        prompt = omni_prompt.from_job(request.job, request.inputs)
        if picture:
            prompt = omni_shape.shaped(prompt, self._family)
        if request.job.get("kind") == "audio":
            prompt = omni_shape.sounding(prompt, self._pipeline, request.job.get("seconds"))
        if picture and omni_shape.instructs(self._family) and not (first and self._diffusion):
            tokenizer = await self._omni.get_tokenizer() if first else None
            prompt, ends = omni_shape.instructed(prompt, self._family, tokenizer)
            if first:
                params.stop_token_ids = sorted({*(params.stop_token_ids or ()), *ends})
        return prompt if first else self._later(request, prompt, params)

    async def _conversed(self, request: StageRequest) -> StageRequest:
        """A conversation as a prompt, by the chat template of the first stage's model, when that one writes text."""
        if not self._stage.input_sources:
            check_voice(request)
        writes = not self._stage.input_sources and not self._diffusion
        if "messages" not in request.job or not writes or request.job.get("kind") in ("image", "video"):
            return request
        return dataclasses.replace(request, job=omni_prompt.conversed(request.job, await self._omni.get_tokenizer()))

    def _later(self, request: StageRequest, original: Mapping[str, Any], params: Any) -> Any:
        prompt = omni_prompt.from_sources(
            request,
            self._stage.stage_id,
            self._stage.input_sources,
            self._processor,
            diffusion=self._diffusion,
            requires_multimodal_data=bool(self._source.requires_multimodal_data),
            context=self._context(params),
            original=original,
        )
        if self._diffusion:
            return prompt
        generation = self._stage.execution_type == omni_stage.GENERATION
        prompt = self._handover.given(prompt, request, generation=generation)
        return self._tokens_request(request.request_id, prompt, params)

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
        return self._handover.submitted(request)
