"""What ``celery -A omniqueue worker -Q stage0`` becomes: one stage's engine, its heartbeat, its shutdown."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from celery import bootsteps, signals

from omniqueue import catalog, engines, errors, garbage, media, payloads, placement, settings, store, tracing
from omniqueue.pipeline import Pipeline, Stage
from omniqueue.reaper import Reaper
from workers import device_pool, pulse
from workers.host import StageHost, worker_name

log = logging.getLogger(__name__)

#: Docker gives a container 64 MiB of /dev/shm unless told otherwise, which a few pictures' hidden states fill.
_LITTLE_ROOM_BYTES = 256 << 20

_host: StageHost | None = None
_chosen: tuple[Pipeline, Stage] | None = None
_terms = 0


def host() -> StageHost:
    """The engine host of this process. Raises EngineDead outside a stage worker."""
    if _host is None:
        raise errors.EngineDead("This process has no engine; start it with celery -A omniqueue worker -Q stage0.")
    return _host


def configure(app: Any, conf: Any, options: dict[str, Any]) -> None:
    """Choose the stage from ``-Q``; its concurrency becomes the pool's. Ends the process (status 2) with what to do."""
    global _chosen
    try:
        config = settings.load()
        known = catalog.shared(config)
        _chosen = own_devices(config, *choose(known, options.get("queues")))
        if config.device_pool:
            width = len((_chosen[1].devices or "0").split(","))
            mine = device_pool.take(config.device_pool, width, _chosen[1].queue, Path(config.shm_dir))
            os.environ["CUDA_VISIBLE_DEVICES"] = mine
        tracing.configure(f"omniqueue-{_chosen[1].queue}", config.traces)
    except errors.OmniqueueError as exc:
        _refuse(exc.message)
    _, stage = _chosen
    conf.worker_concurrency = stage.max_num_seqs
    if options.get("concurrency") not in (None, stage.max_num_seqs):
        log.warning("action=concurrency_differs given=%s stage=%s", options["concurrency"], stage.max_num_seqs)
    os.environ.update(stage.env)
    app.steps["worker"].add(EngineStep)


def choose(known: catalog.Catalog, queues: Any) -> tuple[Pipeline, Stage]:
    """The stage of ``-Q``. Raises ConfigError that says which queues there are."""
    there_is = ", ".join(known.queues())
    names = queues.split(",") if isinstance(queues, str) else list(queues or ())
    if not names:
        raise errors.ConfigError(f"Say which stage to run: -Q QUEUE, where QUEUE is one of {there_is}.")
    if len(names) > 1:
        raise errors.ConfigError(f"One worker runs one stage: give one queue to -Q, not {','.join(names)}.")
    found = known.for_queue(names[0])
    if found is None:
        raise errors.ConfigError(f"No stage has the queue {names[0]!r}; use -Q with one of {there_is}.")
    return found


def own_devices(config: settings.Settings, pipe: Pipeline, stage: Stage) -> tuple[Pipeline, Stage]:
    """The stage with this replica's share of its devices. Raises ConfigError for a replica that it does not have."""
    if stage.num_replicas <= 1:
        return pipe, stage
    shares = placement.replicas(stage, pipe.deploy)
    if config.replica >= len(shares):
        raise errors.ConfigError(
            f"OMNIQUEUE_REPLICA={config.replica}, but {stage.queue} has replicas 0 to {len(shares) - 1}.",
            param="OMNIQUEUE_REPLICA",
        )
    devices = shares[config.replica]
    deploy = {**stage.deploy, "devices": devices, "num_replicas": 1}
    return pipe, dataclasses.replace(stage, devices=devices, deploy=deploy, num_replicas=1)


def device(pipe: Pipeline, stage: Stage) -> str:
    """Where a worker of the stage runs, in a word: cpu, gpu1, gpu0+1."""
    if pipe.platform == "cpu" or stage.engine == "fake":
        return "cpu"
    return "gpu" + (os.environ.get("CUDA_VISIBLE_DEVICES") or stage.devices or "s").replace(",", "+")


def _refuse(message: str, status: int = 2) -> NoReturn:
    sys.stderr.write(f"omniqueue: {message}\n")
    raise SystemExit(status)


def _cannot_serve(host: StageHost, beats: pulse.Pulse, why: str, status: int = 2) -> NoReturn:
    """Leave, after the engine is closed; the announcement says why for as long as it lasts."""
    beats.refused(why)
    host.close()
    _refuse(why, status)


class EngineStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Loads the engine before the worker consumes; on the way down drains it after consuming has ended."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self._pulse: pulse.Pulse | None = None
        self._reaper: Reaper | None = None
        self._loading = False
        self._parent = parent
        signals.worker_shutting_down.connect(self._on_signal)
        signals.worker_ready.connect(self._on_consuming)
        # Mingle waits a second for other workers' clocks, gossip follows their events: nothing here needs either.
        parent.options.update(without_mingle=True, without_gossip=True)
        if parent.hostname.startswith("celery@"):  # two workers of one host must not share a node name
            pipe, stage = _selected()
            parent.hostname = f"{stage.queue}.{device(pipe, stage)}-{os.getpid()}@{socket.gethostname()}"

    def start(self, parent: Any) -> None:
        """Announce, load, check, serve."""
        global _host
        pipe, stage = _selected()
        config = settings.load()
        records = store.Store.from_settings(config, timeout_s=5.0)
        known = catalog.shared(config)
        shared = payloads.PayloadStore(config.payload_namespace(), config.shm_dir, config.host)
        try:
            if not shared.directory.is_dir():
                raise errors.ConfigError(f"OMNIQUEUE_SHM_DIR={config.shm_dir} is not a folder; payloads need one.")
            _check_room(shared)
            check_router(pipe, records)
            place = media.shared(config.media_fs_url)
            engine = engines.create(stage)
        except errors.OmniqueueError as exc:
            _refuse(exc.message)
        _host = StageHost(pipe, stage, engine, records, shared, place, worker_name(stage, shared.host))
        self._pulse = pulse.Pulse(_host, config.pulse_file)
        self._pulse.start()
        self._load(_host, config)
        self._reaper = Reaper(store.Store.from_settings(config, timeout_s=5.0), known, shared, place)
        self._reaper.start()

    def _load(self, host: StageHost, config: settings.Settings) -> None:
        if self._pulse is None:
            raise RuntimeError("the pulse starts first")
        watchdog = threading.Timer(host.pipe.init_timeout_s, self._pulse.load_took_too_long)
        watchdog.daemon = True
        watchdog.start()
        self._loading = True
        try:
            model = config.model or host.pipe.model or ""
            loaded = host.engine.start(host.pipe, host.stage, model, self._pulse.report)
            check_topology(host.pipe, host.stage, loaded.topology if loaded else None)
            garbage.settle()
        except errors.OmniqueueError as exc:
            _cannot_serve(host, self._pulse, exc.message)
        except Exception as exc:  # a user's engine may raise anything; another start may go better
            log.exception("action=engine_start_failed")
            why = f"The engine could not start: {type(exc).__name__}: {exc}"
            _cannot_serve(host, self._pulse, why, pulse.EXIT_ENGINE)
        except SystemExit:
            self._pulse.stop()
            host.close()
            raise
        finally:
            self._loading = False
            watchdog.cancel()

    def _on_consuming(self, **_: Any) -> None:
        """Celery consumes the queue: only now is this a live replica."""
        if self._pulse is not None:
            self._pulse.ready()

    def _on_signal(self, **_: Any) -> None:
        """SIGTERM: while loading, leave at once; otherwise the second one hands back what runs."""
        global _terms
        _terms += 1
        if self._loading:
            raise SystemExit(0)
        # Celery's loop looks at its stop flag up to a second late when nothing happens; only another thread wakes it.
        if hub := self._parent.hub:
            threading.Thread(target=hub.call_soon, args=(time.monotonic,), name="wake", daemon=True).start()

    def stop(self, parent: Any) -> None:
        """Drain, then close the engine."""
        if self._reaper is not None:
            self._reaper.stop()
        if _host is not None and self._pulse is not None:
            self._pulse.draining()
            _host.drain(settings.load().drain_grace_s, lambda: _terms > 1)
            self._pulse.stop()
            _host.close()
            _host.payloads.close()
        tracing.shutdown()

    terminate = stop


def _check_room(shared: payloads.PayloadStore) -> None:
    free = shared.free_bytes()
    if free < _LITTLE_ROOM_BYTES:
        log.warning(
            "action=little_room folder=%s free_mib=%d: payloads may not fit; raise its size (docker: shm_size)",
            shared.directory,
            free >> 20,
        )


def check_router(pipe: Pipeline, records: store.Store) -> None:
    """Raise ConfigError when a live router serves another topology: its jobs would be refused one by one."""
    try:
        served = records.declared(pipe)
    except errors.BrokerUnavailable:  # nothing to compare with; each claim compares again
        return
    if served is not None and served != pipe.fingerprint:
        raise errors.ConfigError(
            f"{pipe.path}: the router serves another topology of {pipe.name} ({served}) than this worker "
            f"({pipe.fingerprint}); start both with the same stage config."
        )


def check_topology(pipe: Pipeline, stage: Stage, resolved: Any) -> None:
    """Raise ConfigError when the engine resolved another topology than the config that the router reads."""
    if resolved is None:
        return
    ours, theirs = list(pipe.topology), list(resolved)
    if ours != theirs:
        differing = [
            f"{mine} here, {other} in the engine" for mine, other in zip(ours, theirs, strict=False) if mine != other
        ]
        why = "; ".join(differing) or f"{len(ours)} stages here, {len(theirs)} in the engine"
        raise errors.ConfigError(
            f"{pipe.path}: the topology is not what stage {stage.stage_id}'s engine resolved: {why}."
        )


def _selected() -> tuple[Pipeline, Stage]:
    if _chosen is None:
        raise errors.ConfigError("No stage was chosen; start the worker with -Q.")
    return _chosen
