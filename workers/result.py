"""The last stage's outputs as the result a client gets: media encoded and stored here, never in Redis."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from omniqueue import audio, errors, media, video
from omniqueue.engines.base import StageOutput
from omniqueue.payloads import PayloadStore
from omniqueue.pipeline import Pipeline, Stage
from omniqueue.store import Claim

#: Longer texts are stored as a file, so that records stay small.
_INLINE_TEXT_BYTES = 32 * 1024


def texts(payloads: PayloadStore, claim: Claim, pipe: Pipeline, stage: Stage) -> list[dict[str, Any]]:
    """What an earlier stage wrote for every item, when the answer to a conversation is more than the last one makes."""
    if not {"modalities", "messages"} <= claim.request.keys():
        return []
    for one in pipe.final_stages:
        if one.stage_id < stage.stage_id and one.final_output_type == "text":
            with payloads.open(claim.references[one.stage_id]) as payload:
                return [_written(claim, item.data) for item in payload.items]
    return []


def is_plain(claim: Claim, stage: Stage, outputs: Sequence[StageOutput]) -> bool:
    """Whether the result is but a short text: nothing to read, to encode or to store."""
    return (
        stage.final_output_type == "text"
        and "modalities" not in claim.request
        and not claim.request.get("logprobs")
        and sum(len(output.data.get("text", "")) for output in outputs) < _INLINE_TEXT_BYTES // 4
    )


def store(
    place: media.MediaStore,
    claim: Claim,
    outputs: Sequence[StageOutput],
    stage: Stage,
    texts: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Encode and store every item, each with its text from an earlier stage if there is one.

    Raises EngineError for an empty or wrong output, NoRoom when it cannot be stored.
    """
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
    for entry, text in zip(data, texts, strict=False):
        entry.update(text)
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
    entry = _written(claim, output.data)
    said: dict[str, Any] = {name: entry.pop(name) for name in ("text", "logprobs") if name in entry}
    content, extension = said["text"].encode(), "txt"
    if "logprobs" in said:
        content, extension = json.dumps(said, separators=(",", ":")).encode(), "json"
    if len(content) > _INLINE_TEXT_BYTES:
        return {**entry, **_file(place, claim, index, content, extension)}
    return {**entry, **said}


def _written(claim: Claim, data: Mapping[str, Any]) -> dict[str, Any]:
    """A text with what its client is told of it. Raises EngineError when the logprobs it asked for are not there."""
    usage = data.get("usage") or {}
    entry = {
        "text": str(data.get("text", "")),
        "finish_reason": data.get("finish_reason") or "stop",
        "prompt_tokens": data.get("prompt_tokens", usage.get("prompt_tokens", 0)),
        "completion_tokens": len(data.get("cumulative_token_ids") or data.get("token_ids") or ()),
    }
    if claim.request.get("logprobs"):
        if "logprobs" not in data:
            raise errors.EngineRejected("logprobs: this model's engine does not give them.", param="logprobs")
        entry["logprobs"] = data["logprobs"]
    return entry


def _audio(place: media.MediaStore, claim: Claim, index: int, output: StageOutput) -> dict[str, Any]:
    sound = output.tensors.get("audio")
    if sound is None or not sound.nbytes:
        raise errors.EngineError("The last stage returned no sound.")
    job = claim.request
    output_format = str(job.get("output_format", "wav"))
    content, rate, seconds = audio.encode(
        sound,
        int(output.data.get("sample_rate", 24_000)),
        output_format,
        speed=float(job.get("speed", 1.0)),
        wanted_rate=job.get("sample_rate"),
    )
    entry = _file(place, claim, index, content, output_format)
    channels = sound.shape[0] if len(sound.shape) == 2 else 1
    return {**entry, "sample_rate": rate, "channels": channels, "seconds": round(seconds, 6)}


def _video(place: media.MediaStore, claim: Claim, index: int, output: StageOutput) -> dict[str, Any]:
    frames = output.tensors.get("video")
    if frames is None or not frames.nbytes:
        raise errors.EngineError("The last stage returned no video.")
    job = claim.request
    asked, made = [job.get(name) for name in ("num_frames", "height", "width")], list(frames.shape[:3])
    if any(want is not None and want != have for want, have in zip(asked, made, strict=True)):
        raise errors.EngineError(f"The engine made a video of {made} where {asked} was asked (frames, height, width).")
    fps = float(job.get("fps") or output.data.get("fps") or 8)
    entry = _file(place, claim, index, video.encode(frames, fps), "mp4")
    facts = {"width": made[2], "height": made[1], "num_frames": made[0], "fps": fps}
    return {**entry, **facts, "seconds": round(made[0] / fps, 6)}


def _file(place: media.MediaStore, claim: Claim, index: int, content: bytes, extension: str) -> dict[str, Any]:
    name = media.file_name(claim.job_id, claim.attempt, index, extension)
    place.write(name, content)
    return {"file": name, "nbytes": len(content), "content_type": media.CONTENT_TYPES[extension]}


_ENCODERS: Mapping[str, Any] = {"image": _image, "text": _text, "audio": _audio, "video": _video}
