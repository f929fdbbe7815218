"""What a vLLM-Omni engine answered, as a stage output; an answer without content is an error."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from omniqueue import errors
from omniqueue.engines import omni_prompt, tensors
from omniqueue.engines.base import StageOutput
from omniqueue.payloads import Tensor

#: What vLLM-Omni assumes where a model does not say, in Hz.
_SAMPLE_RATE_HZ = 24_000
_RATE_KEYS = ("sr", "sample_rate", "audio_sample_rate")


def refuse_nan_pixels() -> None:
    """From now on a picture with NaN in it fails its request, in the whole process.

    The conversion to 8 bits turns NaN into black and only warns; the warning becomes the error.
    """
    warnings.filterwarnings("error", message="invalid value encountered in cast", category=RuntimeWarning)


def convert(output: Any, *, diffusion: bool, final: bool, final_type: str | None, emitted: bool = True) -> StageOutput:
    """The stage output of a finished ``OmniRequestOutput``.

    ``final`` stages yield the tensor their ``final_type`` asks for, others what the next stage reads; with ``emitted``
    also whatever tensors the model emitted. Raises EngineError when there is nothing in it.
    """
    if output is None:
        raise errors.EngineError("The engine ended the request without an answer.")
    data: dict[str, Any] = {}
    arrays: dict[str, Tensor] = {}
    if output.outputs:
        _add_completion(output, data)
    if getattr(output.outputs[0] if output.outputs else None, "finish_reason", None) == "abort":
        raise errors.EngineError("The request was aborted.")
    multimodal = dict(output.multimodal_output or {})
    if final and final_type == "audio":
        _add_audio(multimodal, data, arrays)
    elif diffusion:
        _add_frames(output, multimodal, final_type, data, arrays)
    elif not data.get("cumulative_token_ids"):
        raise errors.EngineError("The model ended without producing a token.")
    if emitted and not (final and final_type == "audio"):
        named, facts = tensors.split(multimodal)
        arrays |= {omni_prompt.MULTIMODAL + name: tensor for name, tensor in named.items()}
        if facts:
            data["multimodal_output"] = facts
    return StageOutput(data, arrays)


def _add_completion(output: Any, data: dict[str, Any]) -> None:
    completion = output.outputs[0]
    ids = [int(one) for one in completion.token_ids or ()]
    every = [int(one) for one in getattr(completion, "cumulative_token_ids", None) or ids]
    prompt_ids = [int(one) for one in output.prompt_token_ids or ()]
    data |= {
        "token_ids": ids,
        "cumulative_token_ids": every,
        "text": completion.text or "",
        "cumulative_text": getattr(completion, "cumulative_text", None) or completion.text or "",
        "prompt_token_ids": prompt_ids,
        "finish_reason": completion.finish_reason,
        "usage": {"prompt_tokens": len(prompt_ids), "completion_tokens": len(every)},
    }


def _add_frames(
    output: Any, multimodal: dict[str, Any], final_type: str | None, data: dict[str, Any], arrays: dict[str, Tensor]
) -> None:
    import numpy

    images = output.images if isinstance(output.images, Sequence) else list(output.images)
    if not len(images) and "video" in multimodal:
        images = [multimodal.pop("video")]
    frames = [frame for image in images for frame in _frames(image)]
    if not frames:
        raise errors.EngineError("The diffusion stage returned no picture.")
    if len(frames) == 1 and final_type != "video":
        arrays["image"] = _pixels(frames[0])
        return
    arrays["video"] = _pixels(numpy.stack(frames))
    data["fps"] = float(multimodal.pop("fps", None) or 8)


def _frames(image: Any) -> list[Any]:
    """Arrays of shape (height, width, 3) from a PIL image, or from an array or tensor with any number of frames."""
    import numpy

    if hasattr(image, "convert"):
        return [numpy.asarray(image.convert("RGB"))]
    array = numpy.asarray(image.detach().float().cpu() if hasattr(image, "detach") else image)
    if array.ndim < 3 or array.shape[-1] != 3:
        raise errors.EngineError(f"The diffusion stage returned an array of shape {array.shape}, not of pictures.")
    if numpy.issubdtype(array.dtype, numpy.floating):
        if not numpy.isfinite(array).all():
            raise errors.EngineError("The diffusion stage returned NaN instead of a picture.")
        array = (array.clip(0.0, 1.0) * 255.0).round().astype(numpy.uint8)
    return list(array.reshape(-1, *array.shape[-3:]))


def _pixels(array: Any) -> Tensor:
    import numpy

    dense = numpy.ascontiguousarray(array, dtype=numpy.uint8)
    return Tensor("uint8", tuple(dense.shape), memoryview(dense).cast("B"))


def _add_audio(multimodal: Mapping[str, Any], data: dict[str, Any], arrays: dict[str, Tensor]) -> None:
    import torch

    chunks = multimodal.get("audio")
    parts = chunks if isinstance(chunks, list | tuple) else [chunks]
    flat = [_channels(torch.as_tensor(part).detach().float().cpu()) for part in parts if part is not None]
    wave = torch.cat(flat, dim=-1) if flat else torch.empty(0)
    if not wave.numel():
        raise errors.EngineError("The stage returned no audio.")
    if not bool(torch.isfinite(wave).all()):
        raise errors.EngineError("The stage returned NaN instead of audio.")
    arrays["audio"] = tensors.from_torch(wave)
    data["sample_rate"] = _sample_rate(multimodal)


def _channels(wave: Any) -> Any:
    """Shape (samples,), or (2, samples) when a sound is stereo; sides of one, such as the batch, are left out."""
    squeezed = wave.squeeze()
    return squeezed if squeezed.ndim == 2 and squeezed.shape[0] == 2 else wave.reshape(-1)


def _sample_rate(multimodal: Mapping[str, Any]) -> int:
    for key in _RATE_KEYS:
        value: Any = multimodal.get(key)
        if isinstance(value, list | tuple):
            value = value[-1] if value else None
        if value is not None:
            return int(value)
    return _SAMPLE_RATE_HZ
