"""The engine host with real records, payloads and media, and the fake engine in this process."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kombu
import pytest

from omniqueue import chain, errors, link, media, tasks
from omniqueue.calls import Call
from omniqueue.engines.base import Progress, StageOutput, StageRequest
from omniqueue.engines.fake import FakeEngine
from omniqueue.job import Job, JobState
from omniqueue.messages import message
from omniqueue.payloads import PayloadStore
from omniqueue.pipeline import Pipeline, Stage
from omniqueue.store import Claim, Store
from tests.unit import support
from tests.unit.test_chain import messages
from workers import host as host_module
from workers import inputs, intake
from workers.host import StageHost, worker_name

pytestmark = pytest.mark.usefixtures("broker")

JOB: dict[str, Any] = {"prompt": "p", "width": 16, "height": 8, "n": 1, "seed": 5}
HostOf = Callable[..., StageHost]


class Scripted(FakeEngine):
    """A fake engine that waits at a gate, tells what is in it, and may be slow to let go."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: set[str] = set()
        self.let_go = 0.0
        self.script: Callable[[StageRequest], None] = lambda request: None
        self.entered = threading.Condition()
        self.gates: dict[str, asyncio.Event] = {}

    async def generate(self, request: StageRequest, progress: Progress) -> StageOutput:
        self.script(request)
        with self.entered:
            self.inside.add(request.request_id)
            self.entered.notify_all()
        try:
            if request.job["prompt"].startswith("wait"):
                gate = self.gates.setdefault(request.job["prompt"], asyncio.Event())
                await gate.wait()
            return await super().generate(request, progress)
        except asyncio.CancelledError:
            await asyncio.sleep(self.let_go)
            raise
        finally:
            with self.entered:
                self.inside.remove(request.request_id)
                self.entered.notify_all()

    def wait_for(self, number: int) -> None:
        with self.entered:
            assert self.entered.wait_for(lambda: len(self.inside) == number, 30)


@pytest.fixture
def pipe() -> Pipeline:
    return support.pipeline(2, engine_args={"steps": 2, "payload_bytes": 5000}, lease_s=30.0)


@pytest.fixture
def host_of(records: Store, shm: PayloadStore, tmp_path: Path) -> Iterator[HostOf]:
    """Makes hosts of a pipeline's stage and closes them."""
    made: list[StageHost] = []

    def make(pipe: Pipeline, stage_id: int = 0) -> StageHost:
        engine = Scripted()
        engine.start(pipe, pipe.stage(stage_id), "", lambda phase: None)
        place = media.MediaStore(f"file://{tmp_path}/media")
        made.append(StageHost(pipe, pipe.stage(stage_id), engine, records, shm, place, f"w{len(made)}"))
        return made[-1]

    yield make
    for one in made:
        one.close()
        one.close()


class Worker:
    """What intake.py asks of Celery's consumer when there are no monitors."""

    hostname, event_dispatcher = "w@here", None


def engine_of(host: StageHost) -> Scripted:
    assert isinstance(host.engine, Scripted)
    return host.engine


def open_gate(host: StageHost, prompt: str) -> None:
    gates = engine_of(host).gates
    host.loop.call_soon_threadsafe(lambda: gates.setdefault(prompt, asyncio.Event()).set())


def submit(records: Store, pipe: Pipeline, **facts: Any) -> str:
    return records.submit(pipe, {**JOB, **facts}).job_id


def job(records: Store, job_id: str) -> Job:
    record = records.job(job_id)
    assert record is not None
    return record


def in_background(host: StageHost, job_id: str) -> tuple[threading.Thread, list[bool]]:
    """One message, taken as a Celery worker's thread takes it."""
    passed_on: list[bool] = []
    stage_id = host.stage.stage_id
    thread = threading.Thread(target=lambda: passed_on.append(tasks.attempt_stage(host, job_id, stage_id)))
    thread.start()
    return thread, passed_on


def claimed(host: StageHost, job_id: str) -> Claim:
    claim = host.call(host.claim(job_id, host.stage.stage_id)).result()
    assert isinstance(claim, Claim), claim
    return claim


# -- a job's way -------------------------------------------------------------------------------------------------------


def test_two_stages_turn_a_job_into_files(records: Store, pipe: Pipeline, host_of: HostOf, shm: PayloadStore) -> None:
    job_id = submit(records, pipe, n=3)
    first, last = host_of(pipe, 0), host_of(pipe, 1)
    assert tasks.attempt_stage(first, job_id, 0)
    assert shm.names() == [shm.name(job_id, 0, 1)]
    assert tasks.attempt_stage(last, job_id, 1)
    record = job(records, job_id)
    assert record.state is JobState.SUCCEEDED
    assert record.result is not None
    assert [(e["width"], e["height"], e["seed"]) for e in record.result["data"]] == [(16, 8, 5), (16, 8, 6), (16, 8, 7)]
    assert len({last.media.read(e["file"]) for e in record.result["data"]}) == 3
    assert [s.params for s in record.stages] == [{"seed": 5}, {"height": 8, "seed": 5, "width": 16}]
    assert shm.names() == []  # released as soon as the job is over


@pytest.mark.parametrize("ends", ["succeeded", "cancelled"])
def test_a_small_output_is_carried_in_the_record_until_the_job_is_over(
    records: Store, pipe: Pipeline, host_of: HostOf, shm: PayloadStore, ends: str
) -> None:
    pipe = support.with_stage(pipe, 0, engine_args={"payload_bytes": 1000})
    job_id = submit(records, pipe)
    assert tasks.attempt_stage(host_of(pipe, 0), job_id, 0)
    reference = job(records, job_id).stages[0].reference
    assert reference is not None
    assert (reference["store"], shm.names()) == ("record", [])
    seen: list[int] = []
    last = host_of(pipe, 1)
    engine_of(last).script = lambda request: seen.append(request.sources[0].tensors["payload"].nbytes)
    if ends == "cancelled":
        records.cancel(job_id)
    assert tasks.attempt_stage(last, job_id, 1) is (ends == "succeeded")
    assert seen == ([1000] if ends == "succeeded" else [])
    record = job(records, job_id)
    assert (record.state.value, record.stages[0].reference) == (ends, None)


def test_a_job_that_asks_for_less_ends_at_an_early_stage_and_its_chain_too(
    records: Store, pipe: Pipeline, host_of: HostOf, shm: PayloadStore
) -> None:
    writer = support.with_stage(pipe, 0, final_output=True, final_output_type="text")
    job_id = submit(records, writer, last_stage=0)
    assert not tasks.attempt_stage(host_of(writer, 0), job_id, 0)
    record = job(records, job_id)
    assert (record.state, [stage.state for stage in record.stages]) == (JobState.SUCCEEDED, ["done", ""])
    assert record.result is not None
    assert record.result["kind"] == "text"
    assert shm.names() == []


def test_what_an_early_stage_wrote_comes_with_the_last_ones_output(
    records: Store, pipe: Pipeline, host_of: HostOf
) -> None:
    writer = support.with_stage(pipe, 0, final_output=True, final_output_type="text")
    words = {"modalities": ["text", "image"], "messages": [], "n": 2}
    ids = [submit(records, writer, **words), submit(records, writer, n=2)]
    first, last = host_of(writer, 0), host_of(writer, 1)
    for job_id in ids:
        assert tasks.attempt_stage(first, job_id, 0)
        assert tasks.attempt_stage(last, job_id, 1)
    with_words, without = (job(records, job_id).result or {} for job_id in ids)
    assert [entry["text"] for entry in with_words["data"]] == [JOB["prompt"]] * 2
    assert all(entry["file"].endswith(".png") for entry in with_words["data"])
    assert not any("text" in entry for entry in without["data"])


def test_a_finished_stage_is_passed_on_and_not_run_again(records: Store, pipe: Pipeline, host_of: HostOf) -> None:
    job_id = submit(records, pipe)
    host = host_of(pipe, 0)
    assert tasks.attempt_stage(host, job_id, 0)
    engine_of(host).script = support.raising(AssertionError("run again"))
    assert tasks.attempt_stage(host, job_id, 0)
    assert job(records, job_id).stages[0].attempt == 1


@pytest.mark.parametrize("why", ["gone", "over", "busy", "wrong stage", "mismatch"])
def test_a_message_that_is_not_to_be_run_ends_the_chain(
    records: Store, pipe: Pipeline, host_of: HostOf, why: str
) -> None:
    host = host_of(pipe, 0)
    engine_of(host).script = support.raising(AssertionError("run"))
    job_id, stage_id = submit(records, pipe), 0
    if why == "gone":
        job_id = "0" * 32
    elif why == "over":
        records.cancel(job_id)
    elif why == "busy":
        support.claim(records, pipe, job_id)
    elif why == "wrong stage":
        stage_id = 1
    else:
        job_id = submit(records, support.with_stage(pipe, 0, name="other"))
    assert not tasks.attempt_stage(host, job_id, stage_id)


def test_every_item_has_an_id_a_seed_and_the_sources_of_its_own(
    records: Store, pipe: Pipeline, host_of: HostOf
) -> None:
    job_id = submit(records, pipe, n=3)
    tasks.attempt_stage(host_of(pipe, 0), job_id, 0)
    last = host_of(pipe, 1)
    seen: list[StageRequest] = []
    engine_of(last).script = seen.append
    assert tasks.attempt_stage(last, job_id, 1)
    assert [request.request_id for request in seen] == [f"{last.payloads.name(job_id, 1, 1)}-{i}" for i in range(3)]
    assert [request.params["seed"] for request in seen] == [5, 6, 7]
    assert [request.index for request in seen] == [0, 1, 2]
    assert all(request.sources.keys() == {0} for request in seen)


def test_the_items_of_a_job_and_several_jobs_are_in_the_engine_at_once(
    records: Store, pipe: Pipeline, host_of: HostOf
) -> None:
    host = host_of(pipe, 0)
    ids = [submit(records, pipe, prompt="wait", n=n) for n in (1, 3, 2)]
    threads = [in_background(host, job_id)[0] for job_id in ids]
    engine_of(host).wait_for(6)
    assert sorted(claim.job_id for claim, _ in host.held()) == sorted(ids)
    open_gate(host, "wait")
    for thread in threads:
        thread.join()
    assert host.held() == []
    assert [job(records, job_id).stages[0].state for job_id in ids] == ["done"] * 3


def test_a_missing_source_is_tried_again_and_then_told(records: Store, pipe: Pipeline, host_of: HostOf) -> None:
    pipe = dataclasses.replace(pipe, max_attempts=2)
    job_id = submit(records, pipe)
    first, last = host_of(pipe, 0), host_of(pipe, 1)
    tasks.attempt_stage(first, job_id, 0)
    first.payloads.release(first.payloads.names())
    assert not tasks.attempt_stage(last, job_id, 1)
    assert len(messages(records, pipe.stages[1].queue)) == 1
    assert not tasks.attempt_stage(last, job_id, 1)
    error = job(records, job_id).error
    assert error is not None
    assert (error["code"], error["stage"], error["attempts"]) == ("payload_error", 1, 2)
    assert f"stage 0 -> stage 1: Payload {first.payloads.name(job_id, 0, 1)} " in error["message"]


def test_progress_of_all_items_is_summed(records: Store, pipe: Pipeline, host_of: HostOf) -> None:
    pipe = support.with_stage(pipe, 0, engine_args={"steps": 2, "hang_on": "never"})
    host = host_of(pipe, 0)

    async def told(request: StageRequest, progress: Progress) -> StageOutput:
        progress(request.index + 1, 10)
        engine_of(host).inside.add(request.request_id)
        await asyncio.Event().wait()
        return StageOutput()

    host.engine.generate = told  # type: ignore[method-assign]
    job_id = submit(records, pipe, n=3)
    thread, _ = in_background(host, job_id)
    while len(engine_of(host).inside) < 3:
        time.sleep(0.002)
    ((claim, progress),) = host.held()
    assert progress == (6, 30)
    assert host.moved_at() is not None
    host.stop((job_id, 0, claim.attempt), errors.Stopped())
    thread.join()
    assert host.moved_at() is None


# -- stopping ----------------------------------------------------------------------------------------------------------


def test_a_cancel_stops_one_job_and_leaves_its_neighbours(records: Store, pipe: Pipeline, host_of: HostOf) -> None:
    host = host_of(pipe, 0)
    ids = [submit(records, pipe, prompt="wait", n=2) for _ in range(3)]
    threads = [in_background(host, job_id) for job_id in ids]
    engine_of(host).wait_for(6)
    assert records.cancel(ids[1]) == "cancelling"
    for key in records.controls("w0", 1.0):
        host.stop(key, errors.Stopped())
    threads[1][0].join()
    engine_of(host).wait_for(4)
    assert job(records, ids[1]).state is JobState.CANCELLED
    open_gate(host, "wait")
    for thread, _ in threads:
        thread.join()
    assert [passed for _, passed in threads] == [[True], [False], [True]]
    assert [job(records, i).stages[0].state for i in (ids[0], ids[2])] == ["done", "done"]


def test_a_cancel_is_confirmed_only_when_the_engine_has_let_go(
    records: Store, pipe: Pipeline, host_of: HostOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_of(pipe, 0)
    engine_of(host).let_go = 0.3
    job_id = submit(records, pipe, prompt="wait", n=2)
    inside: list[int] = []
    fail = records.fail

    def confirm(*args: Any, **kwargs: Any) -> str:
        inside.append(len(engine_of(host).inside))
        return fail(*args, **kwargs)

    monkeypatch.setattr(records, "fail", confirm)
    thread, _ = in_background(host, job_id)
    engine_of(host).wait_for(2)
    records.cancel(job_id)
    host.stop((job_id, 0, 1), errors.Stopped())
    assert job(records, job_id).state is JobState.CANCELLING
    thread.join()
    assert inside == [0]
    assert job(records, job_id).state is JobState.CANCELLED


@pytest.mark.parametrize("how", ["cancelled", "expired", "failed"])
def test_a_stage_that_ends_early_keeps_nothing_of_its_inputs_mapped(records: Store, host_of: HostOf, how: str) -> None:
    """Nor until garbage is collected, which may be long: a segment that is mapped cannot be written again."""
    pipe = support.with_stage(support.pipeline(2), 0, engine_args={"payload_bytes": 300_000})
    pipe = support.with_stage(pipe, 1, engine_args={"delay_s": 60.0})
    first, second = host_of(pipe, 0), host_of(pipe, 1)
    job_id = records.submit(pipe, JOB, timeout_s=2.0 if how == "expired" else 60.0).job_id
    assert tasks.attempt_stage(first, job_id, 0)

    def script(request: StageRequest) -> None:
        assert mapped(job_id)
        if how == "failed":
            raise errors.EngineError("no")

    engine_of(second).script = script
    gc.disable()
    try:
        thread, _ = in_background(second, job_id)
        if how == "cancelled":
            engine_of(second).wait_for(1)
            records.cancel(job_id)
            second.stop((job_id, 1, 1), errors.Stopped())
        thread.join()
        assert job(records, job_id).state.value == how
        deadline = time.monotonic() + 5
        while mapped(job_id) and time.monotonic() < deadline:  # the loop has a few more things to let go of
            time.sleep(0.01)
        assert not mapped(job_id)
    finally:
        gc.enable()


def mapped(job_id: str) -> bool:
    """Whether this process has a payload of the job mapped."""
    return job_id in Path("/proc/self/maps").read_text()


def test_while_an_outcome_is_recorded_the_engine_has_room_for_another_request(
    records: Store, host_of: HostOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_of(support.with_stage(support.pipeline(1), 0, max_num_seqs=1))
    writing, go_on, write = threading.Event(), threading.Event(), media.MediaStore.write

    def slow(place: media.MediaStore, name: str, content: bytes) -> None:
        writing.set()
        assert go_on.wait(30)
        write(place, name, content)

    async def seated(job_id: str) -> bool:
        attempt = asyncio.ensure_future(tasks.attempt(host, job_id, 0))
        host.seats.take(attempt)
        free.append(host.seats.free())
        done = await attempt
        host.seats.leave(attempt)
        return done

    monkeypatch.setattr(media.MediaStore, "write", slow)
    free: list[int] = []
    ended = host.call(seated(submit(records, host.pipe)))
    assert writing.wait(30)
    free.append(host.seats.free())
    go_on.set()
    assert ended.result(30)
    assert free == [0, 1]


def test_a_stop_that_comes_before_the_engine_has_begun_is_heeded(
    records: Store, pipe: Pipeline, host_of: HostOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_of(pipe, 0)
    job_id = submit(records, pipe, prompt="wait")
    mapped = inputs.mapped

    def stopped_first(shared: PayloadStore, stage: Stage, claim: Claim) -> Any:
        records.cancel(job_id)
        host.stop((job_id, 0, claim.attempt), errors.Stopped())
        return mapped(shared, stage, claim)

    monkeypatch.setattr(inputs, "mapped", stopped_first)
    assert not tasks.attempt_stage(host, job_id, 0)
    assert job(records, job_id).state is JobState.CANCELLED
    assert engine_of(host).inside == set()


def test_a_hundred_cancels_at_random_moments_end_cancelled_or_done_and_free_the_engine(
    records: Store, pipe: Pipeline, host_of: HostOf
) -> None:
    pipe = support.with_stage(pipe, 0, engine_args={"steps": 4, "delay_s": 0.001})
    host = host_of(pipe, 0)
    for number in range(100):
        job_id = submit(records, pipe)
        thread, _ = in_background(host, job_id)
        time.sleep((number % 10) / 1500)
        records.cancel(job_id)
        for key in records.controls("w0", 0.01):
            host.stop(key, errors.Stopped())
        thread.join()
        record = job(records, job_id)
        assert record.state is JobState.CANCELLED or record.stages[0].state == "done"
    assert host.held() == []
    assert engine_of(host).inside == set()
    assert records.live(pipe.name) == 0


def test_a_job_past_its_deadline_is_aborted_and_expires(records: Store, pipe: Pipeline, host_of: HostOf) -> None:
    host = host_of(pipe, 0)
    job_id = records.submit(pipe, {**JOB, "prompt": "wait"}, timeout_s=0.2).job_id
    assert not tasks.attempt_stage(host, job_id, 0)
    record = job(records, job_id)
    assert record.state is JobState.EXPIRED
    assert record.error is not None
    assert "deadline" in record.error["message"]
    assert engine_of(host).inside == set()


def test_an_engine_that_does_not_let_go_keeps_nobody_past_the_deadline(
    records: Store, pipe: Pipeline, host_of: HostOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "_ABORT_PATIENCE_S", 0.05)
    host = host_of(pipe, 0)
    engine_of(host).let_go = 1.0
    job_id = records.submit(pipe, {**JOB, "prompt": "wait"}, timeout_s=0.1).job_id
    assert not tasks.attempt_stage(host, job_id, 0)
    assert len(engine_of(host).inside) == 1
    assert job(records, job_id).state is JobState.EXPIRED
    engine_of(host).wait_for(0)


def test_a_superseded_worker_changes_nothing_and_leaves_no_file(
    records: Store, pipe: Pipeline, host_of: HostOf, shm: PayloadStore
) -> None:
    frozen, alive = host_of(pipe, 0), host_of(pipe, 0)
    job_id = submit(records, pipe)
    claim = claimed(frozen, job_id)
    outputs = frozen.call(frozen.run(claim)).result()
    support.lapse(records, pipe, job_id, 0)
    assert tasks.attempt_stage(alive, job_id, 0)
    before = records.job(job_id)
    assert frozen.call(frozen.outcomes.record(claim, outputs)).result() == "stale"
    assert records.job(job_id) == before
    assert shm.names() == [shm.name(job_id, 0, 2)]


def test_a_superseded_last_stage_leaves_the_winners_files(records: Store, host_of: HostOf) -> None:
    pipe = support.pipeline(1)
    frozen, alive = host_of(pipe, 0), host_of(pipe, 0)
    job_id = submit(records, pipe)
    claim = claimed(frozen, job_id)
    outputs = frozen.call(frozen.run(claim)).result()
    support.lapse(records, pipe, job_id, 0)
    assert tasks.attempt_stage(alive, job_id, 0)
    assert frozen.call(frozen.outcomes.record(claim, outputs)).result() == "stale"
    result = job(records, job_id).result
    assert result is not None
    assert alive.media.read(result["data"][0]["file"])
    assert len(list(Path(alive.media._root).iterdir())) == 1


def test_an_outcome_whose_answer_was_lost_is_said_again_and_keeps_its_output(
    records: Store, pipe: Pipeline, host_of: HostOf, shm: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_of(pipe, 0)
    make, lost = host.hot.make, [True]

    async def lossy(call: Call[Any]) -> Any:
        answer = await make(call)
        if lost and call.operation == "finish":
            lost.clear()
            raise errors.BrokerUnavailable
        return answer

    monkeypatch.setattr(host.hot, "make", lossy)
    job_id = submit(records, pipe)
    assert tasks.attempt_stage(host, job_id, 0)
    assert shm.names() == [shm.name(job_id, 0, 1)]


def test_the_lease_is_prolonged_while_an_outcome_is_being_recorded(
    records: Store, pipe: Pipeline, host_of: HostOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_of(pipe, 0)
    held: list[str] = []
    keep = host.payloads.keep

    def slow(name: str, items: Any) -> Any:
        held.extend(claim.job_id for claim, _ in host.held())
        assert host.moved_at() is None  # it is not the engine that is slow
        return keep(name, items)

    monkeypatch.setattr(host.payloads, "keep", slow)
    job_id = submit(records, pipe)
    assert tasks.attempt_stage(host, job_id, 0)
    assert held == [job_id]
    assert host.held() == []


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (errors.EngineError("no"), "engine_error", "no"),
        (errors.EngineRejected("too long", param="prompt"), "engine_rejected", "too long"),
        (ValueError("odd", threading.Lock()), "engine_error", "ValueError"),
        (TimeoutError("its own"), "engine_error", "TimeoutError: its own"),
        (errors.NoRoom(), "no_room", "/dev/shm"),
        (RuntimeError("x" * 10**6), "engine_error", "RuntimeError: xxx"),
    ],
)
def test_what_an_engine_raises_fails_its_job_with_the_reason_and_no_other(
    records: Store, pipe: Pipeline, host_of: HostOf, raised: Exception, code: str, says: str
) -> None:
    host = host_of(pipe, 0)

    def script(request: StageRequest) -> None:
        if request.job["prompt"] == "bad":
            raise raised

    engine_of(host).script = script
    good, bad = submit(records, pipe, prompt="wait"), submit(records, pipe, prompt="bad", n=2)
    thread, passed = in_background(host, good)
    engine_of(host).wait_for(1)
    assert not tasks.attempt_stage(host, bad, 0)
    record = job(records, bad)
    assert record.error is not None
    assert (record.state, record.error["code"], record.error["stage"]) == (JobState.FAILED, code, 0)
    assert says in record.error["message"]
    assert record.error.get("param") == getattr(raised, "param", None)
    assert len(record.error["message"]) < 5000
    open_gate(host, "wait")
    thread.join()
    assert passed == [True]
    assert not host.dead.is_set()


def test_when_one_item_fails_the_others_stop_taking_the_engines_time(
    records: Store, pipe: Pipeline, host_of: HostOf
) -> None:
    host = host_of(pipe, 0)

    def script(request: StageRequest) -> None:
        if request.index == 2:
            raise errors.EngineError("the third")

    engine_of(host).script = script
    job_id = submit(records, pipe, prompt="wait", n=4)
    assert not tasks.attempt_stage(host, job_id, 0)
    assert engine_of(host).inside == set()
    assert job(records, job_id).state is JobState.FAILED


def test_a_dead_engine_gives_its_job_to_another_worker_and_takes_no_more(
    records: Store, pipe: Pipeline, host_of: HostOf
) -> None:
    broken, good = host_of(pipe, 0), host_of(pipe, 0)
    engine_of(broken).script = support.raising(errors.EngineDead("gone"))
    job_id = submit(records, pipe)
    assert not tasks.attempt_stage(broken, job_id, 0)
    assert broken.dead.is_set()
    assert broken.call(broken.claim(submit(records, pipe), 0)).result() == "dead"
    assert len(messages(records, pipe.stages[0].queue)) == 1
    assert tasks.attempt_stage(good, job_id, 0)
    assert job(records, job_id).stages[0].failures == 1


def test_a_request_that_the_engine_drops_by_itself_means_that_it_is_dead(
    records: Store, pipe: Pipeline, host_of: HostOf
) -> None:
    host = host_of(pipe, 0)
    job_id = submit(records, pipe, prompt="wait")
    thread, _ = in_background(host, job_id)
    engine_of(host).wait_for(1)
    asyncio.run_coroutine_threadsafe(host.engine.abort(f"{job_id}-0-1-0"), host.loop).result(30)

    def drop() -> None:
        for running in host._running.values():
            assert running.task is not None
            running.task.cancel()

    host.loop.call_soon_threadsafe(drop)
    thread.join()
    assert host.dead.is_set()


def test_an_output_that_does_not_fit_fails_its_job_and_the_worker_goes_on(
    records: Store, pipe: Pipeline, host_of: HostOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_of(pipe, 0)
    with monkeypatch.context() as full:
        full.setattr(PayloadStore, "free_bytes", lambda self: 0)
        job_id = submit(records, pipe)
        assert not tasks.attempt_stage(host, job_id, 0)
    error = job(records, job_id).error
    assert error is not None
    assert error["code"] == "no_room"
    assert tasks.attempt_stage(host, submit(records, pipe), 0)


def test_the_last_attempt_waits_until_nothing_else_runs_in_the_worker(
    records: Store, pipe: Pipeline, host_of: HostOf
) -> None:
    pipe = dataclasses.replace(pipe, max_attempts=2)
    host = host_of(pipe, 0)
    twice = submit(records, pipe)
    records.fail(support.claim(records, pipe, twice), "c", "r", retry=True)
    neighbour = submit(records, pipe, prompt="wait")
    first, _ = in_background(host, neighbour)
    engine_of(host).wait_for(1)
    beside: list[set[str]] = []
    engine_of(host).script = lambda request: beside.append(set(engine_of(host).inside))
    second, passed = in_background(host, twice)
    while not host._gate._wanting:
        time.sleep(0.002)
    assert host.free() == 0  # what it would take now may run elsewhere
    host.seats.changed.clear()
    open_gate(host, "wait")
    first.join()
    second.join()
    assert passed == [True]
    assert beside == [set()]
    assert host.seats.changed.is_set()
    assert host.free() == pipe.stages[0].max_num_seqs


# -- shutting down -----------------------------------------------------------------------------------------------------


def test_draining_lets_what_runs_finish_and_sends_new_messages_on(
    records: Store, pipe: Pipeline, host_of: HostOf
) -> None:
    host = host_of(pipe, 0)
    running, late = submit(records, pipe, prompt="wait"), submit(records, pipe)
    thread, passed = in_background(host, running)
    engine_of(host).wait_for(1)
    drain = threading.Thread(target=host.drain, args=(60.0, lambda: False))
    drain.start()
    while not host.draining:
        time.sleep(0.002)
    assert not tasks.attempt_stage(host, late, 0)
    assert [m["headers"]["argsrepr"] for m in messages(records, pipe.stages[0].queue)] == [f"({late}, 0)"]
    open_gate(host, "wait")
    thread.join()
    drain.join()
    assert passed == [True]


def test_what_goes_back_to_the_queue_keeps_its_priority(records: Store, pipe: Pipeline, host_of: HostOf) -> None:
    host = host_of(pipe, 0)
    engine_of(host).script = support.raising(errors.EngineDead())
    failed, late = (records.submit(pipe, JOB, priority=priority).job_id for priority in (7, 8))
    assert not tasks.attempt_stage(host, failed, 0)
    host.draining = True
    assert not tasks.attempt_stage(host, late, 0)
    lists = chain.broker_lists(pipe.stages[0].queue)
    assert chain.jobs_of(records.oldest_messages([lists[7]])) == [failed]
    assert chain.jobs_of(records.oldest_messages([lists[8]])) == [late]


@pytest.mark.parametrize("how", ["grace is over", "asked again"])
def test_what_does_not_finish_is_handed_back_uncounted(
    records: Store, pipe: Pipeline, host_of: HostOf, how: str
) -> None:
    host = host_of(pipe, 0)
    job_id = submit(records, pipe, prompt="wait", n=2)
    thread, passed = in_background(host, job_id)
    engine_of(host).wait_for(2)
    if how == "asked again":
        host.drain(600.0, lambda: True)
    else:
        host.drain(0.01, lambda: False)
    thread.join()
    assert passed == [False]
    record = job(records, job_id)
    assert (record.state, record.stages[0].state, record.stages[0].failures) == (JobState.RUNNING, "queued", 0)
    assert [m["headers"]["argsrepr"] for m in messages(records, pipe.stages[0].queue)] == [f"({job_id}, 0)"]
    assert engine_of(host).inside == set()


def test_surrender_gives_back_everything_in_hand_and_counts_it(records: Store, pipe: Pipeline, host_of: HostOf) -> None:
    host = host_of(pipe, 0)
    ids = [submit(records, pipe, prompt="wait") for _ in range(2)]
    threads = [in_background(host, job_id)[0] for job_id in ids]
    engine_of(host).wait_for(2)
    host.surrender()
    assert [(job(records, i).stages[0].state, job(records, i).stages[0].failures) for i in ids] == [("queued", 1)] * 2
    assert host.dead.is_set()
    assert len(messages(records, pipe.stages[0].queue)) == 2
    open_gate(host, "wait")
    for thread in threads:
        thread.join()
    assert [job(records, i).stages[0].state for i in ids] == ["queued"] * 2  # what came out later is stale


def test_redis_that_is_away_for_a_moment_is_waited_for(
    records: Store, pipe: Pipeline, host_of: HostOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_of(pipe, 0)
    make, asked = host.hot.make, []

    async def away_once(call: Call[Any]) -> Any:
        asked.append(call.operation)
        if asked.count(call.operation) == 1:
            raise errors.BrokerUnavailable
        return await make(call)

    monkeypatch.setattr(host.hot, "make", away_once)
    assert tasks.attempt_stage(host, submit(records, pipe), 0)
    assert asked == ["claim", "claim", "finish", "finish"]


def test_a_broker_that_refuses_the_message_leaves_the_work_owed(
    records: Store, pipe: Pipeline, host_of: HostOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_of(pipe, 0)
    monkeypatch.setattr(chain, "publish", lambda *args, **kwargs: False)
    engine_of(host).script = support.raising(errors.EngineDead())
    job_id = submit(records, pipe)
    assert not tasks.attempt_stage(host, job_id, 0)
    support.earlier(records, pipe, job_id, 0, 10)
    assert [owed.job_id for owed in records.lost(pipe.stages[0].queue, [])] == [job_id]


def test_a_workers_name_tells_stage_host_and_process_and_has_no_colon(pipe: Pipeline) -> None:
    first = worker_name(pipe.stages[0], "node:1")
    assert first.startswith(f"{pipe.stages[0].queue}@node_1.")
    assert ":" not in first
    assert str(os.getpid()) in first.split(".")


@pytest.mark.parametrize(("told", "shown"), [((0.5, 1), (0, 1)), ((float("nan"), 10), (0, 0)), ((-1, 3), (0, 3))])
def test_odd_progress_leaves_the_record_readable(
    told: tuple[Any, Any], shown: tuple[int, int], records: Store, pipe: Pipeline, host_of: HostOf
) -> None:
    host, job_id = host_of(pipe), submit(records, pipe)

    class Odd(FakeEngine):
        async def generate(self, request: StageRequest, progress: Progress) -> StageOutput:
            progress(*told)
            held = host.held()
            assert held[0][1] == shown
            records.renew(held, 30.0)
            return StageOutput({}, {})

    host.engine = Odd()
    assert tasks.attempt_stage(host, job_id, 0)
    assert job(records, job_id).stages[0].progress == shown


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt])
def test_an_engine_that_tries_to_end_the_process_fails_its_request_only(
    raised: type[BaseException], records: Store, pipe: Pipeline, host_of: HostOf
) -> None:
    host = host_of(pipe)

    def script(request: StageRequest) -> None:
        if request.job["prompt"] == "end":
            raise raised

    engine_of(host).script = script
    bad, good = submit(records, pipe, prompt="end"), submit(records, pipe)
    assert not tasks.attempt_stage(host, bad, 0)
    assert raised.__name__ in str(job(records, bad).error)
    assert tasks.attempt_stage(host, good, 0)


# -- messages ----------------------------------------------------------------------------------------------------------


def test_the_engine_is_never_given_more_than_it_takes_at_once_whatever_the_priorities(
    records: Store, pipe: Pipeline, host_of: HostOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = dataclasses.replace(pipe.stages[0], max_num_seqs=2, engine_args={"delay_s": 0.02})
    host = host_of(dataclasses.replace(pipe, stages=(narrow, *pipe.stages[1:])))
    most, taker = [0], intake.Intake(None, [kombu.Queue(narrow.queue)], worker=Worker(), host=host)
    engine_of(host).script = lambda request: most.append(len(engine_of(host).inside) + 1)
    heard = link._Wire.data_received

    def slowly(wire: link._Wire, data: bytes) -> None:
        """What was said at the same time on another connection comes in before."""
        wire._loop.call_later(0.01 if wire is host.hot._listening._wire else 0.0, heard, wire, data)

    monkeypatch.setattr(link._Wire, "data_received", slowly)
    jobs = []
    taker.consume()
    try:
        for _ in range(2):
            while records.client.info("clients")["blocked_clients"] < 2:  # type: ignore[index]
                time.sleep(0.01)
            with records.client.pipeline() as together:
                for priority in (0, 3, 6):
                    jobs.append(records.submit(host.pipe, JOB, priority=priority).job_id)
                    made = message(pipe, jobs[-1], 0, priority)
                    together.lpush(made.list, made.text)
                together.execute()
            while records.waiting(narrow.queue)[0] or host.held():
                time.sleep(0.005)
    finally:
        taker.cancel()
    assert {job(records, job_id).stages[0].state for job_id in jobs} == {"done"}
    assert max(most) == 2
