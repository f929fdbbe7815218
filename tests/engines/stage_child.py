"""One engine in a process of its own, told what to do in JSON lines: python -m tests.engines.stage_child ...

Arguments: stage id, model, stage config, folder for payloads. The engine is started in the main thread and driven from
an event loop in another, as a worker does it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from concurrent.futures import Future
from typing import Any

import psutil

from omniqueue import configfile, engines, errors
from omniqueue.engines.base import StageOutput, StageRequest
from omniqueue.payloads import Item, PayloadStore, Reference


class Child:
    """Reads commands from stdin and writes one line for each that is done."""

    def __init__(self, stage_id: int, model: str, config: str, folder: str) -> None:
        # Engines print to stdout; the answers get the descriptor to themselves.
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        # Some ask on stdin whether a model's own code may run; the commands get that descriptor to themselves as well.
        self._commands = os.fdopen(os.dup(0))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        self._lock = threading.Lock()
        self.store = PayloadStore("ab", folder)
        self.pipe = configfile.load(config, model=model)
        self.stage, self.model = self.pipe.stage(stage_id), model
        self.engine: Any = engines.create(self.stage)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self._tasks: dict[str, Future[StageOutput]] = {}

    def say(self, **line: Any) -> None:
        with self._lock:
            self._answers.write(json.dumps(line) + "\n")

    def run(self) -> None:
        phases: list[str] = []
        try:
            loaded = self.engine.start(self.pipe, self.stage, self.model, phases.append)
        except errors.OmniqueueError as exc:
            self.say(id="start", **_error(exc), **self._left())
            return
        own = psutil.Process().memory_info().rss
        self.say(id="start", topology=loaded.topology, facts=dict(loaded.facts), phases=phases, rss_bytes=own)
        for line in self._commands:
            self.handle(json.loads(line))
        self.engine.close()

    def _left(self) -> dict[str, Any]:
        """What a closed engine must not leave."""
        return {"children": [child.name() for child in self.engine._children.alive()]}

    def handle(self, command: dict[str, Any]) -> None:
        what, key = command["op"], command["id"]
        if what == "generate":
            self.generate(key, command)
        elif what == "cancel":
            self._tasks[command["request"]].cancel()
            self.say(id=key)
        elif what == "close":
            self.engine.close()
            self.say(id=key, **self._left())
        else:
            action = self.engine.abort(command["request"]) if what == "abort" else self.engine.check_health()
            asyncio.run_coroutine_threadsafe(action, self.loop).add_done_callback(
                lambda done: self.say(id=key, **_error(done.exception()))
            )

    def generate(self, key: str, command: dict[str, Any]) -> None:
        given = dict(command["sources"])
        inputs = self.source(given.pop("inputs")).tensors if "inputs" in given else {}
        sources = {int(stage): self.source(reference) for stage, reference in given.items()}
        said: list[Any] = []
        request = StageRequest(key, command["job"], 0, command["params"], sources, said.append, inputs)
        steps: list[tuple[int, int]] = []
        answer = self.engine.generate(request, lambda done, total: steps.append((done, total)))
        running = asyncio.run_coroutine_threadsafe(answer, self.loop)
        self._tasks[key] = running
        running.add_done_callback(lambda done: self.answer(key, done, steps, said))

    def source(self, reference: dict[str, Any]) -> StageOutput:
        with self.store.open(Reference.from_json(reference)) as payload:
            item = payload.items[0]
            return StageOutput(item.data, item.tensors)

    def answer(self, key: str, done: Future[StageOutput], steps: list[tuple[int, int]], said: list[Any]) -> None:
        try:
            output = done.result()
            reference = self.store.put(f"oq_ab_{key}_0_0", [Item(output.data, output.tensors)])
            self.say(id=key, reference=reference.to_json(), steps=steps, said=said)
        except BaseException as exc:  # noqa: BLE001  # whatever it is, the test has to hear of it
            self.say(id=key, steps=steps, **_error(exc))


def _error(exc: BaseException | None) -> dict[str, Any]:
    if exc is None:
        return {}
    return {"error": {"type": type(exc).__name__, "message": str(exc), "param": getattr(exc, "param", None)}}


if __name__ == "__main__":
    stage_id, *rest = sys.argv[1:]
    Child(int(stage_id), *rest).run()
