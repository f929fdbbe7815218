"""The fake engine keeps the contract that tests, benchmarks and users' own tests rely on."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniqueue import engines, errors
from omniqueue.engines.base import Engine, StageOutput, StageRequest
from omniqueue.engines.fake import FakeEngine
from omniqueue.payloads import Tensor
from tests.unit import support


def engine(kind: str | None = "image", **args: Any) -> FakeEngine:
    """A started fake engine of one final stage, or of a middle one when ``kind`` is None."""
    pipe = support.with_stage(support.pipeline(1), 0, engine_args=args, final_output=bool(kind), final_output_type=kind)
    made = FakeEngine()
    made.start(pipe, pipe.stages[0], "", lambda phase: None)
    return made


def request(job: Mapping[str, Any], index: int = 0, **changes: Any) -> StageRequest:
    facts: dict[str, Any] = {"prompt": "p", "width": 64, "height": 32, **job}
    base = StageRequest("r0", facts, index, {"seed": facts.get("seed", 0) + index}, {})
    return dataclasses.replace(base, **changes)


def run(made: FakeEngine, asked: StageRequest) -> StageOutput:
    return asyncio.run(made.generate(asked, lambda done, total: None))


def image(job: Mapping[str, Any], index: int = 0) -> Tensor:
    return run(engine(), request(job, index)).tensors["image"]


def test_it_is_an_engine_by_the_protocol_and_by_its_name() -> None:
    assert isinstance(FakeEngine(), Engine)
    assert isinstance(engines.create(support.pipeline(1).stages[0]), FakeEngine)


# -- the picture -------------------------------------------------------------------------------------------------------


@given(prompt=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_the_first_32_pixels_red_channel_is_the_prompts_sha256(prompt: str) -> None:
    pixels = bytes(image({"prompt": prompt}).buffer)
    assert pixels[: 32 * 3 : 3] == hashlib.sha256(prompt.encode()).digest()


@pytest.mark.parametrize("size", [(8, 8), (16, 2), (1, 64), (5, 7)])
def test_the_hash_goes_on_row_by_row_in_a_narrow_picture(size: tuple[int, int]) -> None:
    width, height = size
    pixels = bytes(image({"prompt": "苹果", "width": width, "height": height}).buffer)
    rows = [pixels[y * width * 3 : (y + 1) * width * 3] for y in range(height)]
    red = [row[x * 3] for row in rows for x in range(width)]
    assert bytes(red[:32]) == hashlib.sha256("苹果".encode()).digest()


def test_a_picture_of_fewer_than_32_pixels_carries_what_fits() -> None:
    pixels = bytes(image({"width": 2, "height": 3}).buffer)
    assert pixels[::3] == hashlib.sha256(b"p").digest()[:6]


@pytest.mark.parametrize("size", [(1, 1), (64, 32), (31, 257), (256, 8)])
def test_the_picture_has_exactly_the_size_that_was_asked(size: tuple[int, int]) -> None:
    made = image({"width": size[0], "height": size[1]})
    assert (made.dtype, made.shape) == ("uint8", (size[1], size[0], 3))


def test_the_picture_is_a_function_of_prompt_seed_and_parameters_and_of_nothing_else() -> None:
    base = {"prompt": "a", "seed": 1, "guidance_scale": 2.0, "num_inference_steps": 3}
    one = bytes(image(base).buffer)
    assert bytes(image(dict(reversed(base.items()))).buffer) == one
    slow = run(engine(steps=3, delay_s=0.001), request(base, request_id="another")).tensors["image"]
    assert bytes(slow.buffer) == one
    changes: list[dict[str, Any]] = [
        {"prompt": "b"}, {"seed": 2}, {"guidance_scale": 2.5}, {"num_inference_steps": 4}, {"negative_prompt": "n"},
    ]  # fmt: skip
    others = [bytes(image({**base, **change}).buffer) for change in changes]
    assert len({one, *others}) == 1 + len(changes)


def test_items_of_one_job_differ_by_their_seed_only() -> None:
    pictures = [bytes(image({"seed": 5}, index).buffer) for index in range(3)]
    assert len(set(pictures)) == 3
    assert bytes(image({"seed": 6}, 0).buffer) == pictures[1]


def test_the_picture_is_the_same_in_another_process() -> None:
    program = textwrap.dedent("""
        import hashlib
        from tests.unit import test_fake_engine as t
        print(hashlib.sha256(bytes(t.image({"prompt": "p", "seed": 3}).buffer)).hexdigest())
    """)
    here = hashlib.sha256(bytes(image({"prompt": "p", "seed": 3}).buffer)).hexdigest()
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=_path())
    assert there.stdout.strip() == here


def _path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONHASHSEED": "random"}


# -- text, sound, video, payloads --------------------------------------------------------------------------------------


def test_text_echoes_the_prompts_words_up_to_max_tokens() -> None:
    data = run(engine("text"), request({"prompt": "one two  three"})).data
    assert (data["text"], data["finish_reason"], data["prompt_tokens"]) == ("one two three", "stop", 3)
    assert len(data["token_ids"]) == 3
    short = run(engine("text"), request({"prompt": "one two three", "max_tokens": 2})).data
    assert (short["text"], short["finish_reason"], len(short["token_ids"])) == ("one two", "length", 2)


def test_sound_is_a_sine_of_the_requested_length() -> None:
    output = run(engine("audio"), request({"seconds": 0.5}))
    audio = output.tensors["audio"]
    assert (audio.dtype, audio.shape, output.data["sample_rate"]) == ("float32", (12_000,), 24_000)
    samples = memoryview(audio.buffer).cast("B").cast("f")
    crossings = sum((samples[i] < 0) != (samples[i + 1] < 0) for i in range(len(samples) - 1))
    assert crossings in (439, 440)
    assert 0.49 < max(samples) <= 0.5


def test_video_is_a_few_frames_of_the_requested_size() -> None:
    output = run(engine("video"), request({"num_frames": 6, "fps": 12}))
    assert output.tensors["video"].shape == (6, 32, 64, 3)
    assert output.data["fps"] == 12
    assert run(engine("video"), request({})).tensors["video"].shape == (4, 32, 64, 3)


def test_a_middle_stage_leaves_a_payload_of_exactly_the_size_that_was_asked() -> None:
    for size in (0, 1, 63, 64, 65, 100_000):
        tensors = run(engine(None, payload_bytes=size), request({})).tensors
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        assert shapes == ({"mark": ("uint8", (64,)), "payload": ("uint8", (size,))} if size else {})


def test_what_it_says_is_json_and_says_that_it_is_fake() -> None:
    for kind in ("image", "text", "audio", "video", None):
        data = run(engine(kind), request({})).data
        assert json.loads(json.dumps(data)) == data
        assert data["fake"] is True


def test_request_parameters_win_over_the_configs() -> None:
    made = engine()
    made._stage = dataclasses.replace(made._stage, default_sampling_params={"a": 1, "b": 2})  # type: ignore[type-var]
    assert run(made, request({}, params={"b": 3})).data["resolved"] == {"a": 1, "b": 3}


def test_a_payload_of_another_request_is_noticed() -> None:
    first = engine(None, payload_bytes=1000)
    for job, fits in (({"prompt": "p"}, True), ({"prompt": "q"}, False)):
        source = run(first, request(job))
        asked = request({"prompt": "p"}, sources={0: source})
        if fits:
            assert run(engine(), asked).tensors["image"].nbytes
        else:
            with pytest.raises(errors.EngineError, match="not the one of this request"):
                run(engine(), asked)


# -- steps, aborting, misbehaving --------------------------------------------------------------------------------------


def test_progress_is_told_step_by_step() -> None:
    told: list[tuple[int, int]] = []
    asyncio.run(engine(steps=4).generate(request({}), lambda done, total: told.append((done, total))))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("by", ["abort", "cancel"])
def test_an_abort_ends_it_within_one_step_and_leaves_its_neighbour_alone(by: str) -> None:
    async def scene() -> None:
        made, steps, reached = engine(steps=1000, delay_s=0.001), [0], asyncio.Event()
        neighbour_steps: list[int] = []

        def progress(done: int, total: int) -> None:
            steps[0] = done
            if done == 5:
                reached.set()

        first = asyncio.create_task(made.generate(request({}, request_id="a"), progress))
        second = asyncio.create_task(
            made.generate(request({}, request_id="b"), lambda done, total: neighbour_steps.append(done))
        )
        await reached.wait()
        at = steps[0]
        if by == "abort":
            await made.abort("a")
            await made.abort("unknown")
        else:
            first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert steps[0] <= at + 1
        assert made._running.keys() == {"b"}
        await second
        assert neighbour_steps[-1] == 1000
        assert made._running == {}

    asyncio.run(scene())


def test_hang_on_never_returns_but_can_be_cancelled() -> None:
    async def scene() -> None:
        made = engine(hang_on="STOP HERE")
        task = asyncio.create_task(made.generate(request({"prompt": "please STOP HERE"}), lambda done, total: None))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not task.done()
        await made.abort("r0")
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await made.generate(request({"prompt": "other"}), lambda done, total: None)).tensors

    asyncio.run(scene())


def test_raise_on_raises_for_its_prompts_only() -> None:
    made = engine(raise_on="bad")
    with pytest.raises(errors.EngineError, match="raise_on"):
        run(made, request({"prompt": "a bad prompt"}))
    assert run(made, request({"prompt": "a good prompt"})).tensors


def test_exit_on_kills_its_process_with_status_9() -> None:
    program = textwrap.dedent("""
        from tests.unit import test_fake_engine as t
        made = t.engine(exit_on="die")
        t.run(made, t.request({"prompt": "live"}))
        print("alive", flush=True)
        t.run(made, t.request({"prompt": "now die"}))
        print("still alive", flush=True)
    """)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=_path())
    assert (ended.returncode, ended.stdout) == (9, "alive\n")
    assert "exit_on" in ended.stderr


@pytest.mark.parametrize("needle", ["", None])
def test_an_empty_needle_is_in_no_prompt(needle: str | None) -> None:
    made = engine(raise_on=needle, exit_on=needle, hang_on=needle)
    assert run(made, request({"prompt": ""})).tensors


def test_loading_waits_reports_and_tells_the_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("omniqueue.engines.fake.time.sleep", slept.append)
    pipe = support.pipeline(2, engine_args={"load_delay_s": 12.5})
    phases: list[str] = []
    made = FakeEngine()
    loaded = made.start(pipe, pipe.stages[0], "", phases.append)
    assert (slept, loaded.topology, made.loads) == ([12.5], pipe.topology, 1)
    assert "fake" in phases[0]


def test_an_engine_that_was_not_started_is_dead() -> None:
    with pytest.raises(errors.EngineDead):
        run(FakeEngine(), request({}))


def test_it_is_always_well_and_may_be_closed_twice() -> None:
    made = engine()
    asyncio.run(made.check_health())
    closing: Callable[[], None] = made.close
    closing()
    closing()
