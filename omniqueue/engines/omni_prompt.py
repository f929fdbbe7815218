"""What a stage is given: the request as a prompt, or what the stage's input processor makes of earlier outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from omniqueue import errors
from omniqueue.engines import tensors
from omniqueue.engines.base import StageOutput, StageRequest
from omniqueue.payloads import Tensor

#: Names of tensors that hold an earlier stage's multimodal output begin with this.
MULTIMODAL = "multimodal" + tensors.SEPARATOR
#: Where an output has what it is, beside its tensors; the rest of its facts are about it.
_CONTENT = ("token_ids", "cumulative_token_ids", "text", "cumulative_text", "multimodal_output", "payload")
#: Kinds of job whose model is told the kind of output; text and speech models take none.
_MODALITIES = {"image": ["image"], "video": ["video"]}


def from_job(job: Mapping[str, Any], inputs: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """The prompt of the pipeline's first stage, which later stages' processors read as well.

    The size is in it twice, as vLLM-Omni's own server has it: models that plan a picture read
    ``mm_processor_kwargs.target_h`` and ``target_w``, older processors ``height`` and ``width`` (all in pixels).
    Without it GLM-Image silently plans 1024 x 1024.
    """
    prompt: dict[str, Any] = {"prompt": job.get("prompt", "")}
    if job.get("negative_prompt") is not None:
        prompt["negative_prompt"] = job["negative_prompt"]
    if (modalities := job.get("modalities") or _MODALITIES.get(str(job.get("kind")))) is not None:
        prompt["modalities"] = list(modalities)
    if job.get("height") is not None and job.get("width") is not None:
        height, width = int(job["height"]), int(job["width"])
        prompt |= {"height": height, "width": width, "mm_processor_kwargs": {"target_h": height, "target_w": width}}
    if inputs and (pictures := _pictures(inputs)):
        prompt["multi_modal_data"] = pictures
    return prompt


def _pictures(inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """The request's pictures as Pillow's, under the names that vLLM-Omni's own server gives them."""
    from PIL import Image

    def picture(tensor: Tensor) -> Any:
        height, width, channels = tensor.shape
        mode = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
        return Image.frombytes(mode, (width, height), bytes(tensor.buffer))

    count = sum(name.startswith("image.") for name in inputs)
    made: dict[str, Any] = {"image": [picture(inputs[f"image.{index}"]) for index in range(count)]} if count else {}
    for ours, theirs in (("mask", "mask_image"), ("reference_image", "reference_image")):
        if ours in inputs:
            made[theirs] = picture(inputs[ours])
    return made


def conversed(job: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The job with its conversation as ``prompt``. Raises EngineRejected when the model has no template for it."""
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in job["messages"]], tokenize=False, add_generation_prompt=True
        )
    except Exception as exc:  # a template is a program that comes with the model, and may raise anything
        raise errors.EngineRejected(
            f"messages: the model's chat template refuses them: {exc}", param="messages"
        ) from exc
    return {**job, "prompt": text}


def from_sources(
    request: StageRequest,
    stage_id: int,
    input_sources: Sequence[int],
    processor: Callable[..., Any] | None,
    *,
    diffusion: bool,
    requires_multimodal_data: bool,
    context: Mapping[str, Any],
    original: Mapping[str, Any] | None = None,
) -> Any:
    """The prompt of a later stage. ``context`` are values for parameters that some processors ask for by name, and
    ``original`` is the first stage's prompt where that is not the job's as it is.

    Without a processor a diffusion stage gets the first stage's prompt and a language model the tokens of its source.
    Raises EngineError that names the edge when the earlier output is missing, is empty or yields nothing.
    """
    edge = f"stage {', '.join(map(str, input_sources))} -> stage {stage_id}"
    missing = [one for one in input_sources if one not in request.sources]
    if missing:
        raise errors.EngineError(f"{edge}: the output of stage {missing[0]} is not there.")
    # Not every processor minds: HunyuanImage-3.0's makes a prompt of no tokens, and so a picture that nobody planned.
    empty = [one for one in input_sources if _is_empty(request.sources[one])]
    if empty:
        raise errors.EngineError(f"{edge}: the output of stage {empty[0]} is empty.")
    sources = [restore(request.request_id, request.sources[one]) for one in input_sources]
    original = from_job(request.job, request.inputs) if original is None else dict(original)
    if processor is None:
        made = original if diffusion else [{"prompt_token_ids": list(sources[0].outputs[0].token_ids)}]
    else:
        made = _call(processor, sources, original, requires_multimodal_data, context, edge)
    if isinstance(made, list) and len(made) == 1:
        made = made[0]
    if not made or isinstance(made, list):
        what = f"{len(made)} inputs instead of one" if made else "no input"
        raise errors.EngineError(f"{edge}: the stage's processor made {what} of the earlier output.")
    return made


def _is_empty(source: StageOutput) -> bool:
    return not source.tensors and not any(source.data.get(name) for name in _CONTENT)


def _call(
    processor: Callable[..., Any],
    sources: list[Any],
    prompt: Mapping[str, Any],
    requires_multimodal_data: bool,
    context: Mapping[str, Any],
    edge: str,
) -> Any:
    """By position, as vLLM-Omni itself does: the first three parameters have other names in every module."""
    known = inspect.signature(processor).parameters
    arguments: list[Any] = [sources, prompt, requires_multimodal_data]
    if "streaming_context" in known or "_streaming_context" in known:
        arguments.append(None)
    named = {name: value for name, value in context.items() if name in known}
    try:
        return processor(*arguments, **named)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError) as exc:
        raise errors.EngineError(f"{edge}: the stage's processor failed: {exc}") from exc


def restore(request_id: str, source: StageOutput) -> SimpleNamespace:
    """An earlier stage's output in the shape that processors read: ``outputs[0]`` with tokens, text and tensors."""
    data = source.data
    named = {
        name.removeprefix(MULTIMODAL): tensor for name, tensor in source.tensors.items() if name.startswith(MULTIMODAL)
    }
    multimodal = tensors.join(named, data.get("multimodal_output") or {}) or None
    ids = list(data.get("token_ids") or [])
    completion = SimpleNamespace(
        index=0,
        token_ids=ids,
        cumulative_token_ids=list(data.get("cumulative_token_ids") or ids),
        text=data.get("text") or "",
        cumulative_text=data.get("cumulative_text") or data.get("text") or "",
        finish_reason=data.get("finish_reason"),
        multimodal_output=multimodal,
    )
    return SimpleNamespace(
        request_id=request_id,
        finished=True,
        prompt=data.get("prompt"),
        prompt_token_ids=data.get("prompt_token_ids"),
        outputs=[completion],
        multimodal_output=multimodal,
    )
