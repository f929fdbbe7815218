"""A job as a literal Celery chain, as it lies in a real broker."""

from __future__ import annotations

import base64
import json
from typing import Any

import celery
import pytest

from omniqueue import celery_app, chain, store
from omniqueue.pipeline import Pipeline
from omniqueue.store import Owed, Store
from tests.unit import support

JOB = "0123456789abcdef" * 2


@pytest.fixture
def pipe() -> Pipeline:
    return support.pipeline(3)


def messages(records: Store, queue: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in chain.broker_lists(queue):
        texts: Any = records.client.lrange(name, 0, -1)
        found += [json.loads(text) for text in reversed(texts)]
        records.client.delete(name)
    return found


def body(message: dict[str, Any]) -> Any:
    return json.loads(base64.b64decode(message["body"]))


def test_a_job_is_a_celery_chain_of_one_signature_a_stage(pipe: Pipeline) -> None:
    built = chain.build(pipe, JOB)
    assert isinstance(built, celery.canvas._chain)
    assert [task.task for task in built.tasks] == ["omniqueue.run_stage"] * 3
    assert [task.args for task in built.tasks] == [(JOB, 0), (JOB, 1), (JOB, 2)]
    assert [task.options["queue"] for task in built.tasks] == [stage.queue for stage in pipe.stages]
    assert all(task.immutable for task in built.tasks)


def test_a_chain_may_begin_at_a_later_stage(pipe: Pipeline) -> None:
    built = chain.build(pipe, JOB, first=1)
    assert [task.args for task in built.tasks] == [(JOB, 1), (JOB, 2)]


def test_the_last_stage_alone_is_a_chain_that_can_be_published(records: Store, pipe: Pipeline, broker: None) -> None:
    assert chain.publish(pipe, Owed(JOB, 2))
    (message,) = messages(records, pipe.stages[2].queue)
    assert body(message)[0] == [JOB, 2]


def test_a_published_job_is_one_message_in_its_first_queue_with_the_rest_inside(
    records: Store, pipe: Pipeline, broker: None
) -> None:
    assert chain.publish(pipe, Owed(JOB, 0))
    (message,) = messages(records, pipe.stages[0].queue)
    assert [messages(records, stage.queue) for stage in pipe.stages[1:]] == [[], []]
    args, kwargs, embed = body(message)
    assert (args, kwargs) == ([JOB, 0], {})
    assert [(task["args"], task["options"]["queue"]) for task in embed["chain"]] == [
        ([JOB, 2], pipe.stages[2].queue),
        ([JOB, 1], pipe.stages[1].queue),
    ]


def test_a_message_is_json_holds_ids_only_and_shows_no_prompt(records: Store, pipe: Pipeline, broker: None) -> None:
    job_id = records.submit(pipe, {"prompt": "my secret prompt" * 1000}).job_id
    chain.publish(pipe, Owed(job_id, 0))
    (message,) = messages(records, pipe.stages[0].queue)
    assert message["content-type"] == "application/json"
    assert message["headers"]["argsrepr"] == f"({job_id}, 0)"
    assert message["headers"]["kwargsrepr"] == "{}"
    assert "secret" not in json.dumps(message) + json.dumps(body(message))
    assert len(json.dumps(message)) < 4096


def test_more_urgent_jobs_come_first(records: Store, pipe: Pipeline, broker: None) -> None:
    ids = {priority: store.new_id() for priority in (9, 3, 0, 6)}
    for priority, job_id in ids.items():
        assert chain.publish(pipe, Owed(job_id, 0), priority)
    lists = chain.broker_lists(pipe.stages[0].queue)
    assert chain.jobs_of(records.oldest_messages(lists)) == [ids[0], ids[3], ids[6], ids[9]]
    found = messages(records, pipe.stages[0].queue)
    assert [body(message)[2]["chain"][0]["options"]["priority"] for message in found] == [0, 3, 6, 9]


def test_the_oldest_message_of_a_list_is_the_one_that_is_taken_next(
    records: Store, pipe: Pipeline, broker: None
) -> None:
    ids = [store.new_id() for _ in range(3)]
    for job_id in ids:
        chain.publish(pipe, Owed(job_id, 0))
    queue = pipe.stages[0].queue
    assert chain.jobs_of(records.oldest_messages(chain.broker_lists(queue))) == [ids[0]]
    with celery_app.app.connection_for_read() as connection:
        taken = connection.default_channel.basic_get(queue, no_ack=True)
    assert taken.headers["argsrepr"] == f"({ids[0]}, 0)"
    assert chain.jobs_of(records.oldest_messages(chain.broker_lists(queue))) == [ids[1]]
    messages(records, queue)


@pytest.mark.parametrize(
    "text",
    [
        "", "no json", "[]", "null", "7", '"x"', "{}", '{"headers": null}', '{"headers": []}', '{"headers": {}}',
        '{"headers": {"argsrepr": null}}', '{"headers": {"argsrepr": 7}}', '{"headers": {"argsrepr": "(x, 0)"}}',
        '{"headers": {"argsrepr": "(ab, 0) and more"}}',
    ],
)  # fmt: skip
def test_somebody_elses_message_is_a_question_mark_and_no_error(text: str) -> None:
    own = json.dumps({"headers": {"argsrepr": f"({JOB}, 0)"}})
    assert chain.jobs_of([own, text, own]) == [JOB, "?", JOB]


def test_publishing_to_a_broker_that_is_away_is_told_not_raised(
    pipe: Pipeline, broker: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(celery_app.app.conf, "broker_url", f"redis+socket://{tmp_path}/none.sock")
    celery_app.app.__dict__.pop("amqp", None)
    assert chain.publish(pipe, Owed(JOB, 0)) is False


@pytest.mark.parametrize(
    ("url", "is_redis"),
    [("redis://h", True), ("rediss://h", True), ("redis+socket:///s", True), ("amqp://h", False), ("memory://", False)],
)
def test_only_a_redis_can_be_looked_into(url: str, is_redis: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(celery_app.app.conf, "broker_url", url)
    assert chain.broker_is_redis() is is_redis


def test_nothing_is_pickled_stored_as_a_result_or_acknowledged_early() -> None:
    conf = celery_app.app.conf
    assert (conf.accept_content, conf.task_serializer) == (["json"], "json")
    assert conf.task_ignore_result
    assert conf.task_acks_late
    assert conf.worker_prefetch_multiplier == 1
    assert conf.worker_pool == "threads"
