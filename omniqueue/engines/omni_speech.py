"""A text to say as the prompt of a speech model: vLLM-Omni's own serving adapters know how each model wants it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from omniqueue import errors, sounds
from omniqueue.payloads import Tensor

#: Fields of a job that say how to speak, by the names of vLLM-Omni's speech requests.
_FIELDS = ("instructions", "language", "task_type", "ref_audio", "ref_text", "x_vector_only_mode")
_NAMED = re.compile(r"\b(voice|language|instructions|ref_audio|ref_text)\b")


def for_stage(omni: Any, source: Any, stage_id: int) -> SpeechPrompts | None:
    """What makes prompts for a pipeline's stage, or None when it is not the first, or not that of a speech model."""
    stage = source.get_stage(stage_id)
    if stage.input_sources:
        return None
    from vllm_omni.entrypoints.openai import tts_adapters

    if tts_adapters.detect_tts_model_type(stage.model_stage, stage.model_arch or source.model_arch) is None:
        return None
    return SpeechPrompts(omni)


class SpeechPrompts:
    """Makes prompts for the model of a running first stage."""

    def __init__(self, omni: Any) -> None:
        from vllm_omni.entrypoints.openai.serving_speech import OmniOpenAIServingSpeech

        try:
            self._service = OmniOpenAIServingSpeech(omni, None, request_logger=None)
        except OSError as exc:
            raise errors.ConfigError(
                f"vLLM-Omni keeps voices in a folder that cannot be written: {exc}. SPEAKER_SAMPLES_DIR names another."
            ) from exc

    def close(self) -> None:
        """End the service's thread."""
        self._service.shutdown()

    async def prepare(
        self, job: Mapping[str, Any], defaults: Any, inputs: Mapping[str, Tensor] | None = None
    ) -> tuple[Any, Any]:
        """The prompt, and the stage's default parameters as the model's adapter changes them for this text.

        ``inputs`` are the request's media. Raises EngineRejected for a voice that the model does not have, or a text
        that it does not take.
        """
        request = _request(job, inputs or {})
        adapter = self._service._get_tts_adapter()
        inline = request.ref_audio is not None
        problem = adapter.validate(request)
        if problem:
            raise errors.EngineRejected(problem, param=_blamed(problem))
        try:
            prepared = await adapter.build(request, [defaults], inline)
            [params] = adapter.apply_sampling_overrides([defaults], request, prepared.prompt)
        except ValueError as exc:
            raise errors.EngineRejected(str(exc), param="prompt") from exc
        return prepared.prompt, params


def _blamed(problem: str) -> str:
    """The field that a model's complaint is about: the first that it names, else the text."""
    found = _NAMED.search(problem.lower())
    return found[0] if found else "prompt"


def _request(job: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> Any:
    """The job as vLLM-Omni's server takes it. Raises EngineRejected for a field that it does not take so."""
    from vllm_omni.entrypoints.openai.protocol.audio import OpenAICreateSpeechRequest

    if "messages" in job:
        raise errors.EngineRejected("A speech model says a text; ask /v1/audio/speech.", param="messages")
    given = {name: job[name] for name in _FIELDS if job.get(name) is not None}
    if "ref_audio" in inputs:
        given["ref_audio"] = sounds.data_url(bytes(inputs["ref_audio"].buffer))
    sound = given.get("ref_audio")
    if sound is not None and not str(sound).startswith("data:"):
        # Nothing is fetched here: the router alone opens addresses, by its own rules.
        raise errors.EngineRejected("ref_audio must be a data URL.", param="ref_audio")
    if job.get("voice") not in (None, "default"):
        given["voice"] = job["voice"]
    try:
        return OpenAICreateSpeechRequest(input=job.get("prompt", ""), **given)
    except ValueError as exc:
        raise errors.EngineRejected(f"The model's speech requests do not take this: {exc}") from exc
