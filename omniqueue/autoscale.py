"""``omniqueue autoscale``: starts and stops workers on this machine, so that no stage's jobs wait too long."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from omniqueue import errors, placement, up
from omniqueue.child import Child, end_all
from omniqueue.overview import StageOverview
from omniqueue.pipeline import Pipeline, Stage
from omniqueue.scaling import Limits, Scaler, Seen
from omniqueue.store import Store

Say = Callable[[str], None]

#: Between two looks, in seconds.
INTERVAL_S = 2.0
#: Pauses before a worker is started in place of one that ended by itself, in seconds.
_BACKOFF_S = (0.0, 2.0, 5.0, 15.0, 60.0)
#: A worker that ends with this status has a configuration that no restart will mend.
_EXIT_CONFIG = 2


@dataclass
class Fleet:
    """The workers of one stage that this process has started."""

    pipeline: Pipeline
    stage: Stage
    scaler: Scaler
    #: How many there should be.
    wanted: int
    running: list[Child] = field(default_factory=list)
    #: Told to stop; they end what they have.
    leaving: list[Child] = field(default_factory=list)
    started: int = 0
    #: Ends by itself in a row, and when the next start is due.
    failures: int = 0
    retry_at: float = 0.0

    @property
    def width(self) -> int:
        """Devices that a worker needs."""
        return placement.world_size(self.stage.execution_type, self.stage.deploy, self.pipeline.deploy)


class Autoscaler:
    """Every stage that limits were given for."""

    def __init__(
        self,
        pipelines: Iterable[Pipeline],
        records: Store,
        limits: Mapping[int, Limits],
        devices: tuple[str, ...],
        folder: Path,
        say: Say,
    ) -> None:
        """``limits`` by stage id. Without ``devices`` workers get none of their own, as on a CPU.

        Raises ConfigError for a stage that there is not.
        """
        self.pipelines = tuple(pipelines)
        self.store, self.folder, self.say = records, folder, say
        self._free = list(devices)
        self._shared_out = bool(devices)
        self._taken: dict[int, list[str]] = {}
        self.fleets = [
            Fleet(pipe, stage, Scaler(limits[stage.stage_id]), limits[stage.stage_id].low)
            for pipe in self.pipelines
            for stage in pipe.stages
            if stage.stage_id in limits
        ]
        if unknown := set(limits) - {fleet.stage.stage_id for fleet in self.fleets}:
            raise errors.ConfigError(f"--limits: there is no stage {min(unknown)} in {self.pipelines[0].name}.")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def run(self, stopping: threading.Event, interval_s: float = INTERVAL_S) -> None:
        """Look, decide and act until ``stopping`` is set. Raises NotReady when a worker's configuration is wrong."""
        try:
            while True:
                self.tick()
                if stopping.wait(interval_s):
                    return
        finally:
            self.stop()

    def tick(self) -> None:
        """One look at every stage. While Redis is away nothing is changed."""
        for fleet in self.fleets:
            self._bury(fleet)
        try:
            overviews = {pipe.name: self.store.overview(pipe) for pipe in self.pipelines}
            workers = self.store.workers()
        except errors.BrokerUnavailable:
            return
        ours = {child.process.pid for f in self.fleets for child in (*f.running, *f.leaving) if child.process}
        for fleet in self.fleets:
            stage = next(s for s in overviews[fleet.pipeline.name].stages if s.stage.stage_id == fleet.stage.stage_id)
            others = sum(w["queue"] == fleet.stage.queue and w["pid"] not in ours for w in workers)
            self._decide(fleet, stage, others)
            self._act(fleet)

    def _decide(self, fleet: Fleet, stage: StageOverview, others: int) -> None:
        wanted = max(0, fleet.scaler.decide(seen(stage, fleet.wanted + others, time.monotonic())) - others)
        if wanted != fleet.wanted:
            self.say(
                f"{fleet.stage.queue}: {fleet.wanted} -> {wanted} workers; {stage.waiting} wait, the oldest for "
                f"{stage.oldest_wait_s:.0f} s, {stage.running} run"
            )
            fleet.wanted = wanted

    def _act(self, fleet: Fleet) -> None:
        while len(fleet.running) > fleet.wanted:
            child = fleet.running.pop()  # the youngest: what has run long has its caches warm
            fleet.leaving.append(child)
            if child.process is not None:
                child.process.send_signal(signal.SIGTERM)
        while len(fleet.running) < fleet.wanted and time.monotonic() >= fleet.retry_at:
            if self._shared_out and len(self._free) < fleet.width:
                return  # until one that leaves has left
            self._start(fleet)

    def _start(self, fleet: Fleet) -> None:
        name = f"{fleet.stage.queue}.auto{fleet.started}"
        devices = [self._free.pop(0) for _ in range(fleet.width)] if self._shared_out else []
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {})}
        child = Child(name, up.worker_command(fleet.stage.queue), self.folder / f"{name}.log", environment)
        child.start()
        self._taken[id(child)] = devices
        fleet.running.append(child)
        fleet.started += 1
        where = f" on {','.join(devices)}" if devices else ""
        self.say(f"started  {name}{where} (pid {child.process.pid if child.process else '?'}), log {child.log}")

    def _bury(self, fleet: Fleet) -> None:
        """Take leave of processes that have ended, and their devices back."""
        for child in [child for child in fleet.leaving if child.ended() is not None]:
            fleet.leaving.remove(child)
            self._free += self._taken.pop(id(child))
        for child in [child for child in fleet.running if child.ended() is not None]:
            status = child.ended()
            fleet.running.remove(child)
            self._free += self._taken.pop(id(child))
            if status == _EXIT_CONFIG:
                raise errors.NotReady(f"{child.name} ended with status {status}:\n{child.tail()}")
            well = time.monotonic() - child.started_at > _BACKOFF_S[-1]
            fleet.failures = 0 if well else min(fleet.failures + 1, len(_BACKOFF_S) - 1)
            fleet.retry_at = time.monotonic() + _BACKOFF_S[fleet.failures]
            self.say(f"ended    {child.name} with status {status}\n{child.tail(5)}")

    def stop(self, grace_s: float = 90.0) -> None:
        """Let every worker drain and end."""
        children = [child for fleet in self.fleets for child in (*fleet.running, *fleet.leaving)]
        end_all([child.process for child in children if child.process is not None], grace_s)


def seen(stage: StageOverview, replicas: int, now: float) -> Seen:
    """What the policy is told of a stage."""
    done = stage.ends.get("done", 0)
    return Seen(
        now=now,
        waiting=stage.waiting,
        running=stage.running,
        replicas=replicas,
        slots=stage.stage.max_num_seqs,
        # An attempt that is made again has come again.
        arrived=stage.waiting + stage.running + sum(stage.ends.values()),
        done=done,
        run_s=stage.run.sum,
    )


@contextlib.contextmanager
def until_told() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set."""
    stopping = threading.Event()
    old = {number: signal.signal(number, lambda *_: stopping.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
