"""``omniqueue doctor``: everything that has to hold for a deployment, each with what to do when it does not."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from omniqueue import catalog, doctor_host, doctor_redis, doctor_workers, errors, settings, store
from omniqueue.finding import Finding, error, ok, warning
from omniqueue.pipeline import Pipeline


def examine(bind: str = "127.0.0.1") -> Iterator[Finding]:
    """Look at what the environment describes, and at what runs there; ``bind`` is the address of the router."""
    try:
        config = settings.load()
    except errors.ConfigError as exc:
        yield error("settings", exc.message, "Correct it; nothing else was looked at.")
        return
    pipelines: tuple[Pipeline, ...] = ()
    try:
        pipelines = catalog.load(config).pipelines
    except errors.ConfigError as exc:
        yield error("config", exc.message, "omniqueue validate FILE shows the plan once the file is right.")
    for pipe in pipelines:
        yield ok("config", f"{pipe.path} is valid: {pipe.name}, {len(pipe.stages)} stages.")
    yield from _access(config, bind)
    yield from doctor_redis.examine(config)
    yield from _broker(config)
    yield from doctor_host.shared_memory(config)
    yield from doctor_host.media_folder(config)
    yield from doctor_host.versions(pipelines)
    yield from doctor_host.gpus(pipelines)
    yield from _records(config, pipelines)


def _access(config: settings.Settings, bind: str) -> Iterator[Finding]:
    keyed = bool(config.api_keys)
    if config.api_keys_file is not None:
        try:
            keyed = bool(Path(config.api_keys_file).read_text(encoding="utf-8").strip()) or keyed
        except (OSError, UnicodeDecodeError) as exc:
            yield error("access", f"OMNIQUEUE_API_KEYS_FILE cannot be read: {exc}.", "Give the router a readable file.")
            return
    if keyed or settings.is_loopback(bind):
        yield ok("access", "The router asks for an API key." if keyed else "The router listens on this machine only.")
    else:
        yield warning(
            "access",
            f"The router listens on {bind} and asks for no API key, so whoever reaches it can use the engines.",
            "Set OMNIQUEUE_API_KEYS or OMNIQUEUE_API_KEYS_FILE.",
        )


def _broker(config: settings.Settings) -> Iterator[Finding]:
    """Celery's settings as they are in force; another broker than Redis is asked whether it is there."""
    from omniqueue import celery_app  # reads the environment when it is imported

    conf = celery_app.app.conf
    transport = conf.broker_transport_options
    wanted = {
        "task_serializer": "json",
        "accept_content": ["json"],
        "worker_pool": "threads",
        "task_acks_late": True,
        "worker_prefetch_multiplier": 1,
    }
    wrong = [f"{name} is {conf[name]!r}, not {value!r}" for name, value in wanted.items() if conf[name] != value]
    if transport.get("ack_emulation", True):
        wrong.append("ack_emulation is on")
    if wrong:
        yield error("celery", f"Celery's settings were changed: {'; '.join(wrong)}.", "Leave them as they ship.")
    else:
        yield ok(
            "celery",
            "threads pool, late acknowledgement, prefetch 1, JSON only, no emulated acknowledgements, "
            f"reads time out after {transport.get('socket_timeout')} s.",
        )
    if config.broker_url is not None:
        try:
            with celery_app.app.connection_for_read(config.broker_url) as connection:
                connection.ensure_connection(max_retries=1, timeout=config.redis_timeout_s)
        except Exception as exc:  # noqa: BLE001 - the transport's own errors, whichever transport it is
            yield error("broker", f"The broker does not answer: {exc}.", "Start it, or correct OMNIQUEUE_BROKER_URL.")
        else:
            yield ok("broker", "The broker of OMNIQUEUE_BROKER_URL answers.")


def _records(config: settings.Settings, pipelines: tuple[Pipeline, ...]) -> Iterator[Finding]:
    """What only the records can tell; a Redis that is away was told of before."""
    records = store.Store.from_settings(config)
    try:
        workers = records.workers()
        yield from doctor_host.leftovers(config, records)
        yield from doctor_workers.stages(pipelines, workers)
        shared = doctor_host.payload_store(config)
        if shared.directory.is_dir():
            yield from doctor_workers.memory(pipelines, workers, shared)
        now = records.overview(pipelines[0]).now if pipelines else time.time()
        yield from doctor_workers.clocks(workers, now)
        for pipe in pipelines:
            served = records.declared(pipe)
            if served is None:
                yield warning("router", f"No router serves {pipe.name}.", "Start one: omniqueue --omni-router.")
            elif served != pipe.fingerprint:
                yield error(
                    "router",
                    f"The router serves another topology of {pipe.name} ({served}, not {pipe.fingerprint}).",
                    "Start router and workers with the same stage config.",
                )
            else:
                yield ok("router", f"A router serves {pipe.name}.")
    except errors.BrokerUnavailable:
        return


def as_text(findings: Iterable[Finding]) -> str:
    """A line for each, and what they add up to."""
    listed = list(findings)
    count = {level: sum(finding.level == level for finding in listed) for level in ("error", "warning")}
    said = [f"{n} {level}{'s' * (n != 1)}" for level, n in count.items() if n]
    return "\n".join([*map(str, listed), "", f"{' and '.join(said) or 'All is well'}."])
