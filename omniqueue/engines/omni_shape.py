"""A prompt in the form that the model was trained on, made by vLLM-Omni's own builders where it has one.

Some models want turns around the text, a mark where a picture goes, or system instructions. vLLM-Omni keeps builders
for them beside its models: for pictures by the name of the diffusion pipeline that it finds for a checkpoint, for sound
in a module named after the pipeline. Most have none.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from omniqueue import errors


def family(model: str) -> str | None:
    """The name of the checkpoint's diffusion pipeline, or None when it has none that vLLM-Omni knows."""
    from vllm_omni.diffusion.data import resolve_model_class_name

    found: str | None = resolve_model_class_name(model)
    return found


def shaped(prompt: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    """The prompt of a picture with what the family's builder for it makes; unchanged without one."""
    from vllm_omni.model_extras import registry

    size = prompt.get("height"), prompt.get("width")
    media = prompt.get("multi_modal_data") or {}
    if pictures := media.get("image"):
        shown = pictures[0] if len(pictures) == 1 else pictures
        made = registry.build_image_to_image_prompt(name, prompt["prompt"], prompt.get("negative_prompt"), shown, *size)
        if "image" in made["multi_modal_data"]:  # the same place as ours, where a mask may be beside it
            made = {**made, "multi_modal_data": media}
    else:
        made = registry.build_text_to_image_prompt(name, dict(prompt), *size)
    told = {**(prompt.get("mm_processor_kwargs") or {}), **(made.get("mm_processor_kwargs") or {})}
    return {**prompt, **made, **({"mm_processor_kwargs": told} if told else {})}


def instructs(name: str | None) -> bool:
    """Whether the family's models write before they paint, for which they want instructions."""
    from vllm_omni.model_extras import registry

    return registry.get_ar_input_builder(name) is not None


def instructed(prompt: Mapping[str, Any], name: str | None, tokenizer: Any = None) -> tuple[dict[str, Any], list[int]]:
    """The prompt with the instructions that a model wants that writes before it paints, and the tokens that end it.

    Without a tokenizer, which only the stage that writes has, the prompt is the one that later stages read.
    """
    from vllm_omni.model_extras import registry

    builder = registry.get_ar_input_builder(name)
    if builder is None:
        return dict(prompt), []
    pictures = (prompt.get("multi_modal_data") or {}).get("image") or ()
    made = builder(
        prompt=prompt["prompt"],
        tokenizer=tokenizer,
        extra_body={},
        num_images=len(pictures),
        height=prompt.get("height"),
        width=prompt.get("width"),
    )
    more = {"modalities": made.modalities, "use_system_prompt": made.use_system_prompt}
    if made.prompt_token_ids is not None:
        more["prompt_token_ids"] = made.prompt_token_ids
    return {**prompt, **more}, list(made.stop_token_ids)


def sounding(prompt: Mapping[str, Any], pipeline: str, seconds: float | None) -> dict[str, Any]:
    """The prompt of a sound of a length as the pipeline's builder makes it; unchanged without one.

    vLLM-Omni's registry of builders has none for sound; in 0.30 AuK has one. Raises EngineRejected when the request
    has no length, without which such a model makes nothing.
    """
    module = f"vllm_omni.model_extras.{pipeline}"
    found = import_module(module) if importlib.util.find_spec(module) else None
    builder = getattr(found, f"{pipeline}_prompt", None)
    if builder is None:
        return dict(prompt)
    if seconds is None:
        raise errors.EngineRejected(
            "audio_length: this model has to be told how long a sound to make; ask /v1/audio/generate with a number of "
            "seconds.",
            param="audio_length",
        )
    return {**prompt, **builder(prompt["prompt"], gen_seconds=seconds)}
