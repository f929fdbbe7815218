"""A stage's worker stays a Celery worker: remote control, events, and tasks that are not ours."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from omniqueue import messages
from omniqueue.celery_app import app
from omniqueue.job import JobState
from tests.process.cluster import PATIENCE_S, Cluster, Process, eventually


def node(process: Process, queue: str) -> str:
    """The worker's name, as Celery's remote control knows it."""
    asked: Any = app.control.inspect(timeout=2.0)
    names = eventually(lambda: [name for name in asked.ping() or () if f"{queue}.cpu-{process.pid}@" in name])
    return str(names[0])


def inspect(name: str) -> Any:
    return app.control.inspect([name], timeout=5.0)


def test_a_worker_answers_what_celery_asks_of_it(slow: Cluster) -> None:
    (worker,), _ = slow.workers(1, 1)
    name = node(worker, "stage0")
    job = slow.submit("asked about")
    slow.when_stage(job, 0, "running")
    task = messages.task_id(job, 0)
    (active,) = inspect(name).active()[name]
    assert (active["id"], active["name"], active["args"]) == (task, "omniqueue.run_stage", [job, 0])
    assert (active["worker_pid"], active["hostname"]) == (worker.pid, name)
    assert inspect(name).query_task(task)[name][task][0] == "active"
    assert [queue["name"] for queue in inspect(name).active_queues()[name]] == ["stage0"]
    before = inspect(name).stats()[name]["total"]["omniqueue.run_stage"]
    assert before >= 1
    assert slow.ended(job).state is JobState.SUCCEEDED
    assert eventually(lambda: inspect(name).active() == {name: []})


@pytest.mark.parametrize("running", [True, False])
def test_revoking_a_task_cancels_its_job(slow: Cluster, running: bool) -> None:
    (worker,), _ = slow.workers(1, 1)
    name = node(worker, "stage0")
    job = slow.submit("revoked", publish=running)
    if running:
        slow.when_stage(job, 0, "running")
    app.control.revoke(messages.task_id(job, 0), terminate=running)
    if not running:
        eventually(lambda: messages.task_id(job, 0) in inspect(name).revoked()[name])
    assert slow.ended(job).state is JobState.CANCELLED  # one that is not running as soon as its message is enqueued


def test_a_queue_can_be_left_and_taken_up_again(slow: Cluster) -> None:
    (worker,), _ = slow.workers(1, 1)
    name = node(worker, "stage0")
    app.control.cancel_consumer("stage0", destination=[name], reply=True, timeout=5.0)
    eventually(lambda: inspect(name).active_queues()[name] == [])  # the reply to a command comes before its effect
    job = slow.submit("waits")
    assert slow.job(job).stages[0].state == "queued"
    app.control.add_consumer("stage0", destination=[name], reply=True, timeout=5.0)
    assert slow.ended(job).state is JobState.SUCCEEDED


def test_leaving_a_queue_is_said_to_all_and_heard_by_its_stage(slow: Cluster) -> None:
    workers = [replica for (replica,) in slow.workers(1, 1)]
    names = [node(worker, f"stage{k}") for k, worker in enumerate(workers)]
    app.control.cancel_consumer("stage1", reply=True, timeout=5.0)
    eventually(lambda: inspect(names[1]).active_queues()[names[1]] == [])
    job = slow.submit("as far as stage 1")
    slow.when_stage(job, 0, "done")
    assert slow.job(job).stages[1].state == "queued"
    app.control.add_consumer("stage1", destination=names[1:], reply=True, timeout=5.0)
    assert slow.ended(job).state is JobState.SUCCEEDED


def test_a_worker_told_to_shut_down_finishes_what_it_has_and_ends_well(slow: Cluster) -> None:
    (worker,), _ = slow.workers(1, 1)
    name = node(worker, "stage0")
    job = slow.submit("goes on")
    slow.when_stage(job, 0, "running")
    app.control.shutdown(destination=[name])
    assert worker.wait(PATIENCE_S) == 0
    slow.workers(1, 1)
    record = slow.ended(job)
    assert (record.state, record.stages[0].attempt) == (JobState.SUCCEEDED, 1)


def test_messages_that_are_no_stages_are_left_to_celery_and_the_worker_goes_on(quick: Cluster) -> None:
    (worker,), _ = quick.workers(1, 1)
    app.send_task("nobody.knows.this", queue="stage0")
    quick.store.client.lpush("stage0", "no message at all")
    eventually(lambda: "Received unregistered task of type 'nobody.knows.this'" in worker.text())
    eventually(lambda: "action=not_a_message" in worker.text())
    assert quick.ended(quick.submit("after that")).state is JobState.SUCCEEDED


@contextlib.contextmanager
def heard() -> Iterator[list[dict[str, Any]]]:
    """The task events that workers send meanwhile."""
    events: list[dict[str, Any]] = []
    ready = threading.Event()

    def keep(event: dict[str, Any]) -> None:
        if event["type"].startswith("task-"):
            events.append(event)

    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": keep})
        receiver.on_consume_ready = lambda *_, **__: ready.set()
        thread = threading.Thread(target=receiver.capture, kwargs={"limit": None, "timeout": None, "wakeup": False})
        thread.start()
        assert ready.wait(PATIENCE_S)
        try:
            yield events
        finally:
            receiver.should_stop = True
            thread.join()


def test_events_are_sent_while_somebody_has_asked_for_them(quick: Cluster) -> None:
    (worker,), _ = quick.workers(1, 1)
    name = node(worker, "stage0")
    with heard() as events:
        assert quick.ended(quick.submit("unheard")).state is JobState.SUCCEEDED
        app.control.enable_events(destination=[name], reply=True, timeout=5.0)
        good, bad = quick.submit("heard"), quick.submit("never", timeout_s=0.001)
        quick.all_ended([good, bad])

        def of(job: str) -> list[dict[str, Any]]:
            return [event for event in events if event["uuid"] == messages.task_id(job, 0)]

        eventually(lambda: len(of(good)) == 3 and len(of(bad)) == 3)
        assert [event["type"] for event in of(good)] == ["task-received", "task-started", "task-succeeded"]
        assert [event["type"] for event in of(bad)] == ["task-received", "task-started", "task-failed"]
        assert (of(good)[0]["name"], of(good)[0]["args"]) == ("omniqueue.run_stage", f"({good}, 0)")
        assert {event["uuid"] for event in events} == {messages.task_id(job, 0) for job in (good, bad)}
        app.control.disable_events(destination=[name], reply=True, timeout=5.0)


def test_what_is_no_message_at_all_is_logged_and_harms_nobody(quick: Cluster) -> None:
    (worker,), _ = quick.workers(1, 1)
    texts = ("x", "7", "null", "[]", "{}", '{"headers": 3}', '{"headers": {}, "body": "", "properties": {}}')
    before = worker.text().count("action=not_a_message")
    quick.store.client.lpush("stage0", *texts)
    assert quick.ended(quick.submit("after those")).state is JobState.SUCCEEDED
    eventually(lambda: worker.text().count("action=not_a_message") == before + len(texts))
    assert worker.alive()
