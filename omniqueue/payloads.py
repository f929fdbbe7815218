"""Bulk data between stages: ``oq_*`` files in shared memory, laid out as in layout.py.

A payload is written under a temporary name and renamed when it is complete, so a reader sees all of it or nothing.
Readers map it and do not consume it; it lives until its job is over. Plain files with ``mmap`` rather than
``multiprocessing.shared_memory``: on Python before 3.13 that module destroys a segment when its creator, or a process
that merely attached to it, exits (seen on 3.11).
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omniqueue import errors, segments
from omniqueue.layout import ITEM_BYTES as ITEM_BYTES
from omniqueue.layout import Buffer as Buffer
from omniqueue.layout import Item as Item
from omniqueue.layout import MappedPayload as MappedPayload
from omniqueue.layout import Tensor as Tensor
from omniqueue.layout import joined, pack

PREFIX = "oq_"
#: Left free in the file system, so that one payload cannot fill it to the last page.
_RESERVE_BYTES = 1 << 20

#: Payloads from this size on are written into memory that was used before; a smaller one costs less in a new file.
_RECYCLED_BYTES = 256 << 10
#: Payloads below this size are read at once; mapping one takes longer than that copy.
_SMALL_BYTES = 64 << 10
#: Payloads up to this size, such as a few hundred tokens, are carried in the job's record while the job lives.
_CARRIED_BYTES = 4 << 10


@dataclass(frozen=True)
class Reference:
    """Where a payload is: the only thing about it that travels through Redis and Celery."""

    name: str
    nbytes: int
    host: str
    #: "shm", a file on ``host``, or "record": in the job's record, here, until the job is over.
    store: str = "shm"
    #: The whole of a payload that is in the record, in base 64.
    content: str = ""

    def to_json(self) -> dict[str, Any]:
        """The form kept in the job record."""
        told = {"store": self.store, "host": self.host, "name": self.name, "nbytes": self.nbytes}
        return {**told, "content": self.content} if self.content else told

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Reference:
        """The inverse of :meth:`to_json`."""
        facts = (str(value["name"]), int(value["nbytes"]), str(value["host"]), str(value["store"]))
        return cls(*facts, str(value.get("content", "")))

    def is_file(self, host: str) -> bool:
        """Whether there is something to remove on ``host``."""
        return self.store == "shm" and self.host == host


class PayloadStore:
    """The payloads of one deployment on one host, in ``directory`` (bytes free are checked before each write)."""

    def __init__(self, namespace: str, directory: str = "/dev/shm", host: str | None = None) -> None:
        """``namespace`` is a short hexadecimal name that keeps two deployments on one host apart."""
        self.namespace = namespace
        self.directory, self._folder = Path(directory), str(Path(directory))
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
        return self._put(name, *pack(items))

    def keep(self, name: str, items: Sequence[Item]) -> Reference:
        """As :meth:`put`; but a small payload comes back in its reference, since a file costs as much as the rest."""
        head, buffers, total = pack(items)
        if total > _CARRIED_BYTES:
            return self._put(name, head, buffers, total)
        content = base64.b64encode(joined(head, buffers, total)).decode()
        return Reference(name, total, self.host, "record", content)

    def _put(self, name: str, head: bytes, buffers: Sequence[tuple[int, Buffer]], total: int) -> Reference:
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
        content = joined(head, buffers, total)
        temporary = f"{self._folder}/{name}.part{os.getpid()}-{threading.get_ident()}"
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                _pwrite_all(descriptor, content)
            finally:
                os.close(descriptor)
            os.rename(temporary, f"{self._folder}/{name}")
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
        if reference.store == "record":
            yield MappedPayload(memoryview(_carried(reference)), reference.name)
            return
        if reference.store != "shm" or reference.host != self.host:
            raise errors.PayloadError(
                f"Payload {reference.name} lies in {reference.store} on host {reference.host}; this is {self.host}."
            )
        if not reference.name.startswith(PREFIX) or "/" in reference.name:
            raise errors.PayloadError(f"{reference.name!r} is not the name of a payload.")
        try:
            descriptor = os.open(f"{self._folder}/{reference.name}", os.O_RDONLY)
            try:
                content = _content(descriptor, reference)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as exc:
            raise errors.PayloadError(f"Payload {reference.name} cannot be opened: {exc}.") from exc
        try:
            yield MappedPayload(memoryview(content), reference.name)
        finally:
            # Views handed to an engine may outlive the block: then the mapping goes with the last of them.
            if not isinstance(content, bytearray):
                with contextlib.suppress(BufferError):
                    content.close()

    def release(self, names: Iterable[str]) -> None:
        """Remove payloads of this host; those already gone are fine. A reader that holds one mapped keeps its view."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._folder}/{name}")

    def names(self) -> list[str]:
        """All files of this deployment on this host, unfinished ones included.

        vLLM-Omni's connectors, where they hand something over, name their segments and locks by the same name with
        words of theirs before and behind it.
        """
        mine = f"{PREFIX}{self.namespace}_"
        with os.scandir(self.directory) as entries:
            return [entry.name for entry in entries if mine in entry.name]

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
    parts = name[max(name.find(PREFIX), 0) :].split("_")
    return parts[2] if len(parts) > 2 else ""


def _carried(reference: Reference) -> bytearray:
    try:
        return bytearray(base64.b64decode(reference.content, validate=True))
    except ValueError as exc:
        raise errors.PayloadError(f"Payload {reference.name} is damaged in its record: {exc}.") from exc


def _content(descriptor: int, reference: Reference) -> mmap.mmap | bytearray:
    """A payload's bytes, for the reader to write over if it likes: mapped, or read where that costs less."""
    if reference.nbytes < _SMALL_BYTES:
        content = bytearray(os.pread(descriptor, reference.nbytes, 0))
        _check_whole(reference, len(content))
        return content
    # Held until the last view of the mapping is gone: till then its writer will not write it again.
    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    _check_whole(reference, os.fstat(descriptor).st_size)
    # Copy on write: torch takes it without a copy, and what an engine writes stays its own.
    return mmap.mmap(descriptor, reference.nbytes, access=mmap.ACCESS_COPY)


def _check_whole(reference: Reference, nbytes: int) -> None:
    if nbytes < reference.nbytes:
        raise errors.PayloadError(f"Payload {reference.name} has {nbytes:,} bytes instead of {reference.nbytes:,}.")


def _pwrite_all(descriptor: int, content: bytearray) -> None:
    view, offset = memoryview(content), 0
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
