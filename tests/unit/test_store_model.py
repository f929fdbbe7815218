"""Every interleaving of what workers, clients, reapers and time do to a job, against a real Valkey."""

from __future__ import annotations

import collections
import uuid

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from omniqueue import errors, job, store
from omniqueue.job import Job, JobState
from omniqueue.payloads import Reference
from omniqueue.store import Claim, Owed, Store
from tests.unit import support

MAX_ATTEMPTS, MAX_QUEUE, STAGES = 2, 3, 2
PICK = st.integers(0, 10**6)
RESULT = {"kind": "image", "data": []}


class Life(RuleBasedStateMachine):
    """Jobs of one pipeline. Leases and deadlines are long: only the rules that let time pass end them."""

    url = ""

    @initialize()
    def start(self) -> None:
        self.records = Store(store.connect(self.url, 5.0), f"m{uuid.uuid4().hex[:8]}")
        self.pipe = support.pipeline(
            STAGES, lease_s=1000.0, request_timeout_s=10_000.0, max_attempts=MAX_ATTEMPTS, max_queue=MAX_QUEUE
        )
        self.known: dict[str, Job] = {}
        self.deleted: set[str] = set()
        self.messages: list[Owed] = []
        self.claims: list[Claim] = []
        #: Claims whose lease has ended.
        self.lapsed: set[tuple[str, int, int]] = set()
        self.overdue: set[str] = set()
        self.replies: collections.Counter[str] = collections.Counter()
        #: The only output a stage of a job may ever have, once it has one.
        self.outputs: dict[tuple[str, int], str] = {}

    def teardown(self) -> None:
        if hasattr(self, "records"):
            self.everything_can_end()
            for key in self.records.client.scan_iter(f"{self.records.namespace}:*", count=1000):
                self.records.client.delete(key)
            self.records.client.close()

    # -- clients -------------------------------------------------------------------------------------------------------

    @rule()
    def submit(self) -> None:
        live = sum(not record.state.terminal for record in self.known.values())
        try:
            job_id = support.submit(self.records, self.pipe, reply_to="router")
        except errors.QueueFull:
            assert live == MAX_QUEUE
            return
        assert live < MAX_QUEUE
        self.messages.append(Owed(job_id, 0))
        self.known[job_id] = self.read(job_id)

    @precondition(lambda self: self.known)
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        job_id = self.some_job(pick)
        before = self.known[job_id]
        said = self.records.cancel(job_id)
        runs = before.stages[before.stage].state == "running"
        if before.state.terminal or before.state is JobState.CANCELLING:
            assert said == before.state.value
        else:
            assert said == ("cancelling" if runs else "cancelled")

    @precondition(lambda self: self.known)
    @rule(pick=PICK)
    def delete(self, pick: int) -> None:
        job_id = self.some_job(pick)
        said, _ = self.records.delete(job_id)
        assert said == ("deleted" if self.known[job_id].state.terminal else "live")
        if said == "deleted":
            del self.known[job_id]
            self.deleted.add(job_id)

    # -- the broker ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.messages)
    @rule(pick=PICK)
    def lose_a_message(self, pick: int) -> None:
        self.messages.pop(pick % len(self.messages))

    @precondition(lambda self: self.messages)
    @rule(pick=PICK, worker=st.sampled_from("abc"), again=st.booleans(), alone=st.booleans())
    def deliver(self, pick: int, worker: str, again: bool, alone: bool) -> None:
        message = self.messages[pick % len(self.messages)]
        if not again:
            self.messages.remove(message)
        before = self.known.get(message.job_id)
        answer = self.records.claim(self.pipe, message.job_id, message.stage_id, worker, alone=alone)
        if isinstance(answer, Claim):
            self.claimed(answer, before)
        elif answer == "done":
            assert before is not None
            assert before.stages[message.stage_id].state == "done"
            if message.stage_id + 1 < STAGES:
                self.messages.append(Owed(message.job_id, message.stage_id + 1))
        elif answer == "gone":
            assert before is None
        elif answer == "busy":
            assert self.current(message.job_id, message.stage_id) is not None
        elif answer == "alone":
            assert not alone
            self.messages.append(message)  # the worker asks again when it is
        else:
            assert answer in ("over", "early"), answer

    def claimed(self, claim: Claim, before: Job | None) -> None:
        assert before is not None
        stage = before.stages[claim.stage_id]
        assert stage.state == "queued" or (claim.job_id, claim.stage_id, stage.attempt) in self.lapsed
        assert claim.attempt == stage.attempt + 1
        assert claim.job_id not in self.overdue
        assert before.state in (JobState.QUEUED, JobState.RUNNING)
        names = {stage_id: reference.name for stage_id, reference in claim.references.items()}
        assert names == {k: self.outputs[claim.job_id, k] for k in range(claim.stage_id)}
        self.claims.append(claim)

    # -- workers -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.claims)
    @rule(pick=PICK)
    def renew(self, pick: int) -> None:
        claim = self.some_claim(pick)
        stop = self.records.renew([(claim, (1, 2))], 1000.0)
        key = (claim.job_id, claim.stage_id, claim.attempt)
        holds = self.holds(claim)
        if holds:
            self.lapsed.discard(key)
        runs = holds and self.known[claim.job_id].state is JobState.RUNNING
        assert stop == (set() if runs else {key})

    @precondition(lambda self: self.claims)
    @rule(pick=PICK)
    def finish(self, pick: int) -> None:
        claim = self.some_claim(pick)
        name = f"oq_x_{claim.job_id}_{claim.stage_id}_{claim.attempt}"
        last = claim.stage_id == STAGES - 1
        held, before = self.holds(claim), self.known.get(claim.job_id)
        said_before = before is not None and self.outputs.get((claim.job_id, claim.stage_id)) == name
        said = self.records.finish(claim, Reference(name, 1, "here"), {}, RESULT if last else None)
        if not held:
            # Said again, it is answered as it was the first time.
            assert said == (("succeeded" if last else "next") if said_before else "stale")
            return
        assert before is not None
        if before.state is JobState.CANCELLING:
            assert said == "cancelled"
        elif claim.job_id in self.overdue:
            assert said == "expired"
        else:
            assert said == ("succeeded" if last else "next")
            self.outputs[claim.job_id, claim.stage_id] = name
            if not last:
                self.messages.append(Owed(claim.job_id, claim.stage_id + 1))

    @precondition(lambda self: self.claims)
    @rule(pick=PICK, retry=st.booleans(), counted=st.booleans())
    def fail(self, pick: int, retry: bool, counted: bool) -> None:
        claim = self.some_claim(pick)
        held, before = self.holds(claim), self.known.get(claim.job_id)
        said = self.records.fail(claim, "code", "reason", retry=retry, counted=counted)
        if not held:
            assert said == "stale"
            return
        assert before is not None
        failures = before.stages[claim.stage_id].failures
        if before.state is JobState.CANCELLING:
            assert said == "cancelled"
        elif claim.job_id in self.overdue:
            assert said == "expired"
        elif counted and (not retry or failures + 1 >= MAX_ATTEMPTS):
            assert said == "failed"
        else:
            assert said == "queued"
            self.messages.append(Owed(claim.job_id, claim.stage_id))

    # -- time and the reaper -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.claims)
    @rule(pick=PICK)
    def let_a_lease_lapse(self, pick: int) -> None:
        claim = self.some_claim(pick)
        if self.holds(claim):
            support.lapse(self.records, self.pipe, claim.job_id, claim.stage_id)
            self.lapsed.add((claim.job_id, claim.stage_id, claim.attempt))

    @precondition(lambda self: self.known)
    @rule(pick=PICK)
    def let_a_deadline_pass(self, pick: int) -> None:
        job_id = self.some_job(pick)
        if not self.known[job_id].state.terminal:
            support.overdue(self.records, self.pipe, job_id)
            self.overdue.add(job_id)

    @rule()
    def reap(self) -> None:
        owed = self.records.reap(self.pipe.name)
        for one in owed:
            assert self.known[one.job_id].stages[one.stage_id].state == "running"
        self.messages += owed
        assert all(self.read(i).state.terminal for i in self.overdue & self.known.keys())

    @rule()
    def find_what_is_lost(self) -> None:
        """Time enough has passed for every message that is still there to have come."""
        there = {message for message in self.messages if self.waits(message)}
        for job_id, record in self.known.items():
            if self.waits(Owed(job_id, record.stage)) and Owed(job_id, record.stage) not in there:
                support.earlier(self.records, self.pipe, job_id, record.stage, 1000)
        for stage in self.pipe.stages:
            found = self.records.lost(stage.queue, [])
            assert not there.intersection(found)
            self.messages += found
        for job_id, record in self.known.items():
            assert not self.waits(Owed(job_id, record.stage)) or Owed(job_id, record.stage) in self.messages

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        self.only_legal_changes()
        self.the_indexes_are_those_of_the_records()
        self.each_end_is_told_once()
        self.the_counts_add_up()

    def only_legal_changes(self) -> None:
        for job_id, before in self.known.items():
            after = self.read(job_id)
            if after.state is not before.state:
                assert after.state in job.TRANSITIONS[before.state], (before.state, after.state)
            if before.state.terminal:
                assert after == before
            for old, new in zip(before.stages, after.stages, strict=True):
                assert new.failures <= MAX_ATTEMPTS
                assert new.attempt >= old.attempt
                if old.state == "done":
                    assert new == old
                    assert new.reference is not None
                    assert new.reference["name"] == self.outputs[job_id, new.stage_id]
            self.known[job_id] = after

    def the_indexes_are_those_of_the_records(self) -> None:
        live = {i: r for i, r in self.known.items() if not r.state.terminal}
        assert self.members(f"live:{self.pipe.name}") == live.keys()
        assert self.members(f"jobs:{self.pipe.name}") == self.known.keys()
        assert self.members("ended") == self.known.keys() - live.keys()
        running = {f"{i}:{s.stage_id}" for i, r in live.items() for s in r.stages if s.state == "running"}
        assert self.members(f"leases:{self.pipe.name}") == running
        for stage in self.pipe.stages:
            waiting = {i for i, r in live.items() if r.stages[stage.stage_id].state == "queued"}
            assert self.members(f"wait:{stage.queue}") == self.members(f"order:{stage.queue}") == waiting
        for record in live.values():
            assert [s.state for s in record.stages[: record.stage]] == ["done"] * record.stage
            assert record.stages[record.stage].state in ("queued", "running")

    def each_end_is_told_once(self) -> None:
        self.replies.update(self.records.replies("router", 0.001) if self.has_replies() else [])
        assert set(self.replies) == {i for i, r in self.known.items() if r.state.terminal} | self.deleted
        assert set(self.replies.values()) <= {1}

    def the_counts_add_up(self) -> None:
        counts = self.records.counts(self.pipe.name)
        ends = sum(counts.get(state.value, 0) for state in job.TERMINAL)
        assert counts.get("accepted", 0) == len(self.known) + len(self.deleted)
        assert ends == len(self.replies)

    def everything_can_end(self) -> None:
        """With one worker that works and a reaper, every job ends; nothing has to be remembered but the records."""
        for _ in range(3 * STAGES + 1):
            for job_id, record in self.known.items():
                if record.stages[record.stage].state == "running":
                    support.lapse(self.records, self.pipe, job_id, record.stage)
                elif not record.state.terminal:
                    support.earlier(self.records, self.pipe, job_id, record.stage, 1000)
            owed = self.records.reap(self.pipe.name)
            owed += [one for stage in self.pipe.stages for one in self.records.lost(stage.queue, [])]
            for one in owed:
                answer = self.records.claim(self.pipe, one.job_id, one.stage_id, "good", alone=True)
                if isinstance(answer, Claim):
                    last = one.stage_id == STAGES - 1
                    name = f"oq_x_{one.job_id}_{one.stage_id}_{answer.attempt}"
                    self.outputs[one.job_id, one.stage_id] = name
                    self.records.finish(answer, Reference(name, 1, "here"), {}, RESULT if last else None)
            self.only_legal_changes()
        assert all(record.state.terminal for record in self.known.values())
        self.the_indexes_are_those_of_the_records()
        self.each_end_is_told_once()

    # -- helpers -------------------------------------------------------------------------------------------------------

    def read(self, job_id: str) -> Job:
        record = self.records.job(job_id)
        assert record is not None
        return record

    def members(self, key: str) -> set[str]:
        return set(self.records.client.zrange(f"{self.records.namespace}:{key}", 0, -1))  # type: ignore[arg-type]

    def has_replies(self) -> bool:
        return bool(self.records.client.exists(f"{self.records.namespace}:reply:router"))

    def some_job(self, pick: int) -> str:
        return list(self.known)[pick % len(self.known)]

    def some_claim(self, pick: int) -> Claim:
        return self.claims[pick % len(self.claims)]

    def current(self, job_id: str, stage_id: int) -> int | None:
        """The attempt that holds a stage, as of the last look at the records."""
        record = self.known.get(job_id)
        if record is None or record.state.terminal or record.stages[stage_id].state != "running":
            return None
        return record.stages[stage_id].attempt

    def holds(self, claim: Claim) -> bool:
        return self.current(claim.job_id, claim.stage_id) == claim.attempt

    def waits(self, message: Owed) -> bool:
        record = self.known.get(message.job_id)
        return record is not None and not record.state.terminal and record.stages[message.stage_id].state == "queued"


def test_no_interleaving_breaks_a_job(valkey: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Life, "url", valkey)
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Life,
        settings=settings(
            max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
