"""Shared memory that its writer uses again: a large payload then costs one copy, and no page is allocated or cleared.

A segment is a file that stays mapped in the process that writes it. Its own name is the writer's; each payload is one
more hard link to it. Releasing a payload removes that link, whoever does it, so a segment whose only link is its own
name holds nothing that anybody may still open. Who has it open already keeps a shared lock until its last view is gone,
and a segment that is locked is not written.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: How long a segment that nobody uses is kept by its writer, in seconds.
IDLE_S = 1.0
#: How long an unused segment may lie before anybody takes it for one whose writer is gone, in seconds.
ORPHAN_S = 10.0
#: A segment holds payloads down to this share of its size, so that a small one does not keep a large one busy.
_FILL = 0.5

Buffer = bytes | bytearray | memoryview


@dataclass(eq=False)
class _Segment:
    path: Path
    descriptor: int
    mapping: mmap.mmap
    #: Being written.
    taken: bool = True
    used_at: float = field(default_factory=time.monotonic)

    def unused(self) -> bool:
        """Only its own name is left, and it still is its own."""
        facts = os.fstat(self.descriptor)
        return facts.st_nlink == 1 and _inode(self.path) == facts.st_ino

    def lost(self) -> bool:
        """Its own name is gone: what is left of it goes with its payloads."""
        return _inode(self.path) != os.fstat(self.descriptor).st_ino

    def close(self) -> None:
        self.mapping.close()
        os.close(self.descriptor)


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


class Segments:
    """The segments of one process; ``prefix`` begins the names of all segments of a deployment."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self._directory, self._prefix = directory, prefix
        self._segments: list[_Segment] = []
        self._lock = threading.Lock()

    def write(
        self, target: Path, parts: Sequence[tuple[int, Buffer]], total: int, check_room: Callable[[int], None]
    ) -> None:
        """Make ``target`` a file with these (offset, bytes), all of it at once; it may be longer than ``total``.

        ``check_room`` is asked before more memory is taken. Raises what it raises, and OSError.
        """
        segment = self._take(total)
        if segment is None:
            check_room(total)
            segment = self._new(total)
        try:
            view = memoryview(segment.mapping)
            for offset, buffer in parts:
                content = memoryview(buffer)
                if content.nbytes:  # one with a side of zero cannot be cast
                    view[offset : offset + content.nbytes] = content.cast("B")
            view.release()
            with contextlib.suppress(FileNotFoundError):  # as a rename would: the last one written counts
                os.unlink(target)
            os.link(segment.path, target)
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(segment.descriptor, fcntl.LOCK_UN)
            segment.used_at, segment.taken = time.monotonic(), False

    def _take(self, total: int) -> _Segment | None:
        with self._lock:
            for segment in self._segments:
                fits = total <= len(segment.mapping) <= total / _FILL
                if fits and not segment.taken and segment.unused() and _locked(segment.descriptor):
                    segment.taken = True
                    return segment
        return None

    def _new(self, total: int) -> _Segment:
        path = self._directory / f"{self._prefix}{uuid.uuid4().hex}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Claims the pages now: a full tmpfs then says ENOSPC here instead of SIGBUS at a later write.
            os.posix_fallocate(descriptor, 0, total)
            segment = _Segment(path, descriptor, mmap.mmap(descriptor, total))
        except BaseException:
            os.unlink(path)
            os.close(descriptor)
            raise
        with self._lock:
            self._segments.append(segment)
        return segment

    def trim(self, idle_s: float = IDLE_S) -> None:
        """Give back the memory of what has not been used for so long."""
        before = time.monotonic() - idle_s
        with self._lock:
            for segment in list(self._segments):
                if segment.taken or not (segment.lost() or (segment.used_at <= before and segment.unused())):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    if not segment.lost():
                        os.unlink(segment.path)
                segment.close()
                self._segments.remove(segment)

    def close(self) -> None:
        """Keep none: what payloads still name goes with them."""
        with self._lock:
            for segment in self._segments:
                if not segment.lost():
                    os.unlink(segment.path)
                segment.close()
            self._segments.clear()

    def sweep(self) -> None:
        """Remove unused segments of writers that are gone; what a payload still names stays until that is released."""
        now = time.time()
        for path in self.paths():
            with contextlib.suppress(FileNotFoundError):
                facts = os.stat(path)
                if facts.st_nlink == 1 and now - facts.st_ctime > ORPHAN_S:
                    os.unlink(path)

    def paths(self) -> Iterator[Path]:
        """Every segment of the deployment on this host, whoever writes it."""
        with os.scandir(self._directory) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(self._prefix)]
        yield from (self._directory / name for name in names)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
