"""POST /v1/chat/completions: what a request may say, and what comes back.

Fields of OpenAI's that cannot be honoured are listed with the values that change nothing, as in :mod:`web.schema`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from omniqueue import params
from web import answers, schema

#: Each side of the alternatives that OpenAI shows for a token.
MAX_TOP_LOGPROBS = 20
#: Longest conversation, in messages.
MAX_MESSAGES = 4096

Text = Annotated[str, Meta(min_length=1, max_length=256)]
TokenCount = Annotated[int, Meta(ge=1, le=10_000_000)]


class TextPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text as one part of a message; the parts are joined by line breaks."""

    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One turn of the conversation."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant"], Meta(description="developer means the same as system.")
    ]
    content: str | list[TextPart]
    #: Chat templates have no place for these, and clients send back the answers that they got.
    name: None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    tool_calls: Annotated[list[Any], Meta(max_length=0)] | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """How a stream is written."""

    include_usage: Annotated[bool, Meta(description="A last chunk without choices that counts the tokens.")] | None = (
        None
    )
    include_obfuscation: Literal[False] | None = None


class AudioOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The sound of an answer with the modality audio."""

    format: Annotated[
        Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"], Meta(description="pcm16 is 16-bit, little-endian.")
    ] = "wav"
    voice: Annotated[str, Meta(description="One of the model's voices (GET /v1/models).")] | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Plain text, the only format."""


class ChatCompletion(schema.Common, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    modalities: (
        Annotated[
            list[Literal["text", "audio", "image"]],
            Meta(min_length=1, max_length=3, description="What to answer with; without it all that the model makes."),
        ]
        | None
    ) = None
    audio: AudioOptions | None = None
    n: Annotated[int, Meta(ge=1, description="How many answers; answer i has seed + i.")] = 1
    stream: Annotated[bool, Meta(description="Answer with server-sent events while the text is written.")] | None = None
    stream_options: StreamOptions | None = None
    max_tokens: (
        Annotated[TokenCount, Meta(description="Most tokens of the answer; without it all there is room for.")] | None
    ) = None
    max_completion_tokens: Annotated[TokenCount, Meta(description="Another name for max_tokens.")] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=10_000_000)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1_000_000, description="-1 and 0 consider all tokens.")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop: (
        Annotated[
            Text | Annotated[list[Text], Meta(max_length=16)],
            Meta(description="Texts that end the answer; they are not part of it."),
        ]
        | None
    ) = None
    ignore_eos: Annotated[bool, Meta(description="Go on after the model has ended its answer.")] | None = None
    seed: (
        Annotated[int, Meta(ge=0, le=params.MAX_SEED, description="The same seed gives the same words again.")] | None
    ) = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Meta(pattern="^[0-9]{1,9}$")], Annotated[float, Meta(ge=-100, le=100)]],
            Meta(max_length=1024, description="By token id."),
        ]
        | None
    ) = None
    logprobs: Annotated[bool, Meta(description="Give each token's log probability.")] | None = None
    top_logprobs: (
        Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS, description="Alternatives for each token; needs logprobs.")]
        | None
    ) = None
    #: For models that answer with a picture.
    size: Annotated[str, Meta(description="Of a picture: WIDTHxHEIGHT in pixels.")] | None = None
    negative_prompt: Annotated[str, Meta(description="For pictures.")] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, description="For pictures.")] | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=20, description="For pictures.")] | None = None
    #: No model here calls tools.
    tools: Annotated[list[Any], Meta(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Any], Meta(max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None
    response_format: TextFormat | None = None
    #: Nothing is kept beyond the job's time to live, and there is one class of service.
    store: Literal[False] | None = None
    metadata: None = None
    service_tier: Literal["auto", "default"] | None = None
    reasoning_effort: None = None
    verbosity: None = None
    prediction: None = None
    web_search_options: None = None


# -- answers -----------------------------------------------------------------------------------------------------------


class TopLogprob(answers.Answer, frozen=True, kw_only=True):
    """A token that could have stood there."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(answers.Answer, frozen=True, kw_only=True):
    """A token of the answer and its alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class Logprobs(answers.Answer, frozen=True, kw_only=True):
    """The tokens of an answer, or of a piece of it."""

    content: list[TokenLogprob]
    refusal: None


class ImageUrl(answers.Answer, frozen=True, kw_only=True):
    """A picture as a data URI."""

    url: str


class ImagePart(answers.Answer, frozen=True, kw_only=True, tag_field="type", tag="image_url"):
    """A picture in an answer."""

    image_url: ImageUrl


class AnswerTextPart(answers.Answer, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text beside a picture."""

    text: str


class Sound(answers.Answer, frozen=True, kw_only=True):
    """The sound of an answer, base64."""

    id: str
    data: str
    expires_at: int
    transcript: str


class AnswerMessage(answers.Answer, frozen=True, kw_only=True):
    """The model's turn."""

    role: Literal["assistant"]
    content: str | list[ImagePart | AnswerTextPart] | None
    refusal: None
    audio: Sound | UnsetType = UNSET


class Choice(answers.Answer, frozen=True, kw_only=True):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: Logprobs | None
    finish_reason: str


class Usage(answers.Answer, frozen=True, kw_only=True):
    """Tokens of the conversation and of all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatAnswer(answers.Answer, frozen=True, kw_only=True):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    #: Unix seconds.
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage
    warnings: list[str] | UnsetType = UNSET
