"""The counters: each attempt is counted once, whoever ends it, and nothing is counted twice."""

from __future__ import annotations

import time

import pytest

from omniqueue.engines.base import StageOutput
from omniqueue.payloads import Reference, Tensor
from omniqueue.pipeline import Pipeline
from omniqueue.store import Store
from tests.unit import support
from workers import usage

RESULT = {"kind": "image", "data": []}


@pytest.fixture
def pipe() -> Pipeline:
    return support.pipeline(2)


def reference(job_id: str, nbytes: int = 100) -> Reference:
    return Reference(name=f"oq_x_{job_id}_0_1", nbytes=nbytes, host="here")


def test_before_the_first_job_everything_is_zero(records: Store, pipe: Pipeline) -> None:
    seen = records.overview(pipe)
    assert (seen.live, seen.counts, abs(seen.now - time.time()) < 60) == (0, {}, True)
    for stage in seen.stages:
        assert (stage.waiting, stage.oldest_wait_s, stage.running) == (0, 0.0, 0)
        assert (stage.wait.count, stage.run.count, stage.run.mean_s) == (0, 0, None)
        assert (stage.ends, stage.used, stage.failures) == ({}, {}, {})


def test_queues_and_claims_are_those_of_the_records(records: Store, pipe: Pipeline) -> None:
    ids = [support.submit(records, pipe) for _ in range(3)]
    support.claim(records, pipe, ids[0])
    support.earlier(records, pipe, ids[1], 0, 40.0)
    first, second = records.overview(pipe).stages
    assert (first.waiting, first.running, second.waiting, second.running) == (2, 1, 0, 0)
    assert 39.0 < first.oldest_wait_s < 45.0
    assert records.overview(pipe).live == 3


def test_a_job_that_goes_through_counts_once_in_each_stage_with_what_it_used(records: Store, pipe: Pipeline) -> None:
    job_id = support.submit(records, pipe)
    held = support.claim(records, pipe, job_id)
    for _ in range(2):  # said again: the first answer was lost
        assert records.finish(held, reference(job_id), {}, used={"payload_bytes": 100, "images": 2}) == "next"
    last = support.claim(records, pipe, job_id, 1)
    for _ in range(2):
        assert records.finish(last, None, {}, RESULT, used={"images": 1}) == "succeeded"
    first, second = records.overview(pipe).stages
    assert (first.ends, second.ends) == ({"done": 1}, {"done": 1})
    assert (first.used, second.used) == ({"payload_bytes": 100.0, "images": 2.0}, {"images": 1.0})
    for stage in (first, second):
        assert (stage.wait.count, stage.run.count) == (1, 1)
        assert 0 <= stage.run.sum < 5


def test_durations_fall_into_the_bucket_that_holds_them(records: Store, pipe: Pipeline) -> None:
    for seconds in (0.0, 40.0, 40.0, 5000.0):
        job_id = support.submit(records, pipe)
        key, client = f"{records.namespace}:job:{job_id}", records.client
        client.hset(key, "0:queued", f"{float(str(client.hget(key, '0:queued'))) - seconds:.6f}")
        records.finish(support.claim(records, pipe, job_id), reference(job_id), {})
    wait = records.overview(pipe).stages[0].wait
    cumulative = dict(wait.buckets)
    assert [cumulative[bound] for bound in ("5", "30", "60", "1800", "inf")] == [1, 1, 3, 3, 4]
    assert list(cumulative.values()) == sorted(cumulative.values())
    assert 5080 <= wait.sum < 5100
    assert wait.count == 4


def test_each_way_an_attempt_ends_is_counted_once_under_its_name(records: Store) -> None:
    pipe = support.pipeline(1, max_attempts=2)
    lapsed = support.submit(records, pipe)
    support.claim(records, pipe, lapsed)
    support.lapse(records, pipe, lapsed, 0)
    assert [owed.job_id for owed in records.reap(pipe.name)] == [lapsed]
    support.claim(records, pipe, lapsed)
    support.lapse(records, pipe, lapsed, 0)
    records.claim(pipe, lapsed, 0, "another", alone=True)  # sees it before the reaper does, and it was the last attempt

    for code, retry in (("engine_error", False), ("engine_error", False), ("no_room", False)):
        records.fail(support.claim(records, pipe, support.submit(records, pipe)), code, "r", retry=retry)
    back = support.claim(records, pipe, support.submit(records, pipe))
    records.fail(back, "handed_back", "r", retry=True, counted=False)

    records.cancel(support.submit(records, pipe))  # never claimed: no attempt
    stopped = support.claim(records, pipe, support.submit(records, pipe))
    records.cancel(stopped.job_id)
    assert records.fail(stopped, "stopped", "r", retry=False) == "cancelled"
    late_cancel = support.claim(records, pipe, support.submit(records, pipe))
    records.cancel(late_cancel.job_id)
    assert records.finish(late_cancel, None, {}, RESULT) == "cancelled"

    for _ in range(2):
        late = support.claim(records, pipe, support.submit(records, pipe))
        support.overdue(records, pipe, late.job_id)
        if _:
            records.reap(pipe.name)
        else:
            assert records.finish(late, None, {}, RESULT, used={"images": 7}) == "expired"

    seen = records.overview(pipe)
    (stage,) = seen.stages
    expected = {"worker_lost": 2, "engine_error": 2, "no_room": 1, "handed_back": 1, "cancelled": 2, "expired": 2}
    assert stage.ends == expected
    assert stage.failures == {"worker_lost": 2, "engine_error": 2, "no_room": 1}
    assert (stage.wait.count, stage.run.count, stage.used) == (sum(expected.values()), 0, {})
    assert {state: seen.counts[state] for state in ("failed", "cancelled", "expired")} == {
        "failed": 4, "cancelled": 3, "expired": 2,
    }  # fmt: skip
    assert seen.live == 1


def test_a_worker_that_was_given_up_counts_nothing_when_it_comes_back(records: Store, pipe: Pipeline) -> None:
    job_id = support.submit(records, pipe)
    old = support.claim(records, pipe, job_id)
    support.lapse(records, pipe, job_id, 0)
    records.reap(pipe.name)
    new = support.claim(records, pipe, job_id)
    assert records.finish(old, reference(job_id), {}, used={"images": 9}) == "stale"
    assert records.fail(old, "engine_error", "r", retry=True) == "stale"
    assert records.finish(new, reference(job_id), {}) == "next"
    first = records.overview(pipe).stages[0]
    assert (first.ends, first.used) == ({"worker_lost": 1, "done": 1}, {})


def test_large_sums_stay_exact(records: Store, pipe: Pipeline) -> None:
    for _ in range(3):
        job_id = support.submit(records, pipe)
        records.finish(support.claim(records, pipe, job_id), reference(job_id), {}, used={"payload_bytes": 2**46 + 1})
    assert records.overview(pipe).stages[0].used == {"payload_bytes": 3 * (2**46 + 1)}


def test_the_requests_of_all_routers_add_up(records: Store) -> None:
    assert records.traffic() == {}
    assert records.traffic({"a": 1, "b": 0.25}) == {"a": 1.0, "b": 0.25}
    assert records.traffic({"a": 2}) == {"a": 3.0, "b": 0.25}


def tensor() -> Tensor:
    return Tensor("uint8", (1, 1, 3), bytes(3))


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([], {}),
        ([StageOutput({}, {})], {}),
        ([StageOutput({"prompt_tokens": 3, "token_ids": [1, 2]}, {})], {"prompt_tokens": 3, "generation_tokens": 2}),
        (
            [StageOutput({"usage": {"prompt_tokens": 4, "completion_tokens": 9}, "token_ids": [1]}, {})] * 2,
            {"prompt_tokens": 8, "generation_tokens": 18},
        ),
        ([StageOutput({}, {"image": tensor()}), StageOutput({}, {"image": tensor()})], {"images": 2}),
    ],
)
def test_what_an_attempt_used_is_read_from_its_outputs(outputs: list[StageOutput], expected: dict[str, float]) -> None:
    assert usage.of(outputs, None) == expected
    assert usage.of(outputs, reference("j", 7)) == {**expected, "payload_bytes": 7}
