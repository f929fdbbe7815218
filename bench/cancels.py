"""Speech jobs that are cancelled at random moments: ``python -m bench.cancels [--jobs 1000] [--seed 1]``.

A tiny Qwen2.5-Omni, three real engines behind three real Celery workers, the real router. Half of the jobs are let be,
the others are ended by DELETE, by a connection that closes or by a short deadline, at any moment from their first
message to their last. What is left behind then is told, line by line; the status is 1 when anything is.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench import three_stages
from bench.report import table
from omniqueue import payloads
from omniqueue.job import Job
from tests.pipeline.conftest import Product
from tests.process.cluster import eventually

#: The most that thinker and talker make, so that a job costs little more than what is around its engines.
TOKENS, CODES = 6, 12
PROMPTS = 8
#: The latest moment at which a job is cancelled, in times of what one takes that is let be.
LONGEST = 1.25
SHM = Path("/dev/shm")
#: No job, and nothing that it held, may outlive it by more, in seconds.
MOST_S = 60.0
#: Memory is measured after so many jobs; the first time counts as the beginning, since caches are full then.
EVERY = 200
#: What a part may grow by in 100 jobs, and how many more files it may hold open at the end.
GROWTH_BYTES, MORE_FILES = 1 << 20, 8
#: What Redis may hold more at the end, once all jobs are forgotten.
REDIS_BYTES = 1 << 20
#: Kinds of keys that hold the records of jobs, and go when none is left.
INDICES = {"job", "jobs", "ended"}
WAYS = ("let be", "DELETE", "connection closed", "event stream closed", "short deadline")


@dataclass(frozen=True)
class Ask:
    """One job: which prompt, and how and after how many seconds it is to end early."""

    prompt: int
    way: str = WAYS[0]
    after_s: float = 0.0


def asks(count: int, seed: int, longest_s: float) -> Iterator[Ask]:
    """Half of them let be; the others in every way, at any moment up to ``longest_s``."""
    dice = random.Random(seed)
    for _ in range(count):
        way = WAYS[0] if dice.random() < 0.5 else dice.choice(WAYS[1:])
        yield Ask(dice.randrange(PROMPTS), way, dice.uniform(0.0, longest_s))


@dataclass
class Clients:
    """Who asks, and what they were told."""

    port: int
    prompts: Sequence[str]
    #: By way and what the client saw of the end.
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: The different files that each prompt had for an answer; there must be one.
    files: dict[int, set[bytes]] = field(default_factory=dict)
    #: What jobs took that were let be.
    seconds: list[float] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, wanted: Iterator[Ask], in_flight: int) -> None:
        """All of them, so many at a time. Raises what a client raised."""
        with ThreadPoolExecutor(in_flight) as pool:
            for done in [pool.submit(self._client, wanted) for _ in range(in_flight)]:
                done.result()

    def _client(self, wanted: Iterator[Ask]) -> None:
        while True:
            with self._lock:
                ask = next(wanted, None)
            if ask is None:
                return
            start = time.monotonic()
            end, content = self._ask(ask)
            with self._lock:
                self.ends[ask.way, end] += 1
                if content is not None:
                    self.files.setdefault(ask.prompt, set()).add(content)
                if ask.way == WAYS[0]:
                    self.seconds.append(time.monotonic() - start)

    def _ask(self, ask: Ask) -> tuple[str, bytes | None]:
        """How it ended for the client, and the whole file if there was one."""
        deadline = {"request_timeout_s": max(0.1, ask.after_s)} if ask.way == "short deadline" else {}
        events = {"stream_format": "sse"} if ask.way in ("DELETE", "event stream closed") else {}
        body = {"input": self.prompts[ask.prompt], "seed": ask.prompt, "response_format": "wav", **deadline, **events}
        with self._connected() as connection:
            connection.request("POST", "/v1/audio/speech", json.dumps(body), {"Content-Type": "application/json"})
            if ask.way.endswith("closed"):
                time.sleep(ask.after_s)
                return "left", None
            answer = connection.getresponse()
            if ask.way == "DELETE":  # events begin at once, and with them comes the job's id
                time.sleep(ask.after_s)
                self.delete(answer.headers["X-Omniqueue-Job-Id"])
            content = answer.read()
        if events:
            return _told([json.loads(line[6:]) for line in content.splitlines() if line.startswith(b"data: ")])
        return ("whole", content) if answer.status == 200 else (json.loads(content)["error"]["code"], None)

    def _connected(self) -> contextlib.closing[http.client.HTTPConnection]:
        return contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=MOST_S))

    def delete(self, *job_ids: str) -> None:
        """Cancel jobs, or forget those that have ended."""
        with self._connected() as connection:
            for job_id in job_ids:
                connection.request("DELETE", f"/v1/jobs/{job_id}")
                connection.getresponse().read()


def _told(events: Sequence[Mapping[str, Any]]) -> tuple[str, bytes | None]:
    if events[-1]["type"] == "speech.audio.done":
        return "whole", b"".join(base64.b64decode(one["audio"]) for one in events[:-1])
    return str(events[-1]["error"]["code"]), None


@dataclass(frozen=True)
class Held:
    """What a part of the deployment holds, its process and all below it: resident memory, open files."""

    pid: int
    nbytes: int
    files: int


#: What every part holds, by the number of jobs that had ended.
Samples = dict[int, dict[str, Held]]


class Deployment:
    """The running pipeline, and what of it would stay."""

    def __init__(self, product: Product) -> None:
        self._product, self._records = product, product.store()
        self._before = set(os.listdir(SHM))

    def settled(self, most: int) -> list[Job]:
        """Every job, once all are terminal and there was time to let go of what they held.

        Raises AssertionError when one does not end.
        """
        eventually(lambda: self._records.live(three_stages.NAME) == 0, MOST_S, 0.1)
        jobs = self._records.jobs(three_stages.NAME, most)
        with contextlib.suppress(AssertionError):
            eventually(lambda: not self.in_memory(jobs), MOST_S, 0.5)
        return jobs

    def accepted(self) -> int:
        """Jobs ever accepted."""
        return self._records.counts(three_stages.NAME)["accepted"]

    def in_memory(self, jobs: Sequence[Job]) -> list[str]:
        """Files in shared memory that were not there: of this deployment, of a job, or mapped by a process of ours."""
        marks = [payloads.PREFIX + self._product.settings.payload_namespace(), *[job.id for job in jobs]]
        family = psutil.Process(self._product.process.pid).children(recursive=True)
        held = {Path(one.path).name for process in family for one in process.memory_maps() if str(SHM) in one.path}
        new = set(os.listdir(SHM)) - self._before
        return sorted(name for name in new if name in held or any(mark in name for mark in marks))

    def parts(self) -> dict[str, Held]:
        """Router, broker and workers by name."""
        queues = {one["pid"]: str(one["queue"]) for one in self._records.workers()}
        found = {}
        for process in psutil.Process(self._product.process.pid).children():
            name = queues.get(process.pid) or ("router" if "router" in " ".join(process.cmdline()) else "broker")
            family = [process, *process.children(recursive=True)]
            nbytes = sum(one.memory_info().rss for one in family)
            found[name] = Held(process.pid, nbytes, sum(one.num_fds() for one in family))
        return dict(sorted(found.items()))

    def media(self) -> list[str]:
        """Files that were stored for clients."""
        return sorted(path.name for path in (self._product.folder / "media").rglob("*") if path.is_file())

    def redis(self) -> tuple[Counter[str], int]:
        """Keys by kind, and bytes in use."""
        keys = [str(key) for key in self._records.client.scan_iter(count=1000)]
        used = self._records.client.info("memory")["used_memory"]
        return Counter(key.split(":")[1] if ":" in key else key for key in keys), int(used)


def run(product: Product, count: int, in_flight: int, seed: int) -> list[str]:
    """Everything, printed as it is found; returns what is wrong, a sentence each."""
    deployment, faults, jobs = Deployment(product), list[str](), list[Job]()
    clients = Clients(product.port, three_stages.prompts(PROMPTS, seed))
    clients.run((Ask(k % PROMPTS) for k in range(4 * in_flight)), in_flight)
    usual_s = statistics.median(clients.seconds[in_flight:])
    print(f"{in_flight} in flight: a job takes {usual_s:.2f} s; others are ended within {LONGEST * usual_s:.2f} s")
    clients.delete(*[job.id for job in deployment.settled(count)])
    clients.ends.clear()
    accepted, (kinds, nbytes) = deployment.accepted(), deployment.redis()

    wanted, start, held = asks(count, seed, LONGEST * usual_s), time.monotonic(), Samples()
    while clients.ends.total() < count:
        clients.run(itertools.islice(wanted, EVERY), in_flight)
        jobs = deployment.settled(count)
        held[clients.ends.total()] = deployment.parts()
        print(f"{clients.ends.total()} jobs after {time.monotonic() - start:.0f} s", flush=True)
    print(f"\n{_ends(clients.ends)}\n\n{_stages(jobs)}\n\n{_memory(held)}\n")
    faults += _growth(held)

    def left(what: str, names: Sequence[str]) -> None:
        print(f"left {what}: {len(names)}")
        faults.extend([f"left {what}: {', '.join(names[:5])}"] if names else [])

    states = Counter(job.state.value for job in jobs)
    if states["failed"] or deployment.accepted() - accepted != count:
        faults.append(f"{deployment.accepted() - accepted} of {count} jobs accepted, {dict(states)}")
    if mixed := [prompt for prompt, files in clients.files.items() if len(files) > 1]:
        faults.append(f"the same prompt and seed made different files: {mixed}")
    left("in shared memory", deployment.in_memory(jobs))
    kept, kept_bytes = deployment.redis()
    clients.delete(*[job.id for job in jobs])
    gone, gone_bytes = deployment.redis()
    left("in Redis beside the records", sorted((kept - kinds).keys() - INDICES))
    left("in Redis when the jobs were forgotten", sorted((gone - kinds).elements()))
    left("of media then", deployment.media())
    print(f"Redis: {nbytes:,} bytes before, {kept_bytes:,} with {kept['job']} records, {gone_bytes:,} without")
    if gone_bytes - nbytes > REDIS_BYTES:
        faults.append(f"Redis holds {gone_bytes - nbytes:,} bytes more than before")
    return faults


def _ends(ends: Mapping[tuple[str, str], int]) -> str:
    """What clients saw, by what they did."""
    seen = sorted({end for _, end in ends})
    rows = [(way, *[str(ends.get((way, end), 0)) for end in seen]) for way in WAYS]
    return table(("the client's", *seen), rows)


def _stages(jobs: Sequence[Job]) -> str:
    """In which state jobs ended, by the stage that they were in."""
    found = Counter((job.state.value, job.stage, job.stages[job.stage].attempt > 0) for job in jobs)
    states = sorted({state for state, *_ in found})
    places = [(stage, begun) for stage in range(3) for begun in (False, True)]
    rows = [(state, *[str(found[state, stage, begun]) for stage, begun in places]) for state in states]
    return table(("ended as", *[f"stage {stage} {'running' if b else 'waiting'}" for stage, b in places]), rows)


def _memory(held: Samples) -> str:
    first, last = min(held), max(held)
    rows = []
    for name, now in held[last].items():
        sizes = [f"{parts[name].nbytes / 1e6:.1f}" for parts in held.values()]
        growth = _growth_bytes(held, name) / 1e6
        rows.append((name, *sizes, f"{growth:+.2f}", f"{held[first][name].files} to {now.files}"))
    return table(("MB resident after", *[f"{done} jobs" for done in held], "per 100", "files open"), rows)


def _growth_bytes(held: Samples, name: str) -> float:
    """Per 100 jobs, from the first sample to the last."""
    first, last = min(held), max(held)
    return (held[last][name].nbytes - held[first][name].nbytes) / max(last - first, 100) * 100


def _growth(held: Samples) -> list[str]:
    faults, then = [], held[min(held)]
    for name, now in held[max(held)].items():
        if now.pid != then[name].pid:
            faults.append(f"{name} was started again")
        if (more := _growth_bytes(held, name)) > GROWTH_BYTES:
            faults.append(f"{name} grew by {more:,.0f} bytes in 100 jobs")
        if now.files - then[name].files > MORE_FILES:
            faults.append(f"{name} has {now.files - then[name].files} more files open")
    return faults


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.cancels", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--in-flight", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of ways, moments and prompts (default: %(default)s)")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="oqb-") as name:
        folder = Path(name)
        config = three_stages.config(folder, TOKENS, CODES)
        with three_stages.served(folder, three_stages.written(folder), config) as product:
            faults = run(product, chosen.jobs, chosen.in_flight, chosen.seed)
    print("\n".join(f"FAULT: {fault}" for fault in faults) or "Nothing is left.")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
