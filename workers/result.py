"""The last stage's outputs as the result a client gets: media encoded and stored here, never in Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omniqueue import errors, media
from omniqueue.engines.base import StageOutput
from omniqueue.pipeline import Stage
from omniqueue.store import Claim

#: Longer texts are stored as a file, so that records stay small.
_INLINE_TEXT_BYTES = 32 * 1024


def store(place: media.MediaStore, claim: Claim, outputs: Sequence[StageOutput], stage: Stage) -> dict[str, Any]:
    """Encode and store every item. Raises EngineError for an empty or wrong output, NoRoom when it cannot be stored."""
    kind = stage.final_output_type or "image"
    if kind not in _ENCODERS:
        raise errors.EngineError(f"A final output of type {kind!r} cannot be encoded; one of {sorted(_ENCODERS)} can.")
    if not outputs:
        raise errors.EngineError("The last stage returned nothing.")
    data: list[dict[str, Any]] = []
    try:
        for index, output in enumerate(outputs):
            data.append(_ENCODERS[kind](place, claim, index, output))
    except BaseException:
        place.remove({"data": data})  # nobody else knows of these files
        raise
    for index, entry in enumerate(data):
        if claim.request.get("seed") is not None:
            entry["seed"] = claim.request["seed"] + index
    return {"kind": kind, "data": data}


def _image(place: media.MediaStore, claim: Claim, index: int, output: StageOutput) -> dict[str, Any]:
    image = output.tensors.get("image")
    if image is None or not image.nbytes:
        raise errors.EngineError("The last stage returned no picture.")
    asked = (claim.request.get("height"), claim.request.get("width"))
    if None not in asked and image.shape[:2] != asked:
        raise errors.EngineError(f"The engine made {image.shape[:2]} pixels where {asked} were asked (height, width).")
    output_format = str(claim.request.get("output_format", "png"))
    content = media.encode_image(image, output_format, int(claim.request.get("output_compression", 100)))
    entry = _file(place, claim, index, content, output_format)
    return {**entry, "width": image.shape[1], "height": image.shape[0]}


def _text(place: media.MediaStore, claim: Claim, index: int, output: StageOutput) -> dict[str, Any]:
    text = str(output.data.get("text", ""))
    facts = {
        "finish_reason": output.data.get("finish_reason", "stop"),
        "prompt_tokens": output.data.get("prompt_tokens", 0),
        "completion_tokens": len(output.data.get("token_ids", ())),
    }
    content = text.encode()
    if len(content) > _INLINE_TEXT_BYTES:
        return {**facts, **_file(place, claim, index, content, "txt")}
    return {**facts, "text": text}


def _file(place: media.MediaStore, claim: Claim, index: int, content: bytes, extension: str) -> dict[str, Any]:
    name = media.file_name(claim.job_id, claim.attempt, index, extension)
    place.write(name, content)
    return {"file": name, "nbytes": len(content), "content_type": media.CONTENT_TYPES[extension]}


_ENCODERS: Mapping[str, Any] = {"image": _image, "text": _text}
