"""POST /v1/chat/completions, in OpenAI's shape: text, and pictures and sound from models that make them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Any

import flask

from omniqueue import errors, job, media, params
from omniqueue.pipeline import Pipeline
from web import asks, chat_stream, decode, openai_format, openapi, schema_chat, submission
from web.services import Services, current

blueprint = flask.Blueprint("chat", __name__)

#: What an answer may be made of.
KINDS = ("text", "audio", "image")
#: Fields that only the stage that writes text understands, and go to it by their own names.
_SAMPLING = (
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "ignore_eos", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias",
)  # fmt: skip
_TEXT_ONLY = (*_SAMPLING, "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs")
_PICTURE_ONLY = ("size", "negative_prompt", "num_inference_steps", "guidance_scale")


@blueprint.post("/v1/chat/completions")
def completions() -> flask.Response:
    """Answer a conversation, whole or as it is written."""
    services, request = current(), decode.body(schema_chat.ChatCompletion)
    ask = ask_for(services, request)
    if request.stream:
        return chat_stream.response(services, ask, request)
    record = submission.complete(services, ask)
    return openai_format.reply(formatted(services, record))


def ask_for(services: Services, request: schema_chat.ChatCompletion) -> submission.Ask:
    """Everything that can be refused without the engine is refused here. Raises InvalidRequest."""
    pipe = asks.pipeline(services, request.model, KINDS, "text, sound or pictures")
    kinds = _kinds(pipe, request)
    last = asks.last_stage(pipe, kinds)
    _check(pipe, request, kinds)
    job = {"messages": messages(pipe, request.messages), "prompt": prompt(request.messages), "n": request.n}
    job |= {"seed": params.random_seed() if request.seed is None else request.seed}
    if len(asks.outputs(pipe)) > 1:
        job["modalities"] = list(kinds)
    if "text" in kinds or "audio" in kinds:
        job |= _text_fields(pipe, request)
    if "audio" in kinds:
        options = request.audio or schema_chat.AudioOptions()
        asks.check_voice(pipe, options.voice, "audio.voice")
        job |= {"output_format": options.format.removesuffix("16"), "voice": options.voice}
    if "image" in kinds:
        fields = {name: getattr(request, name) for name in _PICTURE_ONLY}
        job |= params.image_job(pipe, prompt=job["prompt"], n=request.n, seed=job["seed"], **fields)
        job["output_format"] = "png"
    job["kind"] = last.final_output_type or "image"
    return asks.ask(pipe, request, "chat.completions", job, last)


def _kinds(pipe: Pipeline, request: schema_chat.ChatCompletion) -> tuple[str, ...]:
    made = [kind for kind in asks.outputs(pipe) if kind in KINDS]
    for kind in request.modalities or ():
        if kind not in made:
            raise errors.InvalidRequest(
                f"modalities: this model does not answer with {kind}; it makes {', '.join(made)}.", param="modalities"
            )
    return tuple(request.modalities or made)


def _check(pipe: Pipeline, request: schema_chat.ChatCompletion, kinds: tuple[str, ...]) -> None:
    asks.check_n(pipe, request.n)
    if asks.text_stage(pipe) is None or not {"text", "audio"} & set(kinds):
        asks.refuse(request, _TEXT_ONLY, "is for answers with text, which this is not")
    if "image" not in kinds:
        asks.refuse(request, _PICTURE_ONLY, "is for pictures, which this model or request has none of")
    if "audio" not in kinds:
        asks.refuse(request, ("audio",), "is for answers with sound, which this is not")
    if asks.text_stage(pipe) is None and len(request.messages) > 1:
        raise errors.InvalidRequest(
            "messages: this model does not converse; it answers one message of the user.", param="messages"
        )
    if request.stream_options is not None and not request.stream:
        raise errors.InvalidRequest("stream_options needs stream.", param="stream_options")
    if request.top_logprobs is not None and not request.logprobs:
        raise errors.InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    longest = request.max_tokens or request.max_completion_tokens
    if request.min_tokens is not None and longest is not None and request.min_tokens > longest:
        raise errors.InvalidRequest(f"min_tokens must be at most max_tokens, {longest}.", param="min_tokens")
    if None not in (request.max_tokens, request.max_completion_tokens):
        raise errors.InvalidRequest(
            "max_completion_tokens is another name for max_tokens; give one of them.", param="max_completion_tokens"
        )


def messages(pipe: Pipeline, given: Iterable[schema_chat.Message]) -> list[dict[str, str]]:
    """The conversation as a chat template takes it. Raises InvalidRequest for what is too long or empty."""
    made, total = [], 0
    for index, message in enumerate(given):
        text = _text(message)
        params.check_text(pipe, text, f"messages[{index}].content")
        total += len(text)
        made.append({"role": "system" if message.role == "developer" else message.role, "content": text})
    if total > pipe.max_prompt_chars:
        raise errors.InvalidRequest(
            f"messages have {total:,} characters; at most {pipe.max_prompt_chars:,} are served.", param="messages"
        )
    if not total:
        raise errors.InvalidRequest("messages must not be empty.", param="messages")
    return made


def _text(message: schema_chat.Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.text for part in message.content)


def prompt(given: list[schema_chat.Message]) -> str:
    """What the user said last: the prompt of models that do not converse. Raises InvalidRequest when there is none."""
    for message in reversed(given):
        if message.role == "user" and (text := _text(message)).strip():
            return text
    raise errors.InvalidRequest("messages must have a text by the user.", param="messages")


def _text_fields(pipe: Pipeline, request: schema_chat.ChatCompletion) -> dict[str, Any]:
    """Parameters of the stage that writes, which the others would take for their own."""
    stage = asks.text_stage(pipe)
    if stage is None:
        return {}
    sampling = {name: getattr(request, name) for name in _SAMPLING}
    sampling["max_tokens"] = request.max_tokens or request.max_completion_tokens
    if request.logprobs:
        sampling["logprobs"] = request.top_logprobs or 0
    kept = {name: value for name, value in sampling.items() if value is not None}
    fields = {"stream": True if request.stream else None, "logprobs": True if request.logprobs else None}
    return {**fields, "stage_params": {str(stage.stage_id): kept}}


# -- the answer --------------------------------------------------------------------------------------------------------


def formatted(services: Services, record: job.Job) -> dict[str, Any]:
    """The chat completion of a job that has succeeded."""
    entries = written(services, record)
    return {
        **head(
            services.catalog.named(record.pipeline), record.id, record.request, record.created_at, "chat.completion"
        ),
        "choices": [_choice(services, record, index, entry) for index, entry in enumerate(entries)],
        "usage": usage(entries),
        **submission.warnings(services.catalog.named(record.pipeline), record),
    }


def head(pipe: Pipeline, job_id: str, request: Mapping[str, Any], created: float, kind: str) -> dict[str, Any]:
    """What a completion and each of its chunks begin with."""
    facts = {"id": f"chatcmpl-{job_id}", "object": kind, "created": int(created), "model": request["model"]}
    return {**facts, "system_fingerprint": f"fp_{pipe.fingerprint}"}


def written(services: Services, record: job.Job) -> list[dict[str, Any]]:
    """The entries of a result, texts that were stored as files read back."""
    entries = []
    for entry in (record.result or {}).get("data", ()):
        content_type = entry.get("content_type", "")
        if content_type == media.CONTENT_TYPES["txt"]:
            entries.append({**entry, "text": asks.read(services, entry["file"]).decode()})
        elif content_type == media.CONTENT_TYPES["json"]:
            entries.append({**entry, **json.loads(asks.read(services, entry["file"]))})
        else:
            entries.append(dict(entry))
    return entries


def _choice(services: Services, record: job.Job, index: int, entry: Mapping[str, Any]) -> dict[str, Any]:
    kind = (record.result or {}).get("kind")
    text = entry.get("text")
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if kind == "image":
        message["content"] = [*([{"type": "text", "text": text}] if text else []), image_part(services, entry)]
    if kind == "audio":
        if "text" not in record.request.get("modalities", ()):
            message["content"] = None
        data = base64.b64encode(asks.read(services, entry["file"])).decode()
        message["audio"] = {**sound_head(services, record, index), "data": data, "transcript": text or ""}
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs(entry.get("logprobs")),
        "finish_reason": entry.get("finish_reason", "stop"),
    }


def image_part(services: Services, entry: Mapping[str, Any]) -> dict[str, Any]:
    """A picture as a part of a message."""
    content = base64.b64encode(asks.read(services, entry["file"])).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{entry['content_type']};base64,{content}"}}


def sound_head(services: Services, record: job.Job, index: int) -> dict[str, Any]:
    """A sound's id, and until when its file is kept."""
    pipe = services.catalog.named(record.pipeline)
    ended = record.finished_at or record.created_at
    return {"id": f"audio-{record.id}-{index}", "expires_at": int(ended + pipe.result_ttl_s)}


def usage(entries: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Tokens, as the stage that wrote the text counted them; the conversation counts once."""
    entries = list(entries)
    read = max((int(entry.get("prompt_tokens", 0)) for entry in entries), default=0)
    made = sum(int(entry.get("completion_tokens", 0)) for entry in entries)
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def logprobs(entries: Iterable[Mapping[str, Any]] | None) -> dict[str, Any] | None:
    """An engine's log probabilities in OpenAI's shape."""
    if entries is None:
        return None
    content = [{**_token(entry), "top_logprobs": [_token(one) for one in entry.get("top", ())]} for entry in entries]
    return {"content": content, "refusal": None}


def _token(entry: Mapping[str, Any]) -> dict[str, Any]:
    text = str(entry["token"])
    return {"token": text, "logprob": entry["logprob"], "bytes": list(text.encode(errors="replace"))}


operations = (
    openapi.Operation(
        method="POST",
        path="/v1/chat/completions",
        summary="Answer a conversation",
        request=schema_chat.ChatCompletion,
        responses={
            200: (
                schema_chat.ChatAnswer,
                openapi.Content(("text/event-stream",), "With stream: chunks, and [DONE]; or an error event."),
            )
        },
        parameters=(openapi.IDEMPOTENCY_KEY,),
        errors=openapi.SUBMITS,
        headers={200: ("X-Omniqueue-Job-Id",)},
    ),
)
