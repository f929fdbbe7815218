"""A job as a literal Celery chain, as it lies in a real broker."""

from __future__ import annotations

import base64
import datetime
import functools
import json
from typing import Any

import celery
import pytest
from kombu.utils import json as kombu_json

from omniqueue import celery_app, chain, errors, settings, store
from omniqueue import messages as wire
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
    built = wire.chain(pipe, JOB)
    assert isinstance(built, celery.canvas._chain)
    assert [task.task for task in built.tasks] == ["omniqueue.run_stage"] * 3
    assert [task.args for task in built.tasks] == [(JOB, 0), (JOB, 1), (JOB, 2)]
    assert [task.options["queue"] for task in built.tasks] == [stage.queue for stage in pipe.stages]
    assert all(task.immutable for task in built.tasks)


def test_a_chain_may_begin_at_a_later_stage(pipe: Pipeline) -> None:
    built = wire.chain(pipe, JOB, first=1)
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


@pytest.mark.parametrize("priority", [0, 4, 9])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_message_made_from_the_template_is_the_one_that_celery_sends(
    records: Store, pipe: Pipeline, broker: None, first: int, priority: int
) -> None:
    queue = pipe.stages[first].queue
    assert chain.publish(pipe, Owed(JOB, first), priority)
    (place,) = [name for name in chain.broker_lists(queue) if records.client.llen(name)]
    (theirs,) = messages(records, queue)
    made = wire.message(pipe, JOB, first, priority)
    ours = json.loads(made.text)
    assert made.list == place
    assert ours["properties"].pop("delivery_tag") != theirs["properties"].pop("delivery_tag")
    assert body(ours) == body(theirs)
    del ours["body"], theirs["body"]
    assert ours == theirs
    assert ours["headers"]["id"] == f"{JOB}-{first}"
    assert ours["headers"]["root_id"] == f"{JOB}-0"


def test_no_two_messages_share_a_delivery_tag(pipe: Pipeline) -> None:
    tags = {json.loads(wire.message(pipe, JOB, 0, 0).text)["properties"]["delivery_tag"] for _ in range(100)}
    assert len(tags) == 100


def test_the_list_of_a_priority_is_kombus(records: Store, pipe: Pipeline, broker: None) -> None:
    with celery_app.app.connection_for_read() as connection:
        channel = connection.default_channel
        assert [channel._q_for_pri("q", priority) for priority in range(10)] == chain.broker_lists("q")


def test_a_record_and_its_message_appear_together_and_only_once(
    records: Store, pipe: Pipeline, broker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "holds_queues", True)
    made = chain.message(pipe, records, Owed(JOB, 0), 3)
    for _ in range(2):  # as a client does whose connection was lost with the answer
        records.submit(pipe, {"prompt": "p"}, job_id=JOB, priority=3, message=made)
    (message,) = messages(records, pipe.stages[0].queue)
    assert message["properties"]["priority"] == 3
    claim = records.claim(pipe, JOB, 0, "w")
    assert isinstance(claim, store.Claim)
    following = chain.message(pipe, records, Owed(JOB, 1), claim.priority)
    assert [records.finish(claim, None, {}, message=following) for _ in range(2)] == ["next", "next"]
    (message,) = messages(records, pipe.stages[1].queue)
    assert (body(message)[0], message["properties"]["priority"]) == ([JOB, 1], 3)


def test_a_submission_that_is_refused_enqueues_nothing(records: Store, broker: None) -> None:
    pipe = support.pipeline(1, max_queue=1)
    submit = functools.partial(records.submit, pipe, {"prompt": "p"}, idempotency_key="k")
    for job_id in (JOB, store.new_id()):  # the second is a retry of the first
        submit(job_id=job_id, message=wire.message(pipe, job_id, 0, 0))
    with pytest.raises(errors.QueueFull):
        records.submit(pipe, {}, message=wire.message(pipe, store.new_id(), 0, 0))
    assert len(messages(records, pipe.stages[0].queue)) == 1


def test_a_claim_that_no_longer_holds_hands_nothing_over(records: Store, pipe: Pipeline, broker: None) -> None:
    job_id = support.submit(records, pipe)
    claim = support.claim(records, pipe, job_id)
    support.lapse(records, pipe, job_id, 0)
    support.claim(records, pipe, job_id, worker="other")
    assert records.finish(claim, None, {}, message=wire.message(pipe, job_id, 1, 0)) == "stale"
    assert messages(records, pipe.stages[1].queue) == []


@pytest.mark.parametrize("holds_queues", [True, False])
def test_what_is_owed_again_is_the_same_message_wherever_the_queues_are(
    records: Store, pipe: Pipeline, broker: None, monkeypatch: pytest.MonkeyPatch, holds_queues: bool
) -> None:
    monkeypatch.setattr(records, "holds_queues", holds_queues)
    job_id = records.submit(pipe, {"prompt": "p"}, priority=5).job_id
    assert chain.republish(pipe, records, Owed(job_id, 0))
    (message,) = messages(records, pipe.stages[0].queue)
    assert (message["headers"]["id"], message["properties"]["priority"]) == (f"{job_id}-0", 5)


def test_a_separate_broker_gets_its_messages_from_celery(records: Store, pipe: Pipeline) -> None:
    assert records.holds_queues is False
    assert chain.message(pipe, records, Owed(JOB, 0), 0) is None
    config = settings.load({"OMNIQUEUE_REDIS_URL": "redis://a", "OMNIQUEUE_BROKER_URL": "amqp://b"})
    assert store.Store.from_settings(config).holds_queues is False
    assert store.Store.from_settings(settings.load({"OMNIQUEUE_REDIS_URL": "redis://a"})).holds_queues is True


@pytest.mark.parametrize("text", ['{"a": 1', "", "nonsense", b"\xff", '{"a": NaN}'])
def test_what_is_no_json_is_a_value_error_as_it_is_for_kombu(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the text is the parser's
        celery_app._loads(text)


@pytest.mark.parametrize("value", [{"at": datetime.datetime(2026, 1, 2, 3, 4, 5)}, [1, 2.5, None, {"a": "é"}], "x"])
def test_json_is_read_as_kombu_writes_it(value: Any) -> None:
    assert celery_app._loads(kombu_json.dumps(value)) == value


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
