"""Thinker, talker and vocoder over HTTP and real Celery workers: vLLM-Omni's own tokens and waves, whatever dies."""

from __future__ import annotations

import base64
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from omniqueue.job import Job
from tests.engines import handover
from tests.engines.handover import Native
from tests.engines.handover_cases import PIPELINES, Request
from tests.pipeline import conftest
from tests.pipeline.conftest import Product

pytestmark = pytest.mark.engine

NAME = "Qwen/Qwen2.5-Omni-7B"
REQUESTS = PIPELINES["qwen2_5_omni"].requests
THINKER, TALKER, VOCODER = range(3)
#: The conversation whose prompt is that of the first request.
CONVERSATION = [
    {"role": "system", "content": "You are a helpful voice"},
    {"role": "user", "content": "say hello to the nice world"},
]


def wave(native: Native, request: Request) -> bytes:
    return handover.wav(native.tensors[f"{request.name}:{VOCODER}/audio"], 24_000)


def ask(product: Product, request: Request) -> tuple[int, Any]:
    body = {"model": NAME, "input": request.job["prompt"], "seed": request.seed, "response_format": "wav"}
    return product.post("/v1/audio/speech", body, 290.0)


def say(product: Product, request: Request) -> bytes:
    status, answer = ask(product, request)
    assert status == 200, answer
    assert isinstance(answer, bytes)
    return answer


def chat(product: Product, *modalities: str) -> tuple[Any, Job]:
    """The message that a conversation is answered with, and its job's record."""
    body = {"model": NAME, "messages": CONVERSATION, "seed": REQUESTS[0].seed, "modalities": list(modalities)}
    status, answer = product.post("/v1/chat/completions", body, 290.0)
    assert status == 200, answer
    job = product.store().job(answer["id"].removeprefix("chatcmpl-"))
    assert job is not None
    return answer["choices"][0]["message"], job


def test_speech_is_that_of_native_omni_with_all_requests_in_flight(product: Product, native: Native) -> None:
    with ThreadPoolExecutor(8) as clients:
        files = list(clients.map(lambda request: say(product, request), [*REQUESTS, *REQUESTS]))
    assert files == [wave(native, request) for request in [*REQUESTS, *REQUESTS]]


def test_one_request_can_have_the_thinkers_text_and_the_vocoders_sound(product: Product, native: Native) -> None:
    message, job = chat(product, "text", "audio")
    assert message["content"] == native.stage(REQUESTS[0].name, THINKER)["text"]
    assert base64.b64decode(message["audio"]["data"]) == wave(native, REQUESTS[0])
    assert [stage.state for stage in job.stages] == ["done"] * 3


def test_text_alone_ends_with_the_thinker(product: Product, native: Native) -> None:
    message, job = chat(product, "text")
    assert message["content"] == native.stage(REQUESTS[0].name, THINKER)["text"]
    assert "audio" not in message
    assert [stage.attempt for stage in job.stages] == [1, 0, 0]


def test_cancels_at_random_moments_change_no_other_answer(product: Product, native: Native) -> None:
    records, dice = product.store(), random.Random(3)
    asked = [request for request in REQUESTS for _ in range(8)]
    cancelled: set[str] = set()
    with ThreadPoolExecutor(8) as clients:
        answers = [clients.submit(ask, product, request) for request in asked]
        while not all(answer.done() for answer in answers):
            live = [job.id for job in records.jobs("qwen2_5_omni", 16) if not job.state.terminal]
            if live and len(cancelled) < len(asked) // 2:
                chosen = dice.choice(live)
                cancelled.add(chosen)
                records.cancel(chosen)
            time.sleep(dice.random() * 0.3)
    ended = [(request, *answer.result()) for request, answer in zip(asked, answers, strict=True)]
    served = [(request, content) for request, status, content in ended if status == 200]
    assert 0 < len(served) < len(asked)
    for request, content in served:
        assert content == wave(native, request)
    assert say(product, REQUESTS[0]) == wave(native, REQUESTS[0])


def test_kill_9_of_the_talkers_worker_changes_no_byte_and_runs_no_thinker_again(
    product: Product, native: Native
) -> None:
    """``up`` starts the worker again; the thinker's payload is still there for it."""
    deadline = time.monotonic() + 500
    killed = None
    while killed is None:
        assert time.monotonic() < deadline
        seen = {job.id for job in product.store().jobs("qwen2_5_omni", 1000)}
        with ThreadPoolExecutor(1) as clients:
            answer = clients.submit(say, product, REQUESTS[0])
            killed = _kill_the_talker_at_work(product, seen)
            assert answer.result(timeout=295) == wave(native, REQUESTS[0])
    job = product.store().job(killed)
    assert job is not None
    assert [stage.attempt for stage in job.stages] == [1, 2, 1]


def _kill_the_talker_at_work(product: Product, seen: set[str]) -> str | None:
    """The id of the new job whose talker died under it, or None when it was done before it could be stopped."""
    records, deadline = product.store(), time.monotonic() + 120
    while time.monotonic() < deadline:
        job = next((job for job in records.jobs("qwen2_5_omni", 1) if job.id not in seen), None)
        state = job.stages[TALKER].state if job else ""
        if job is not None and state == "running":
            worker = next(one for one in records.workers() if one["worker"] == job.stages[TALKER].worker)
            os.kill(worker["pid"], signal.SIGSTOP)
            again = records.job(job.id)
            if again is not None and again.stages[TALKER].state == "running":
                psutil.Process(worker["pid"]).kill()
                return job.id
            os.kill(worker["pid"], signal.SIGCONT)
        if state in ("running", "done"):
            return None
        time.sleep(0.002)
    raise AssertionError("The talker never ran.")


def test_nothing_is_left(product: Product) -> None:
    deadline = time.monotonic() + 30
    while conftest.shm_files(product.settings) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert conftest.shm_files(product.settings) == []
