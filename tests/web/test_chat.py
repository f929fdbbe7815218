"""Chat completions, whole and streamed, with fake engines behind a real stage host."""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from omniqueue.store import Claim, Store
from tests.web import live, support
from tests.web.live import Live
from web import chat, chat_stream, events

CHAT = "/v1/chat/completions"
WORDS = "one two three four five"


@pytest.fixture(scope="module")
def served(valkey: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    pipes = [live.shipped(name) for name in ("fake_text", "fake_speech", "fake_image")]
    with live.running(valkey, tmp_path_factory.mktemp("chat"), *pipes) as running:
        yield running


def body(text: str = WORDS, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def complete(served: Live, **fields: Any) -> Any:
    response = served.post(CHAT, json=body(**fields))
    assert response.status_code == 200, response.json
    return response.json


def stream(served: Live, **fields: Any) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """The chunks, and all events."""
    response = served.post(CHAT, json=body(stream=True, **fields))
    assert response.status_code == 200, response.json
    assert response.content_type == "text/event-stream; charset=utf-8"
    found = live.events(response.response)
    return [json.loads(data) for name, data in found if not name and data != "[DONE]"], found


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(delta.get("content") or "" for delta in deltas)


# -- whole -------------------------------------------------------------------------------------------------------------


def test_an_answer_has_openais_shape(served: Live) -> None:
    answer = complete(served)
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake-text"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": WORDS, "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}


def test_n_answers_count_the_conversation_once(served: Live) -> None:
    answer = complete(served, n=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 15, "total_tokens": 20}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_length_is_limited(served: Live, name: str) -> None:
    [choice] = complete(served, **{name: 2})["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one two", "length")


def test_a_stop_text_ends_it_and_is_left_out(served: Live) -> None:
    assert complete(served, stop="three")["choices"][0]["message"]["content"] == "one two "
    assert complete(served, stop=["four", "two"])["choices"][0]["message"]["content"] == "one "


def test_parameters_reach_the_stage_that_writes_and_no_other(served: Live) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "presence_penalty": 1.0, "frequency_penalty": -1.0,
        "repetition_penalty": 1.1, "logit_bias": {"17": -5.0}, "min_tokens": 1, "ignore_eos": True, "stop": ["x"],
        "max_tokens": 4,
    }  # fmt: skip
    response = served.post(CHAT, json=body(model="fake-speech", seed=7, n=1, **fields))
    assert response.status_code == 200, response.json
    thinker, talker, vocoder = (stage.params for stage in served.job(response).stages)
    assert thinker == {**fields, "seed": 7}
    assert talker == {"seed": 7}
    assert vocoder == {"seed": 7}


def test_messages_go_to_the_engine_as_they_are_for_its_template(served: Live) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "ok", "refusal": None, "tool_calls": []},
        {"role": "user", "content": "c"},
    ]
    response = served.post(CHAT, json={"messages": messages})
    assert response.status_code == 200, response.json
    request = served.job(response).request
    assert [(one["role"], one["content"]) for one in request["messages"]] == [
        ("system", "Be brief."), ("user", "a\nb"), ("assistant", "ok"), ("user", "c"),
    ]  # fmt: skip
    assert request["prompt"] == "c"


def test_logprobs_come_in_openais_shape(served: Live) -> None:
    [choice] = complete(served, logprobs=True, top_logprobs=2)["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == WORDS.split()
    assert choice["logprobs"]["content"][0] == {
        "token": "one", "logprob": 0.0, "bytes": [111, 110, 101], "top_logprobs": [],
    }  # fmt: skip


def test_a_long_answer_comes_whole(served: Live) -> None:
    text = "苹果 " * 6000
    assert complete(served, text=text)["choices"][0]["message"]["content"] == " ".join(text.split())
    [choice] = complete(served, text="a " * 3000, logprobs=True)["choices"]
    assert len(choice["logprobs"]["content"]) == 3000


def test_a_model_that_paints_answers_with_a_picture(served: Live) -> None:
    answer = complete(served, model="fake-image", size="64x32", seed=3)
    [part] = answer["choices"][0]["message"]["content"]
    head, _, data = part["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
        assert picture.size == (64, 32)
    assert answer["usage"]["total_tokens"] == 0


def test_a_model_that_speaks_answers_with_text_and_sound(served: Live) -> None:
    message = complete(served, model="fake-speech", audio={"format": "mp3", "voice": "nova"})["choices"][0]["message"]
    assert message["content"] == WORDS
    assert message["audio"]["transcript"] == WORDS
    assert base64.b64decode(message["audio"]["data"])[:3] == b"ID3"
    alone = complete(served, model="fake-speech", modalities=["audio"])["choices"][0]["message"]
    assert (alone["content"], alone["audio"]["transcript"]) == (None, WORDS)
    assert base64.b64decode(alone["audio"]["data"])[:4] == b"RIFF"


def test_text_alone_ends_the_job_at_the_stage_that_writes(served: Live) -> None:
    response = served.post(CHAT, json=body(model="fake-speech", modalities=["text"]))
    assert response.json["choices"][0]["message"] == {"role": "assistant", "content": WORDS, "refusal": None}
    record = served.job(response)
    assert [stage.state for stage in record.stages] == ["done", "", ""]
    assert record.state.value == "succeeded"


# -- refused -----------------------------------------------------------------------------------------------------------

BAD = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    ({"min_tokens": 3, "max_completion_tokens": 2}, "min_tokens"),
    ({"messages": [{"role": "user", "content": " "}]}, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a\0b"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "x" * 40_000}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x" * 20_000}] * 2}, "messages"),
    ({"model": "nope"}, "model"),
    ({"model": "fake-video"}, "model"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"modalities": []}, "modalities"),
    ({"modalities": ["smell"]}, "modalities[0]"),
    ({"audio": {"format": "wav"}}, "audio"),
    ({"model": "fake-speech", "audio": {"format": "ogg"}}, "audio.format"),
    ({"model": "fake-speech", "audio": {"voice": "nobody"}}, "audio.voice"),
    ({"size": "64x64"}, "size"),
    ({"guidance_scale": 2.0}, "guidance_scale"),
    ({"model": "fake-image", "temperature": 1.0}, "temperature"),
    ({"model": "fake-image", "size": "63x64"}, "size"),
    ({"model": "fake-image", "messages": [{"role": "user", "content": "x"}] * 2}, "messages"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"n": 0}, "n"),
    ({"n": 11}, "n"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format.type"),
    ({"store": True}, "store"),
    ({"metadata": {"a": "b"}}, "metadata"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"prompt": "x"}, "prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param"), BAD)
def test_what_cannot_be_honoured_is_refused_by_name_and_starts_nothing(
    served: Live, change: dict[str, Any], param: str
) -> None:
    before = len(served.jobs())
    error = support.error_of(
        served.post(CHAT, json={**body(), **change}), 404 if change.get("model") in ("nope", "fake-video") else 400
    )
    assert str(error["param"]).startswith(param), error
    assert len(served.jobs()) == before


# -- streamed ----------------------------------------------------------------------------------------------------------


def test_a_stream_has_a_role_the_words_an_end_and_done(served: Live) -> None:
    chunks, found = stream(served)
    assert chunks[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert text_of(chunks) == WORDS
    assert chunks[-1]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert [data for _, data in found].count("[DONE]") == 1
    assert found[-1] == ("", "[DONE]")
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_comes_once_at_the_end_when_it_is_asked_for(served: Live) -> None:
    chunks, _ = stream(served, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_several_answers_are_told_apart_and_logprobs_follow_their_words(served: Live) -> None:
    chunks, _ = stream(served, n=2, logprobs=True)
    for index in range(2):
        assert text_of(chunks, index) == WORDS
        entries = [
            entry["token"]
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["index"] == index and choice["logprobs"]
            for entry in choice["logprobs"]["content"]
        ]
        assert entries == WORDS.split()


def test_a_stream_brings_the_sound_and_the_picture_as_well(served: Live) -> None:
    chunks, found = stream(served, model="fake-speech")
    assert text_of(chunks) == WORDS
    sounds = [chunk["choices"][0]["delta"]["audio"] for chunk in chunks if "audio" in chunk["choices"][0]["delta"]]
    data = b"".join(base64.b64decode(sound["data"]) for sound in sounds if "data" in sound)
    assert data[:4] == b"RIFF"
    assert int.from_bytes(data[40:44], "little") == len(data) - 44 == 48_000
    assert sounds[0]["transcript"] == WORDS
    assert found[-1][1] == "[DONE]"
    pictures, _ = stream(served, model="fake-image", size="32x32")
    [part] = [chunk["choices"][0]["delta"]["content"][0] for chunk in pictures[1:] if chunk["choices"][0]["delta"]]
    assert part["image_url"]["url"].startswith("data:image/png;base64,")


def test_what_fails_before_the_first_word_has_a_status_of_its_own(valkey: str, tmp_path: Path) -> None:
    with live.running(valkey, tmp_path, live.shipped("fake_text", raise_on="RAISE")) as served:
        support.error_of(served.post(CHAT, json=body("RAISE", stream=True)), 500)


def slow(valkey: str, tmp_path: Path, **more: Any) -> Any:
    return live.running(valkey, tmp_path, live.shipped("fake_text", **{"steps": 10, "delay_s": 0.2, **more}))


def test_words_come_while_the_stage_still_writes(valkey: str, tmp_path: Path) -> None:
    with slow(valkey, tmp_path) as served:
        response = served.post(CHAT, json=body(" ".join("abcdefghij"), stream=True))
        chunks = iter(response.response)
        next(chunks)
        assert "a" in json.loads(next(chunks)[6:])["choices"][0]["delta"]["content"]
        [record] = served.jobs()
        assert record.state.value == "running"
        assert live.events(chunks)[-1][1] == "[DONE]"


def test_a_client_that_leaves_cancels_its_job(valkey: str, tmp_path: Path) -> None:
    with slow(valkey, tmp_path, steps=100) as served:
        response = served.post(CHAT, json=body(" ".join("abcdefghij" * 10), stream=True))
        next(iter(response.response))
        response.close()
        assert live.eventually(lambda: served.jobs()[0].state.terminal)
        assert served.jobs()[0].state.value == "cancelled"


def test_a_stream_that_breaks_ends_with_one_error_event(valkey: str, tmp_path: Path) -> None:
    with slow(valkey, tmp_path, steps=50) as served:
        response = served.post(CHAT, json=body(" ".join("abcdefghij" * 5), stream=True))
        served.store.cancel(served.jobs()[0].id)
        found = live.events(response.response)
        assert [name for name, _ in found].count("error") == 1
        assert found[-1][0] == "error"
        assert json.loads(found[-1][1])["error"]["code"] == "job_cancelled"
        assert "[DONE]" not in [data for _, data in found]


def test_a_stream_that_comes_too_late_is_a_timeout(valkey: str, tmp_path: Path) -> None:
    with live.running(valkey, tmp_path, live.shipped("fake_text", hang_on="HANG")) as served:
        error = support.error_of(served.post(CHAT, json=body("HANG", stream=True, request_timeout_s=1)), 504)
        assert error["code"] == "deadline_exceeded"


def test_the_same_key_streams_the_same_answer_again(served: Live) -> None:
    headers = {"Idempotency-Key": "stream-1"}
    found = [live.events(served.post(CHAT, json=body(stream=True), headers=headers).response) for _ in range(2)]
    first, second = ([json.loads(data) for _, data in one[:-1]] for one in found)
    assert text_of(first) == text_of(second) == WORDS
    assert first[0]["id"] == second[0]["id"]


def test_a_stream_that_is_asked_for_again_is_dated_as_its_job(served: Live) -> None:
    headers = {"Idempotency-Key": "stream-2"}
    made: set[int] = set()
    for _ in range(2):
        response = served.post(CHAT, json=body(stream=True), headers=headers)
        made |= {json.loads(data)["created"] for _, data in live.events(response.response)[:-1]}
        time.sleep(1.0)
    assert made == {int(served.job(response).created_at)}


def test_a_stream_whose_router_fails_ends_with_an_error_event_too(
    valkey: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slow(valkey, tmp_path, steps=5) as served:
        response = served.post(CHAT, json=body(stream=True))
        monkeypatch.setattr(chat, "written", lambda *_: 1 / 0)
        found = live.events(response.response)
        assert found[-1][0] == "error"
        assert json.loads(found[-1][1])["error"]["code"] == "internal_error"


def test_silence_is_filled_with_comments(valkey: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 0.3)
    with slow(valkey, tmp_path, steps=1, delay_s=1.5) as served:
        response = served.post(CHAT, json=body(stream=True))
        assert b": keep-alive\n\n" in b"".join(response.response)


# -- attempts ----------------------------------------------------------------------------------------------------------


def pieces(records: Store, claim: Claim, *texts: str, at: int = 0) -> None:
    """Say these texts one after the other."""
    for text in texts:
        piece = {"attempt": claim.attempt, "index": 0, "at": at, "token": 0, "tokens": 0, "text": text}
        records.say(claim, [piece])
        at += len(text)


@pytest.fixture
def unmanned(valkey: str, tmp_path: Path) -> Iterator[Live]:
    """A router whose only stage is worked by the test."""
    with live.running(valkey, tmp_path, live.shipped("fake_text")) as served:
        host = served.hosts.pop("fake_text.stage0")
        served.hosts["fake_text.stage0"] = host
        host.dead.set()
        yield served


def claimed(served: Live) -> Claim:
    [record] = served.jobs()
    claim = served.store.claim(served.services.catalog.pipelines[0], record.id, 0, "test", alone=True)
    assert isinstance(claim, Claim)
    return claim


def finish(served: Live, claim: Claim, text: str) -> None:
    facts = {"finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 2}
    served.store.finish(claim, None, {}, {"kind": "text", "data": [{"text": text, **facts}]})


def open_stream(served: Live, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 0.05)
    response = served.post(CHAT, json=body(stream=True))
    return response.response


def test_a_second_attempt_goes_on_where_the_first_was_lost(unmanned: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = open_stream(unmanned, monkeypatch)
    first = claimed(unmanned)
    pieces(unmanned.store, first, "The cap", "ital")
    unmanned.store.fail(first, "worker_lost", "gone", retry=True)
    second = claimed(unmanned)
    pieces(unmanned.store, second, "The", " capital of", " France")
    finish(unmanned, second, "The capital of France is Paris.")
    found = live.events(chunks)
    assert text_of([json.loads(data) for _, data in found[:-1]]) == "The capital of France is Paris."
    assert found[-1][1] == "[DONE]"


def test_a_second_attempt_that_says_something_else_breaks_the_stream(
    unmanned: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = iter(open_stream(unmanned, monkeypatch))
    first = claimed(unmanned)
    pieces(unmanned.store, first, "The capital")
    got = [next(chunks), next(chunks)]
    while b"capital" not in got[-1]:
        got.append(next(chunks))
    unmanned.store.fail(first, "worker_lost", "gone", retry=True)
    second = claimed(unmanned)
    pieces(unmanned.store, second, "Paris is")
    found = live.events(chunks)
    assert [name for name, _ in found] == ["error"]
    assert "second attempt came out different" in json.loads(found[0][1])["error"]["message"]


def test_what_was_missed_comes_with_the_result(unmanned: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = open_stream(unmanned, monkeypatch)
    claim = claimed(unmanned)
    pieces(unmanned.store, claim, "The ")
    pieces(unmanned.store, claim, "of France", at=12)
    finish(unmanned, claim, "The capital of France")
    found = live.events(chunks)
    assert text_of([json.loads(data) for _, data in found[:-1]]) == "The capital of France"


def test_the_size_of_a_sounds_pieces_leaves_no_padding_inside() -> None:
    assert chat_stream._SOUND_BYTES % 3 == 0


def test_without_a_model_the_first_that_writes_answers(valkey: str, tmp_path: Path) -> None:
    with live.running(valkey, tmp_path, live.shipped("fake_image"), live.shipped("fake_text")) as served:
        assert complete(served)["model"] == "fake-text"
