"""A chat completion as server-sent events, while its text is written.

What a worker says is a hint: pieces come through Redis, some may be missing, and a worker may die after it has said
half of an answer. The record's result is the truth, so each piece says where it begins; what was missed comes with the
result. A second attempt begins anew: what it repeats is left out, and one that does not repeat what the client has
already read ends the stream with an error, since there is no taking back.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import flask
import msgspec

from omniqueue import errors, job
from web import asks, chat, events, openai_format, schema_chat, submission
from web.services import Services

log = logging.getLogger(__name__)

#: Bytes of sound in one chunk; a multiple of three, so that each piece's base64 stands for itself.
_SOUND_BYTES = 3 * 16 * 1024


@dataclass
class _Heard:
    """One answer: what the client has been sent, and how far the attempt that writes it has come."""

    sent: str = ""
    tokens: int = 0
    attempt: int = 0
    at: int = 0
    #: A piece of this attempt was missed: the rest comes with the result.
    gap: bool = False


def response(services: Services, ask: submission.Ask, request: schema_chat.ChatCompletion) -> flask.Response:
    """Submit and stream. What fails before the first word, within a few seconds, has a status of its own."""
    watch = submission.Watch(services, ask)
    stream = _Stream(services, ask, request, watch)
    try:
        stream.wait_for_a_word(events.KEEP_ALIVE_S)
    except BaseException:
        watch.close()
        raise
    # Inside the application's context, which the error shapes need.
    body = flask.stream_with_context(stream.events())
    answer = flask.Response(body, content_type="text/event-stream; charset=utf-8", headers=events.HEADERS)
    answer.call_on_close(watch.close)
    return answer


class _Stream:
    """The events of one request."""

    def __init__(
        self,
        services: Services,
        ask: submission.Ask,
        request: schema_chat.ChatCompletion,
        watch: submission.Watch,
    ) -> None:
        self._services, self._ask, self._watch = services, ask, watch
        self._words = iter(watch)
        self._count = bool(request.stream_options and request.stream_options.include_usage)
        self._head = chat.head(ask.pipeline, watch.job_id, ask.job, watch.created_at, "chat.completion.chunk")
        self._answers = [_Heard() for _ in range(request.n)]
        self._with_text = "text" in ask.job.get("modalities", ("text",))
        self._after = "-"
        self._ready: list[dict[str, Any]] = []
        self._record: job.Job | None = None

    def wait_for_a_word(self, timeout_s: float) -> None:
        """Return with the first piece, the end of the job, or after a while. Raises what the end of a job raises."""
        until = time.monotonic() + timeout_s
        while not self._ready and self._record is None and time.monotonic() < until:
            self._listen()

    def _listen(self) -> None:
        """One look at what was said; the time it may take is a fraction of a second."""
        record = next(self._words)
        if record is not None and record.state is not job.JobState.SUCCEEDED:
            raise submission.JobEnded(record)
        self._record = record
        if record is None:
            for name, piece in self._said():
                self._after = name
                self._ready += self._piece(piece)

    def _said(self) -> list[tuple[str, dict[str, Any]]]:
        try:
            return self._services.store.said(self._watch.job_id, self._after)
        except errors.BrokerUnavailable:
            return []

    def events(self) -> Iterator[bytes]:
        """Chunks, then [DONE]; or one error event in its place."""
        try:
            for index in range(len(self._answers)):
                yield self._chunk(index, {"role": "assistant", "content": ""})
            written_at = time.monotonic()
            while self._record is None:
                self._listen()
                yield from self._flush()
                if self._ready:
                    written_at = time.monotonic()
                elif time.monotonic() - written_at >= events.KEEP_ALIVE_S:
                    yield b": keep-alive\n\n"
                    written_at = time.monotonic()
                self._ready = []
            yield from self._rest(self._record)
            yield _data("[DONE]")
        except errors.OmniqueueError as exc:
            yield events.event("error", openai_format.of_error(exc).body())
        except Exception:  # the status line is long gone, so this is the only way to say it
            log.exception("action=stream_crashed job=%s", self._watch.job_id)
            yield events.event("error", openai_format.CRASHED.body())

    def _flush(self) -> Iterator[bytes]:
        for piece in self._ready:
            yield self._chunk(piece["index"], {"content": piece["text"]}, piece.get("logprobs"))

    def _piece(self, piece: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What of a piece is new to the client."""
        heard = self._answers[piece["index"]]
        if piece["attempt"] > heard.attempt:
            heard.attempt, heard.at, heard.gap = piece["attempt"], 0, False
        if piece["attempt"] < heard.attempt or heard.gap or piece["at"] != heard.at:
            heard.gap = heard.gap or piece["attempt"] == heard.attempt
            return []
        heard.at += len(piece["text"])
        return self._news(piece["index"], piece["at"], piece["text"], piece["token"], piece.get("logprobs"))

    def _news(
        self, index: int, at: int, text: str, token: int, logprobs: list[Mapping[str, Any]] | None
    ) -> list[dict[str, Any]]:
        """The part of ``text``, which begins at ``at`` and at token ``token``, that was not sent; it counts as sent."""
        heard = self._answers[index]
        known = heard.sent[at : at + len(text)]
        if not text.startswith(known):
            raise errors.JobFailed(
                "The worker that wrote this text was lost, and the second attempt came out different; what was sent "
                "cannot be taken back. Send the request again."
            )
        new = text[len(known) :]
        entries = logprobs[max(0, heard.tokens - token) :] if logprobs is not None else None
        heard.sent += new
        if logprobs is not None:
            heard.tokens = max(heard.tokens, token + len(logprobs))
        if not new and not entries:
            return []
        return [{"index": index, "text": new, **({"logprobs": entries} if entries is not None else {})}]

    # -- the end -----------------------------------------------------------------------------------------------------

    def _rest(self, record: job.Job) -> Iterator[bytes]:
        """What the pieces did not bring, and why it ends."""
        entries = chat.written(self._services, record)
        kind = (record.result or {}).get("kind")
        for index, entry in enumerate(entries):
            if self._with_text and entry.get("text") is not None:
                self._ready = self._news(index, 0, entry["text"], 0, entry.get("logprobs"))
                yield from self._flush()
            if kind == "image":
                yield self._chunk(index, {"content": [chat.image_part(self._services, entry)]})
            if kind == "audio":
                yield from self._sound(record, index, entry)
            yield self._chunk(index, {}, reason=entry.get("finish_reason", "stop"))
        if self._count:
            yield _data({**self._head, "choices": [], "usage": chat.usage(entries)})

    def _sound(self, record: job.Job, index: int, entry: Mapping[str, Any]) -> Iterator[bytes]:
        head = chat.sound_head(self._services, record, index)
        yield self._chunk(index, {"audio": {"id": head["id"], "transcript": entry.get("text", "")}})
        content = asks.read(self._services, entry["file"])
        for start in range(0, len(content), _SOUND_BYTES):
            data = base64.b64encode(content[start : start + _SOUND_BYTES]).decode()
            yield self._chunk(index, {"audio": {"id": head["id"], "data": data}})
        yield self._chunk(index, {"audio": head})

    def _chunk(self, index: int, delta: Mapping[str, Any], logprobs: Any = None, reason: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": chat.logprobs(logprobs), "finish_reason": reason}
        return _data({**self._head, "choices": [choice], **({"usage": None} if self._count else {})})


def _data(body: Any) -> bytes:
    return b"data: " + (body.encode() if isinstance(body, str) else msgspec.json.encode(body)) + b"\n\n"
