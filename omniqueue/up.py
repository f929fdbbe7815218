"""``omniqueue up``: everything for one machine as child processes, started in order, watched, and stopped together."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from omniqueue import catalog, embedded, errors, local, media, payloads, settings, store, topology
from omniqueue.child import Child, end_all
from omniqueue.pipeline import Pipeline, Stage

Say = Callable[[str], None]

#: Pauses before a child that ended by itself is started again, in seconds.
_BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
#: A worker that ends with this status has a configuration that no restart will mend.
_EXIT_CONFIG = 2
#: A child that ends this often without having been ready in between will not come up.
_MAX_RESTARTS = 20
#: A child that ran this long was well, should nobody have seen it ready.
_WELL_S = 60.0


@dataclass
class Options:
    """What the command line says."""

    #: One stage config, or several with the path separator between them.
    config: str
    port: int = 8000
    host: str = "127.0.0.1"
    model: str | None = None
    served_model_name: str | None = None
    #: Replicas by stage id, one where a stage is not named.
    replicas: dict[int, int] = field(default_factory=dict)
    run_dir: Path | None = None
    redis_url: str | None = None
    ready_timeout_s: float = 1800.0

    def folder(self) -> Path:
        """Sockets, logs and the queue's data of this port; the same for every start, so that leftovers are found."""
        return self.run_dir or Path(tempfile.gettempdir()) / f"omniqueue-{os.getuid()}" / str(self.port)


class Machine:
    """The parts of one or several pipelines on this machine."""

    def __init__(self, options: Options, say: Say) -> None:
        self.options, self.say = options, say
        self.folder = options.folder()
        self.children: list[Child] = []
        self.valkey: embedded.EmbeddedValkey | None = None
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        #: Set while the main thread waits for something else than :meth:`run`: a signal then interrupts it.
        self.interruptible = False
        self._lock: IO[str] | None = None
        self._phases: dict[str, str] = {}
        self.environment: dict[str, str] = {}

    # -- start -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every part. Raises ConfigError for what is wrong with config or machine, before anything is started."""
        paths = [str(topology.find_config(name)) for name in self.options.config.split(os.pathsep)]
        self._claim_folder()
        overrides = self._overrides(os.pathsep.join(paths))
        os.environ.update(overrides)
        config = settings.load()
        self.pipes = catalog.load(config).pipelines
        self._check(config)
        if self.options.redis_url is None:
            self.valkey = embedded.EmbeddedValkey(self.folder)
            self.valkey.start()
            self.say(f"queue    valkey on {self.valkey.socket}")
        self.environment = dict(os.environ)
        local.tell(self.folder, overrides)
        self.records = store.Store.from_settings(config)
        self.payloads = payloads.PayloadStore(config.payload_namespace(), config.shm_dir, config.host)
        for name in self.payloads.sweep(lambda ids: set(), min_age_s=0.0):
            self.say(f"swept    {name}, left behind by an earlier run")
        for stage in self.stages:
            for replica in range(self.options.replicas.get(stage.stage_id, stage.num_replicas)):
                name = f"{stage.queue}.{replica}" if replica else stage.queue
                self._add(name, worker_command(stage.queue), {"OMNIQUEUE_REPLICA": str(replica % stage.num_replicas)})
        self._add("router", router_command(self.options.host, self.options.port))

    @property
    def pipe(self) -> Pipeline:
        """The first pipeline."""
        return self.pipes[0]

    @property
    def stages(self) -> list[Stage]:
        """The stages of all pipelines."""
        return [stage for pipe in self.pipes for stage in pipe.stages]

    def _check(self, config: settings.Settings) -> None:
        """What every part would find by itself, and would be started again for in vain."""
        pipe = self.pipe
        known = [stage.stage_id for stage in pipe.stages]
        if self.options.replicas and len(self.pipes) > 1:
            raise errors.ConfigError("--replicas is for one stage config; with several say num_replicas in them.")
        if self.options.model and len(self.pipes) > 1:
            raise errors.ConfigError("--model is for one stage config; with several say model in them.")
        for stage_id in self.options.replicas:
            if stage_id not in known:
                raise errors.ConfigError(f"--replicas: {pipe.name} has no stage {stage_id}; it has {known}.")
        media.shared(config.media_fs_url)
        if not os.access(config.shm_dir, os.W_OK | os.X_OK):
            raise errors.ConfigError(f"OMNIQUEUE_SHM_DIR: {config.shm_dir} is not a folder that can be written to.")
        check_address(self.options.host, self.options.port)

    def _overrides(self, configs: str) -> dict[str, str]:
        values = {
            "OMNIQUEUE_STAGE_CONFIGS_PATH": configs,
            "OMNIQUEUE_REDIS_URL": self.options.redis_url or f"unix://{self.folder / 'valkey.sock'}?db=0",
            "OMNIQUEUE_MEDIA_FS_URL": os.environ.get("OMNIQUEUE_MEDIA_FS_URL") or f"file://{self.folder / 'media'}",
        }
        if self.options.model:
            values["OMNIQUEUE_MODEL"] = self.options.model
        if self.options.served_model_name:
            values["OMNIQUEUE_SERVED_MODEL_NAME"] = self.options.served_model_name
        return values

    def _claim_folder(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = open(self.folder / "lock", "w")  # noqa: SIM115 - held as long as this process lives
        except OSError as exc:
            raise errors.ConfigError(f"{self.folder} cannot be used ({exc.strerror}); give another --run-dir.") from exc
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise errors.ConfigError(
                f"omniqueue up already runs for port {self.options.port} ({self.folder} is locked); use another --port."
            ) from None
        for leftover in ("valkey.sock", "logs"):
            path = self.folder / leftover
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
        self._forget()
        (self.folder / "logs").mkdir()

    def _forget(self) -> None:
        """Remove the embedded queue's data, and the pictures whose records went with it: nobody else would."""
        if self.options.redis_url is None:
            for name in ("appendonlydir", "media"):
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def _add(self, name: str, command: list[str], more: dict[str, str] | None = None) -> None:
        environment = {**self.environment, **(more or {})}
        child = Child(name, command, self.folder / "logs" / f"{name}.log", environment)
        child.start()
        self.children.append(child)
        self.say(f"started  {name} (pid {child.process.pid if child.process else '?'}), log {child.log}")

    # -- watch -------------------------------------------------------------------------------------------------------

    def wait_ready(self) -> None:
        """Wait until every stage has a live replica and the router answers; tell each loading phase on the way.

        Returns early when asked to stop. Raises NotReady at the time limit or when a part cannot start.
        """
        deadline = time.monotonic() + self.options.ready_timeout_s
        while not self._stopping.is_set():
            self.check()
            workers = self._workers()
            missing = [s.queue for s in self.stages if not any(ready(w, s.queue) for w in workers)]
            if not missing and self._router_listens():
                return
            if time.monotonic() > deadline:
                raise errors.NotReady(f"Not ready after {self.options.ready_timeout_s:.0f} s: {missing or 'router'}.")
            self._stopping.wait(0.2)

    def _workers(self) -> list[dict[str, Any]]:
        try:
            workers = self.records.workers()
        except errors.BrokerUnavailable:
            return []
        alive = {child.process.pid: child for child in self.children if child.process is not None}
        for worker in workers:
            if worker["phase"] == "ready" and worker["pid"] in alive:
                alive[worker["pid"]].well = True
            phase = f"{worker['phase']}: {worker['detail']}" if worker["detail"] else str(worker["phase"])
            if self._phases.get(worker["worker"]) != phase:
                self._phases[worker["worker"]] = phase
                self.say(f"{worker['queue']:<8} {phase} ({time.time() - worker['started_at']:.0f} s)")
        return workers

    def _router_listens(self) -> bool:
        import http.client

        host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self.options.host, self.options.host)
        connection = http.client.HTTPConnection(host, self.options.port, timeout=2.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def check(self) -> None:
        """Start again what has ended by itself. Raises NotReady when a part's configuration is wrong."""
        if self.valkey is not None and not self.valkey.alive() and not self._stopping.is_set():
            self.say("queue    valkey ended; starting it again")
            self.valkey.start()
        for child in self.children:
            status = child.ended()
            if status is None or self._stopping.is_set():
                continue
            if not child.retry_at and self._was_well(child):
                child.restarts = 0
            if status == _EXIT_CONFIG or child.restarts >= _MAX_RESTARTS:
                raise errors.NotReady(f"{child.name} ended with status {status}:\n{child.tail()}")
            self._restart(child, status)

    def _was_well(self, child: Child) -> bool:
        """Whether it was the work that ended it, so that the next start need not wait."""
        self._workers()  # it may have been ready since the last look
        return child.well or time.monotonic() - child.started_at > _WELL_S

    def _restart(self, child: Child, status: int) -> None:
        now = time.monotonic()
        if not child.retry_at:
            pause_s = _BACKOFF_S[min(child.restarts, len(_BACKOFF_S) - 1)]
            child.retry_at = now + pause_s
            self.say(
                f"ended    {child.name} with status {status}; starting it again in {pause_s:.0f} s\n{child.tail(5)}"
            )
        if now >= child.retry_at:
            child.retry_at, child.restarts = 0.0, child.restarts + 1
            child.start()

    def run(self) -> None:
        """Keep every part running until :meth:`request_stop`."""
        while not self._stopping.wait(0.5):
            self.check()
            self._workers()

    # -- stop --------------------------------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """True once asked to stop."""
        return self._stopping.is_set()

    def request_stop(self) -> None:
        """Make :meth:`run` and :meth:`wait_ready` return; a second time, make :meth:`stop` wait for no work."""
        if self.stopping:
            self._hurry.set()
        self._stopping.set()

    def stop(self, grace_s: float = 20.0) -> None:
        """Stop router, workers and queue, in that order, and remove what they shared."""
        self._stopping.set()
        router = [child for child in self.children if child.name == "router"]
        workers = [child for child in self.children if child.name != "router"]
        for group, patience_s in ((router, 5.0), (workers, grace_s)):
            end_all([child.process for child in group if child.process is not None], patience_s, self._hurry)
        if self.valkey is not None:
            self.valkey.stop()
        if self.environment:
            self.payloads.sweep(lambda ids: set(), min_age_s=0.0)
        if self._lock is not None and self.environment:
            self._forget()
        if self._lock is not None:
            self._lock.close()


def ready(worker: dict[str, Any], queue: str) -> bool:
    """True when an announcement is of a live replica of that queue's stage."""
    return bool(worker["queue"] == queue and worker["phase"] == "ready")


def worker_command(queue: str) -> list[str]:
    """The command of a stage's worker."""
    return [sys.executable, "-m", "celery", "-A", "omniqueue", "worker", "-Q", queue, "--loglevel", "WARNING"]


def router_command(host: str, port: int) -> list[str]:
    """The command of the router."""
    return [sys.executable, "-m", "web.server", "--bind", address(host, port)]


def address(host: str, port: int) -> str:
    """HOST:PORT as in a URL: an IPv6 address goes into brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_address(host: str, port: int) -> None:
    """Raise ConfigError when the router could not listen there: a port in use, an address that is not ours."""
    try:
        family, kind, number, _, place = socket.getaddrinfo(
            host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, number) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen(1)
    except OSError as exc:
        raise errors.ConfigError(
            f"The router cannot listen on {address(host, port)}: {exc.strerror}; give another --host or --port."
        ) from exc


@contextlib.contextmanager
def running(options: Options, say: Say) -> Iterator[Machine]:
    """Everything up and ready inside the block; SIGINT, SIGTERM and a lost terminal end it.

    Raises KeyboardInterrupt when told to stop before everything was ready.
    """
    machine = Machine(options, say)

    def on_signal(*_: Any) -> None:
        first = not machine.stopping
        machine.request_stop()
        if first and machine.interruptible:
            raise KeyboardInterrupt

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means to go on
        numbers.append(signal.SIGHUP)
    old = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        machine.start()
        machine.wait_ready()
        if machine.stopping:
            raise KeyboardInterrupt
        yield machine
    finally:
        machine.stop()
        for number, handler in old.items():
            signal.signal(number, handler)
