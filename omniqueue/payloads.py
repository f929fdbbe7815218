"""Bulk data between stages: ``oq_*`` files in shared memory, a small JSON header and then raw tensors. No pickle.

A payload is written under a temporary name and renamed when it is complete, so a reader sees all of it or nothing.
Readers map it and do not consume it; it lives until its job is over. Plain files with ``mmap`` rather than
``multiprocessing.shared_memory``: on Python before 3.13 that module destroys a segment when its creator, or a process
that merely attached to it, exits (seen on 3.11).

Layout: ``b"OQP1"``, header length (u32, little endian), header (JSON, UTF-8), tensors, each aligned to 64 bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from omniqueue import errors, segments

PREFIX = "oq_"
_MAGIC = b"OQP1"
_ALIGN = 64
#: Left free in the file system, so that one payload cannot fill it to the last page.
_RESERVE_BYTES = 1 << 20

#: Payloads from this size on are written into memory that was used before; a smaller one costs less in a new file.
_RECYCLED_BYTES = 256 << 10

#: Bytes per element, by the names that numpy and torch share.
ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
}

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")


@dataclass(frozen=True)
class Tensor:
    """A dense row-major array without a framework: dtype name, shape, little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    buffer: Buffer

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise errors.PayloadError(f"dtype {self.dtype!r} cannot be stored; one of {', '.join(ITEM_BYTES)} can.")
        wanted = ITEM_BYTES[self.dtype]
        for side in self.shape:
            wanted *= side
        if min(self.shape, default=0) < 0 or memoryview(self.buffer).nbytes != wanted:
            raise errors.PayloadError(
                f"A {self.dtype} tensor of shape {self.shape} has {wanted} bytes, not {memoryview(self.buffer).nbytes}."
            )

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return memoryview(self.buffer).nbytes


@dataclass(frozen=True)
class Item:
    """One item of a payload: JSON facts and named tensors."""

    data: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """Where a payload is: the only thing about it that travels through Redis and Celery."""

    name: str
    nbytes: int
    host: str
    store: str = "shm"

    def to_json(self) -> dict[str, Any]:
        """The form kept in the job record."""
        return {"store": self.store, "host": self.host, "name": self.name, "nbytes": self.nbytes}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Reference:
        """The inverse of :meth:`to_json`."""
        return cls(
            name=str(value["name"]), nbytes=int(value["nbytes"]), host=str(value["host"]), store=str(value["store"])
        )


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _pack(items: Sequence[Item]) -> tuple[bytes, list[tuple[int, Buffer]], int]:
    """Header bytes, (offset, buffer) of every tensor, and the size of the whole."""
    described: list[dict[str, Any]] = []
    buffers: list[tuple[int, Buffer]] = []
    offset = 0  # relative to the first byte after the header
    for item in items:
        entry: dict[str, Any] = {"data": dict(item.data), "tensors": {}}
        for name, tensor in item.tensors.items():
            offset = _aligned(offset)
            entry["tensors"][name] = [tensor.dtype, list(tensor.shape), offset]
            buffers.append((offset, tensor.buffer))
            offset += tensor.nbytes
        described.append(entry)
    text = json.dumps({"items": described}, separators=(",", ":"), allow_nan=False).encode()
    head = _MAGIC + struct.pack("<I", len(text)) + text
    start = _aligned(len(head))
    return head, [(start + at, buffer) for at, buffer in buffers], start + offset


class MappedPayload:
    """A payload opened for reading; its tensors are views into the mapping and live as long as they are used."""

    def __init__(self, mapping: mmap.mmap | bytes, name: str) -> None:
        """Raises PayloadError for whatever is not a whole payload: nothing outside ``mapping`` is ever read."""
        view = memoryview(mapping)
        try:
            if bytes(view[:4]) != _MAGIC:
                raise errors.PayloadError(f"{name} is not a payload of this version.")
            (length,) = struct.unpack("<I", view[4:8])
            if 8 + length > len(view):
                raise ValueError(f"its header of {length} bytes does not fit")
            header = json.loads(bytes(view[8 : 8 + length]))
            body = view[_aligned(8 + length) :]
            self.items = tuple(_item(entry, body) for entry in _typed(_typed(header, dict)["items"], list))
        except (ValueError, KeyError, TypeError, struct.error, RecursionError) as exc:
            raise errors.PayloadError(f"{name} is damaged: {exc}") from exc


def _typed(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} where {kind.__name__} belongs")
    return value


def _item(entry: Any, body: memoryview) -> Item:
    tensors = {}
    for name, described in _typed(_typed(entry, dict)["tensors"], dict).items():
        dtype, shape, offset = _typed(described, list)
        nbytes = ITEM_BYTES[_typed(dtype, str)]
        for side in _typed(shape, list):
            nbytes *= _natural(side)
        if _natural(offset) + nbytes > len(body):
            raise ValueError(f"tensor {name!r} ends behind the file")
        tensors[name] = Tensor(dtype, tuple(shape), body[offset : offset + nbytes])
    return Item(_typed(entry["data"], dict), tensors)


def _natural(value: Any) -> int:
    if _typed(value, int) < 0:
        raise ValueError(f"{value} where a size belongs")
    return int(value)


class PayloadStore:
    """The payloads of one deployment on one host, in ``directory`` (bytes free are checked before each write)."""

    def __init__(self, namespace: str, directory: str = "/dev/shm", host: str | None = None) -> None:
        """``namespace`` is a short hexadecimal name that keeps two deployments on one host apart."""
        self.namespace = namespace
        self.directory = Path(directory)
        self.host = host or socket.gethostname()
        self.written_bytes = 0
        self._lock = threading.Lock()
        self._segments = segments.Segments(self.directory, f"{PREFIX}{namespace}-")

    def name(self, job_id: str, stage_id: int, attempt: int) -> str:
        """The file name of one attempt's output: job, stage and attempt each keep to a key of their own."""
        return f"{PREFIX}{self.namespace}_{job_id}_{stage_id}_{attempt}"

    def input_name(self, job_id: str) -> str:
        """The file name of a request's input media."""
        return f"{PREFIX}{self.namespace}_{job_id}_in_0"

    def put(self, name: str, items: Sequence[Item]) -> Reference:
        """Write a payload completely or not at all. Raises NoRoom when it does not fit, PayloadError otherwise."""
        head, buffers, total = _pack(items)
        try:
            if total >= _RECYCLED_BYTES:
                self._segments.write(self.directory / name, [(0, head), *buffers], total, self._check_room)
            else:
                self._check_room(total)
                self._write(name, head, buffers, total)
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise errors.NoRoom(self._no_room(total, self.free_bytes())) from exc
            raise errors.PayloadError(f"Could not write {name} to {self.directory}: {exc.strerror}.") from exc
        with self._lock:
            self.written_bytes += total
        return Reference(name=name, nbytes=total, host=self.host)

    def _write(self, name: str, head: bytes, buffers: Sequence[tuple[int, Buffer]], total: int) -> None:
        temporary = self.directory / f"{name}.part{os.getpid()}-{threading.get_ident()}"
        try:
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                # Claims the pages now: a full tmpfs then says ENOSPC here instead of SIGBUS at a later write.
                os.posix_fallocate(descriptor, 0, total)
                os.pwrite(descriptor, head, 0)
                for offset, buffer in buffers:
                    _pwrite_all(descriptor, buffer, offset)
            finally:
                os.close(descriptor)
            os.rename(temporary, self.directory / name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _check_room(self, total: int) -> None:
        free = self.free_bytes()
        if total + _RESERVE_BYTES > free:
            self._segments.trim(0.0)
            free = self.free_bytes()
        if total + _RESERVE_BYTES > free:
            raise errors.NoRoom(self._no_room(total, free))

    def trim(self, idle_s: float = segments.IDLE_S) -> None:
        """Give back the memory that this process keeps for its next payloads and has not used for so long."""
        self._segments.trim(idle_s)

    def close(self) -> None:
        """Keep nothing for later; payloads stay until they are released. For a process that writes no more."""
        self._segments.close()

    def _no_room(self, wanted: int, free: int) -> str:
        return (
            f"{self.directory} has {free:,} bytes free and the payload needs {wanted:,}; "
            "raise its size (docker: shm_size) or run fewer requests at once."
        )

    @contextlib.contextmanager
    def open(self, reference: Reference) -> Iterator[MappedPayload]:
        """Map a payload for reading. Raises PayloadError when it is gone, damaged or on another host."""
        if reference.store != "shm" or reference.host != self.host:
            raise errors.PayloadError(
                f"Payload {reference.name} lies in {reference.store} on host {reference.host}; this is {self.host}."
            )
        if not reference.name.startswith(PREFIX) or "/" in reference.name:
            raise errors.PayloadError(f"{reference.name!r} is not the name of a payload.")
        try:
            with open(self.directory / reference.name, "rb") as file:
                # Held until the last view of the mapping is gone: till then its writer will not write it again.
                fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
                if (nbytes := os.fstat(file.fileno()).st_size) < reference.nbytes:
                    raise errors.PayloadError(
                        f"Payload {reference.name} has {nbytes:,} bytes instead of {reference.nbytes:,}."
                    )
                # Copy on write: torch takes it without a copy, and what an engine writes stays its own.
                mapping = mmap.mmap(file.fileno(), reference.nbytes, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as exc:
            raise errors.PayloadError(f"Payload {reference.name} cannot be opened: {exc}.") from exc
        try:
            yield MappedPayload(mapping, reference.name)
        finally:
            # Views handed to an engine may outlive the block: then the mapping goes with the last of them.
            with contextlib.suppress(BufferError):
                mapping.close()

    def release(self, names: Iterable[str]) -> None:
        """Remove payloads of this host; those already gone are fine. A reader that holds one mapped keeps its view."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.directory / name)

    def names(self) -> list[str]:
        """All files of this deployment on this host, unfinished ones included."""
        mine = f"{PREFIX}{self.namespace}_"
        with os.scandir(self.directory) as entries:
            return [entry.name for entry in entries if entry.name.startswith(mine)]

    def older(self, min_age_s: float) -> dict[str, str]:
        """Files of this deployment that nobody has written to for ``min_age_s``, and the job of each."""
        now = time.time()
        old: dict[str, str] = {}
        for name in self.names():
            with contextlib.suppress(FileNotFoundError):
                if now - os.stat(self.directory / name).st_ctime >= min_age_s:
                    old[name] = job_of(name)
        return old

    def sweep(self, is_live: Callable[[set[str]], set[str]], min_age_s: float = 2.0) -> list[str]:
        """Remove files whose job is over or unknown, and return their names.

        ``is_live`` gets job ids and returns those still running. ``min_age_s`` spares a file whose job record may not
        be visible yet.
        """
        old = self.older(min_age_s)
        live = is_live(set(old.values())) if old else set()
        gone = [name for name, job_id in old.items() if job_id not in live]
        self.release(gone)
        self._segments.sweep()
        return gone

    def resident_bytes(self) -> int:
        """Bytes that this deployment's payloads hold on this host, and what is kept for the next ones."""
        sizes = {}
        for path in (*(self.directory / name for name in self.names()), *self._segments.paths()):
            with contextlib.suppress(FileNotFoundError):
                facts = os.stat(path)
                sizes[facts.st_ino] = facts.st_size
        return sum(sizes.values())

    def free_bytes(self) -> int:
        """Bytes free in the payload directory."""
        facts = os.statvfs(self.directory)
        return facts.f_bavail * facts.f_frsize


def job_of(name: str) -> str:
    """The job id inside a payload's file name."""
    parts = name.split("_")
    return parts[2] if len(parts) > 2 else ""


def _pwrite_all(descriptor: int, buffer: Buffer, offset: int) -> None:
    if not memoryview(buffer).nbytes:  # which cannot be cast when it has a side of zero
        return
    view = memoryview(buffer).cast("B")
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
