"""POST /v1/audio/speech and /v1/audio/generate: sound as a file, in pieces, or as server-sent events."""

from __future__ import annotations

import base64
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

import flask
import msgspec

from omniqueue import audio, errors, job, params, payloads, remote, sounds
from omniqueue.pipeline import Pipeline, Stage
from web import asks, decode, events, openai_format, openapi, schema_speech, submission
from web.services import Services, current

log = logging.getLogger(__name__)

blueprint = flask.Blueprint("speech", __name__)

#: Bytes of sound in one event; a multiple of three, so that each piece's base64 stands for itself.
_EVENT_BYTES = 3 * 16 * 1024


@blueprint.post("/v1/audio/speech")
def speech() -> flask.Response:
    """Say a text."""
    request = decode.body(schema_speech.Speech)
    services = current()
    pipe = asks.pipeline(services, request.model, ("audio",), "sound")
    asks.check_voice(pipe, request.voice)
    voice = None if request.voice == "default" else request.voice
    ask = _ask(pipe, request, "audio.speech", {"voice": voice, **_manner(pipe, request)})
    return _answer(services, request, _heard(services, request, ask))


@blueprint.post("/v1/audio/generate")
def generate() -> flask.Response:
    """Make a sound."""
    request = decode.body(schema_speech.AudioGeneration)
    services = current()
    pipe = asks.pipeline(services, request.model, ("audio",), "sound")
    return _answer(services, request, _ask(pipe, request, "audio.generate", _generation(pipe, request)))


def _ask(pipe: Pipeline, request: schema_speech.Sound, endpoint: str, more: Mapping[str, Any]) -> submission.Ask:
    """Everything that can be refused is refused here. Raises InvalidRequest."""
    params.check_prompt(pipe, request.input, "input")
    _check_rate(request)
    last = asks.last_stage(pipe, ("audio",))
    job = {
        "kind": "audio",
        "prompt": request.input,
        "n": 1,
        "seed": params.random_seed() if request.seed is None else request.seed,
        "output_format": request.response_format,
        "speed": request.speed,
        "sample_rate": request.sample_rate,
        **more,
    }
    if len(asks.outputs(pipe)) > 1:
        job["modalities"] = ["audio"]
    return asks.ask(pipe, request, endpoint, job, last)


def _manner(pipe: Pipeline, request: schema_speech.Speech) -> dict[str, Any]:
    """How to say it, for models that can be told. Raises InvalidRequest."""
    said = {name: value for name in params.SPEECH_FIELDS if (value := getattr(request, name)) is not None}
    params.check_extra(pipe, said)
    for name, value in said.items():
        if name != "ref_audio":
            params.check_text(pipe, value, name)
    if "ref_text" in said and "ref_audio" not in said:
        raise errors.InvalidRequest("ref_text is what ref_audio says; give both.", param="ref_text")
    return {**said, "ref_audio": True} if "ref_audio" in said else said


def _heard(services: Services, request: schema_speech.Speech, ask: submission.Ask) -> submission.Ask:
    """The job with the sound that the request brings. Raises InvalidRequest for what is none, or cannot be had."""
    if request.ref_audio is None:
        return ask
    config = services.config
    content = remote.fetch(request.ref_audio, config.allow_remote_media, "ref_audio", config.max_upload_bytes)
    sounds.check(content, "ref_audio")
    sound = payloads.Tensor("uint8", (len(content),), memoryview(content))
    return dataclasses.replace(ask, inputs=(payloads.Item({}, {"ref_audio": sound}),))


def _check_rate(request: schema_speech.Sound) -> None:
    """Raise InvalidRequest for a rate that the format does not know: another one would not be what was asked."""
    known = audio.FORMAT_RATES.get(request.response_format)
    if request.sample_rate is None or known is None or request.sample_rate in known:
        return
    raise errors.InvalidRequest(
        f"sample_rate {request.sample_rate}: {request.response_format} knows {', '.join(map(str, known))}.",
        param="sample_rate",
    )


def _generation(pipe: Pipeline, request: schema_speech.AudioGeneration) -> dict[str, Any]:
    """What only a diffusion model can be asked. Raises InvalidRequest."""
    last = asks.last_stage(pipe, ("audio",))
    if last.execution_type != "diffusion":
        names = ("audio_length", "audio_start", "negative_prompt", "num_inference_steps", "guidance_scale")
        asks.refuse(request, names, "is for models that make sound by diffusion, which this one does not")
    params.check_text(pipe, request.negative_prompt or "", "negative_prompt")
    if (request.num_inference_steps or 1) > pipe.max_steps:
        raise errors.InvalidRequest(
            f"num_inference_steps must be from 1 to {pipe.max_steps}.", param="num_inference_steps"
        )
    if (request.audio_length or 0) > pipe.max_audio_s:
        raise errors.InvalidRequest(f"audio_length must be at most {pipe.max_audio_s:g} s.", param="audio_length")
    if request.audio_start is not None and request.audio_length is None:
        raise errors.InvalidRequest("audio_start needs audio_length.", param="audio_start")
    return {
        "seconds": request.audio_length,
        "negative_prompt": request.negative_prompt,
        "num_inference_steps": request.num_inference_steps,
        "guidance_scale": request.guidance_scale,
        "stage_params": _length(last, request),
    }


def _length(last: Stage, request: schema_speech.AudioGeneration) -> dict[str, Any] | None:
    """Where vLLM-Omni's audio models look for it, beside the config's other arguments of this kind."""
    if request.audio_length is None:
        return None
    start = request.audio_start or 0.0
    span = {"audio_start_in_s": start, "audio_end_in_s": start + request.audio_length}
    return {str(last.stage_id): {"extra_args": {**last.default_sampling_params.get("extra_args", {}), **span}}}


@blueprint.get("/v1/audio/voices")
def voices() -> flask.Response:
    """What ``voice`` may be, for the model that ``model`` names."""
    services = current()
    pipe = asks.pipeline(services, flask.request.args.get("model"), ("audio",), "sound")
    return openai_format.reply({"voices": list(pipe.voices)})


# -- the answer --------------------------------------------------------------------------------------------------------


def _answer(services: Services, request: schema_speech.Sound, ask: submission.Ask) -> flask.Response:
    if request.stream_format == "sse":
        return _events(services, ask)
    record = submission.complete(services, ask)
    entry = _entry(record)
    answer = asks.file(services, entry["file"], content_type(entry))
    if request.stream or request.stream_format:
        answer.headers.pop("Content-Length", None)  # in pieces: the transfer's end is the end
    return answer


def _entry(record: job.Job) -> Mapping[str, Any]:
    entry: Mapping[str, Any] = (record.result or {})["data"][0]
    return entry


def content_type(entry: Mapping[str, Any]) -> str:
    """A sound's media type; bare samples say what they are."""
    said = str(entry["content_type"])
    return f"{said};rate={entry['sample_rate']};channels={entry['channels']}" if said == audio.TYPES["pcm"] else said


def _events(services: Services, ask: submission.Ask) -> flask.Response:
    watch = submission.Watch(services, ask)
    body = flask.stream_with_context(_pieces(services, watch))
    answer = flask.Response(body, content_type="text/event-stream; charset=utf-8", headers=events.HEADERS)
    answer.call_on_close(watch.close)
    return answer


def _pieces(services: Services, watch: submission.Watch) -> Iterator[bytes]:
    """The file in pieces once it is made, and comments until then; one last event says that it is whole, or why not."""
    yield b": accepted\n\n"  # the status and the job's id go out with it
    written_at = time.monotonic()
    try:
        for record in watch:
            if record is None:
                if time.monotonic() - written_at >= events.KEEP_ALIVE_S:
                    yield b": keep-alive\n\n"
                    written_at = time.monotonic()
                continue
            if record.state is not job.JobState.SUCCEEDED:
                raise submission.JobEnded(record)
            entry = _entry(record)
            content = asks.read(services, entry["file"])
            for start in range(0, len(content), _EVENT_BYTES):
                data = base64.b64encode(content[start : start + _EVENT_BYTES]).decode()
                yield _data({"type": "speech.audio.delta", "audio": data})
            yield _data({"type": "speech.audio.done"})
    except errors.OmniqueueError as exc:
        yield events.event("error", {"type": "speech.audio.error", **openai_format.of_error(exc).body()})
    except Exception:  # the status line is long gone, so this is the only way to say it
        log.exception("action=stream_crashed job=%s", watch.job_id)
        yield events.event("error", {"type": "speech.audio.error", **openai_format.CRASHED.body()})


def _data(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


_MADE = openapi.Content((*audio.TYPES.values(), "text/event-stream"), "The sound; with stream_format sse, events.")
_VOICES = openapi.Operation(
    method="GET",
    path="/v1/audio/voices",
    summary="What a model can be asked for as voice",
    responses={200: schema_speech.Voices},
    parameters=(openapi.Parameter("model", "query", str, "A served model name; without it the first that speaks."),),
    errors=(404,),
)
_SOUNDS = tuple(
    openapi.Operation(
        method="POST",
        path=path,
        summary=summary,
        request=request,
        responses={200: _MADE},
        parameters=(openapi.IDEMPOTENCY_KEY,),
        errors=openapi.SUBMITS,
        headers={200: ("X-Omniqueue-Job-Id",)},
    )
    for path, summary, request in (
        ("/v1/audio/speech", "Say a text", schema_speech.Speech),
        ("/v1/audio/generate", "Make a sound from a description", schema_speech.AudioGeneration),
    )
)
operations = (_VOICES, *_SOUNDS)
