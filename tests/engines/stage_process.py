"""The other end of ``stage_child``: an engine process as an object."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from omniqueue import errors, params
from omniqueue.engines.base import StageOutput
from omniqueue.payloads import Item, PayloadStore, Reference, Tensor
from omniqueue.pipeline import Pipeline
from tests.engines import reference

START_S = 400.0
#: No single request of these tests takes longer.
ANSWER_S = 120.0


class StageProcess:
    """One stage's engine in a process of its own; ``generate`` returns at once, with a future."""

    def __init__(
        self,
        stage_id: int,
        checkpoint: Path,
        folder: Path,
        config: str = reference.CONFIG,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.pipe: Pipeline = reference.pipeline(checkpoint, config)
        self.stage = self.pipe.stage(stage_id)
        self.store = PayloadStore("ab", str(folder))
        self.log = folder / f"stage{stage_id}.log"
        self._ids = itertools.count()
        self._start: Future[dict[str, Any]] = Future()
        self._waiting = {"start": self._start}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.engines.stage_child",
                    str(stage_id),
                    str(checkpoint),
                    config,
                    str(folder),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**reference.environment(), **(variables or {})},
            )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            self._waiting.pop(answer["id"]).set_result(answer)
        for future in self._waiting.values():
            future.set_exception(errors.EngineDead(self.log.read_text(errors="replace")[-3000:]))

    def started(self) -> dict[str, Any]:
        """Wait for the engine; raises what its start raised."""
        return _checked(self._start, START_S)

    def tell(self, op: str, key: str | None = None, **what: Any) -> Future[dict[str, Any]]:
        """Send a command; the future has the answer's line."""
        key = key or f"c{next(self._ids)}"
        answer: Future[dict[str, Any]] = Future()
        self._waiting[key] = answer
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, "id": key, **what}) + "\n")
        self.process.stdin.flush()
        return answer

    def generate(
        self,
        job: Mapping[str, Any],
        sources: Mapping[int, StageOutput] | None = None,
        overrides: Mapping[str, Any] | None = None,
        key: str | None = None,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> Answer:
        """Run one item with the parameters a worker would give it, ``overrides`` over them."""
        key = key or f"r{next(self._ids)}"
        references: dict[int | str, Any] = {}
        for stage_id, output in (sources or {}).items():
            item = Item(output.data, output.tensors)
            references[stage_id] = self.store.put(f"oq_ab_{key}in{stage_id}_0_0", [item]).to_json()
        if inputs:
            references["inputs"] = self.store.put(f"oq_ab_{key}in_0_0", [Item({}, inputs)]).to_json()
        given = {**params.stage_params(job, self.stage, 0), **(overrides or {})}
        line = self.tell("generate", key, job=dict(job), params=given, sources=references)
        return Answer(self.store, key, line)

    def close(self) -> list[str]:
        """Close the engine, end the process, and return what the engine left running; may be called twice."""
        left: list[str] = []
        started = self._start.done() and self._start.exception() is None and "error" not in self._start.result()
        if started and self.process.poll() is None:
            left = _checked(self.tell("close"), ANSWER_S)["children"]
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(timeout=60)
        self._reader.join(timeout=10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return left


class Answer:
    """A request on its way."""

    def __init__(self, store: PayloadStore, key: str, line: Future[dict[str, Any]]) -> None:
        self._store, self.key, self._line = store, key, line

    def done(self) -> bool:
        return self._line.done()

    def steps(self) -> list[list[int]]:
        """What the engine told of its progress."""
        found: list[list[int]] = self._line.result(timeout=ANSWER_S)["steps"]
        return found

    def said(self) -> list[dict[str, Any]]:
        """The pieces of text that the engine said on the way."""
        found: list[dict[str, Any]] = self._line.result(timeout=ANSWER_S)["said"]
        return found

    def result(self) -> StageOutput:
        """The output; raises what the engine raised."""
        stored = Reference.from_json(_checked(self._line, ANSWER_S)["reference"])
        with self._store.open(stored) as payload:
            return StageOutput(payload.items[0].data, payload.items[0].tensors)


def _checked(line: Future[dict[str, Any]], timeout_s: float) -> dict[str, Any]:
    answer = line.result(timeout=timeout_s)
    if "error" in answer:
        raised = getattr(errors, answer["error"]["type"], errors.OmniqueueError)
        raise raised(f"{answer['error']['type']}: {answer['error']['message']}", param=answer["error"]["param"])
    return answer
