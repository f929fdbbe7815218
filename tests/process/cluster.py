"""One deployment in a folder of its own: real Valkey, real ``celery worker`` processes, the real router if wanted."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from omniqueue import catalog, celery_app, chain, embedded, errors, payloads, settings, store
from omniqueue.job import Job
from omniqueue.pipeline import Pipeline

#: How long anything may take to start or stop on a busy machine, in seconds.
PATIENCE_S = 30.0

#: The two stages most tests use: 20 ms each, 64 KiB between them, short leases.
DEFAULTS: Mapping[str, Any] = {"pipeline": "chaos", "lease_s": 2, "request_timeout_s": 30, "max_queue": 1000}


def config(*stages: Mapping[str, Any], **top: Any) -> dict[str, Any]:
    """A stage config of fake engines; an argument per stage, its ``engine_args`` and ``max_num_seqs``."""
    entries = []
    for stage_id, stage in enumerate(stages):
        args = {"delay_s": 0.02, **({"payload_bytes": 65536} if stage_id < len(stages) - 1 else {}), **stage}
        slots = args.pop("max_num_seqs", 4)
        sources = {"input_sources": list(range(stage_id))} if stage_id else {}
        entries.append({"stage_id": stage_id, "engine": "fake", "max_num_seqs": slots, "engine_args": args, **sources})
    return {**DEFAULTS, **top, "stages": entries}


def eventually(what: Callable[[], Any], timeout_s: float = PATIENCE_S, every_s: float = 0.02) -> Any:
    """The first true value of ``what``; AssertionError after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(errors.BrokerUnavailable):
            value = what()
            if value:
                return value
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s"
        time.sleep(every_s)


@dataclass(eq=False)
class Process:
    """A child in a session of its own, with its output in a file."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    def alive(self) -> bool:
        return self.popen.poll() is None

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit status, negative for a signal."""
        return self.popen.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL, also to a stopped process."""
        self.popen.kill()
        self.popen.wait(PATIENCE_S)

    def terminate(self, timeout_s: float = PATIENCE_S) -> int:
        """SIGTERM, and the exit status."""
        self.popen.terminate()
        return self.popen.wait(timeout_s)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def usage(self) -> tuple[int, int]:
        """Resident bytes and open file descriptors."""
        process = psutil.Process(self.pid)
        return process.memory_info().rss, process.num_fds()


@dataclass
class Cluster:
    """Everything of one deployment; :func:`running` makes one and sees that nothing of it stays behind."""

    folder: Path
    stages: Mapping[str, Any]
    append_only: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)
    loglevel: str = "INFO"
    processes: list[Process] = field(default_factory=list)
    port: int = 0

    def __post_init__(self) -> None:
        self.config_path = self.folder / "stages.yaml"
        self.config_path.write_text(yaml.safe_dump(dict(self.stages)))
        self.valkey = embedded.EmbeddedValkey(self.folder / "q", append_only=self.append_only)
        ours = {
            "OMNIQUEUE_STAGE_CONFIGS_PATH": str(self.config_path),
            "OMNIQUEUE_MODEL": "fake",
            "OMNIQUEUE_REDIS_URL": self.valkey.url,
            "OMNIQUEUE_MEDIA_FS_URL": f"file://{self.folder / 'media'}",
            **self.environ,
        }
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("OMNIQUEUE_")}
        self.env = {**inherited, **ours}
        self.settings = settings.load(ours)
        self.pipe: Pipeline = catalog.load(self.settings).pipelines[0]
        self.store = store.Store.from_settings(self.settings, 5.0)
        self.listener = store.Store.listener(self.store)
        self.payloads = payloads.PayloadStore(self.settings.payload_namespace(), self.settings.shm_dir)

    # -- processes ---------------------------------------------------------------------------------------------------

    def spawn(self, name: str, command: list[str], cwd: Path | None = None, **environ: str) -> Process:
        """Start a child that dies with this process."""
        log = self.folder / f"{name}-{len(self.processes)}.log"
        with open(log, "wb") as output:
            popen = subprocess.Popen(
                command,
                env={**self.env, **environ},
                cwd=cwd or self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=embedded.die_with_parent,
            )
        process = Process(name, popen, log)
        self.processes.append(process)
        return process

    def worker(self, stage_id: int, *options: str, ready: bool = True, **environ: str) -> Process:
        """Another replica of a stage, by the documented command."""
        queue = self.pipe.stage(stage_id).queue
        command = [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "omniqueue",
            "worker",
            "-Q",
            queue,
            "--loglevel",
            self.loglevel,
        ]
        process = self.spawn(queue, [*command, *options], None, **environ)
        if ready:
            self.wait_ready(process)
        return process

    def workers(self, *counts: int) -> list[list[Process]]:
        """Exactly so many live replicas of stage 0, 1, ...; returned by stage once all of them are ready."""
        replicas = []
        for stage_id, count in enumerate(counts):
            queue = self.pipe.stage(stage_id).queue
            alive = [process for process in self.processes if process.name == queue and process.alive()]
            for process in alive:
                process.signal(signal.SIGCONT)  # a test that failed may have left it stopped
            for process in alive[count:]:
                assert process.terminate() == 0, process.text()[-2000:]
            replicas.append(alive[:count] + [self.worker(stage_id, ready=False) for _ in range(count - len(alive))])
        for process in (process for group in replicas for process in group):
            self.wait_ready(process)
        return replicas

    def wait_ready(self, process: Process, timeout_s: float = PATIENCE_S) -> None:
        """Until its heartbeat says ready."""

        def ready() -> bool:
            assert process.alive(), f"{process.name} ended with {process.popen.returncode}:\n{process.text()[-2000:]}"
            return any(facts["pid"] == process.pid and facts["phase"] == "ready" for facts in self.store.workers())

        eventually(ready, timeout_s)

    def facts(self, process: Process) -> dict[str, Any]:
        """What a worker announces."""
        return next((facts for facts in self.store.workers() if facts["pid"] == process.pid), {})

    def router(self) -> Process:
        """The real gunicorn router, on the same port each time."""
        self.port = self.port or free_port()
        process = self.spawn("router", [sys.executable, "-m", "web.server", "--bind", f"127.0.0.1:{self.port}"])
        eventually(lambda: self._answers(process))
        return process

    def _answers(self, process: Process) -> bool:
        assert process.alive(), f"the router ended with {process.popen.returncode}:\n{process.text()[-2000:]}"
        try:
            return self.http("GET", "/health")[0] == 200
        except OSError:
            return False

    def http(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float = 60.0, **headers: str
    ) -> tuple[int, bytes]:
        """One request on a connection of its own: status and body."""
        status, _, text = self.exchange(method, path, body, timeout_s, **headers)
        return status, text

    def exchange(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float = 60.0, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """The same with the answer's headers; underscores in the names of ``headers`` become hyphens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, {"Content-Type": "application/json", **named})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    # -- jobs --------------------------------------------------------------------------------------------------------

    def submit(self, prompt: str, *, job_id: str = "", publish: bool = True, **more: Any) -> str:
        """Accept a small picture's job as the router does. Raises what Store.submit raises."""
        options = {key: more.pop(key) for key in ("timeout_s", "priority", "idempotency_key") if key in more}
        job = {"kind": "image", "prompt": prompt, "n": 1, "seed": 1, "width": 16, "height": 16, "output_format": "png"}
        return self.accept({**job, **more}, job_id=job_id, publish=publish, **options)

    def accept(
        self,
        job: Mapping[str, Any],
        *,
        job_id: str = "",
        publish: bool = True,
        inputs: Mapping[str, payloads.Tensor] | None = None,
        **options: Any,
    ) -> str:
        """The same for any job; ``inputs`` are the media that came with it."""
        job_id, message, given = job_id or store.new_id(), None, None
        if publish:
            message = chain.message(self.pipe, self.store, store.Owed(job_id, 0), options.get("priority", 0))
        if inputs:
            given = self.payloads.put(self.payloads.input_name(job_id), [payloads.Item({}, inputs)])
        options |= {"reply_to": job_id, "message": message, "input_reference": given}
        return self.store.submit(self.pipe, job, job_id=job_id, **options).job_id

    def job(self, job_id: str) -> Job:
        """The record, which must be there."""
        record = self.store.job(job_id)
        assert record is not None
        return record

    def ended(self, job_id: str, timeout_s: float = PATIENCE_S) -> Job:
        """The record once it is terminal."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(errors.BrokerUnavailable):
                record = self.store.job(job_id)
                if record is not None and record.state.terminal:
                    self.late_replies(job_id)
                    return record
                self.listener.replies(job_id, 0.5)
        raise AssertionError(f"{job_id} did not end within {timeout_s:.0f} s: {self.store.job(job_id)}")

    def late_replies(self, *job_ids: str) -> list[int]:
        """How many replies still wait for each of these, taken away; a blocking read takes 0.1 s to give up."""
        keys = [f"{self.settings.namespace}:reply:{job_id}" for job_id in job_ids]
        with self.store.client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.llen(key)
            counts = [int(count) for count in pipe.execute()]
        left = [key for key, count in zip(keys, counts, strict=True) if count]
        if left:
            self.store.client.delete(*left)
        return counts

    def all_ended(self, job_ids: Iterable[str], timeout_s: float = PATIENCE_S) -> list[Job]:
        """Their records, once all are terminal."""
        return [self.ended(job_id, timeout_s) for job_id in job_ids]

    def when_stage(self, job_id: str, stage_id: int, state: str, timeout_s: float = PATIENCE_S) -> Job:
        """The record once one of its stages is in ``state``."""

        def record() -> Job | None:
            found = self.store.job(job_id)
            return found if found and found.stages[stage_id].state == state else None

        found: Job = eventually(record, timeout_s, 0.005)
        return found

    # -- what must not stay behind -----------------------------------------------------------------------------------

    def keys(self) -> dict[str, str]:
        """Every Redis key and its type."""
        client = self.store.client
        names = sorted(str(name) for name in client.scan_iter(count=1000))
        return {name: str(client.type(name)) for name in names}

    def largest_value(self) -> int:
        """Bytes that the largest Redis value takes in memory."""
        client = self.store.client
        return max((int(client.memory_usage(name, samples=0) or 0) for name in client.scan_iter(count=1000)), default=0)

    def leftovers(self) -> list[str]:
        """What a finished job must not leave: payloads, queued messages, leases, reply lists, half-written media."""
        kept = ("oq:job:", "oq:jobs:", "oq:count:", "oq:ended", "oq:worker", "oq:pipeline:", "oq:lead:", "oq:idem:")
        expected = (*kept, "oq:meter:", "oq:traffic", "oq:control:", "_kombu.binding")
        keys = [name for name in self.keys() if not name.startswith(expected)]
        media = self.folder / "media"
        torn = [path.name for path in media.glob("*.part")] if media.exists() else []
        prefix = f"{payloads.PREFIX}{self.payloads.namespace}"
        files = [name for name in os.listdir(self.payloads.directory) if name.startswith(prefix)]
        return files + keys + torn

    def assert_nothing_left(self, timeout_s: float = 10.0) -> None:
        """Within the sweep interval only records are left."""
        try:
            eventually(lambda: not self.leftovers(), timeout_s, 0.1)
        except AssertionError:
            raise AssertionError(f"left behind: {self.leftovers()}") from None

    def stop(self) -> None:
        """End whatever still runs, and check that nothing of this deployment is left on the machine."""
        for process in self.processes:
            if process.alive():
                process.signal(signal.SIGCONT)
                process.signal(signal.SIGTERM)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
            if process.alive():
                process.kill()
        self.valkey.stop()
        self.payloads.sweep(lambda ids: set(), min_age_s=0.0)
        assert not self.valkey.socket.exists()
        assert self._strangers() == []

    def _strangers(self) -> list[int]:
        """Processes that carry this deployment's address in their environment."""
        mark = f"OMNIQUEUE_REDIS_URL={self.valkey.url}".encode()
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if pid != os.getpid() and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return found


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(
    stages: Mapping[str, Any], *, append_only: bool = True, environ: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """A deployment with its Valkey, and this process publishing to it; workers are started by the block."""
    folder = Path(tempfile.mkdtemp(prefix="oqt-"))  # short: a unix socket lies in it
    cluster = Cluster(folder, stages, append_only, environ or {})
    try:
        cluster.valkey.start()
        publish_to(cluster.settings)
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def publish_to(config: settings.Settings) -> None:
    """Point this process's Celery app at another broker: it keeps its connections to the first one it met."""
    celery_app.publish_only(config)
    for kept in ("amqp", "control"):
        celery_app.app.__dict__.pop(kept, None)
    celery_app.app._pool = None
