"""A worker's own devices out of a pool that its stage's workers share: so that starting another one is enough."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from omniqueue import errors

#: Held for as long as the process lives; the kernel lets go of them however it ends.
_locks: list[IO[str]] = []


def take(pool: tuple[str, ...], width: int, stage: str, folder: Path) -> str:
    """The first ``width`` devices of ``pool`` that no other worker of ``stage`` has, as CUDA_VISIBLE_DEVICES spells it.

    ``folder`` is one that all workers of the host see. Raises ConfigError when too few are left.
    """
    taken: dict[str, IO[str]] = {}
    for device in pool:
        if len(taken) == width:
            break
        descriptor = os.open(folder / f"omniqueue-{stage}-device-{device}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        file: IO[str] = os.fdopen(descriptor, "w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken[device] = file
        except BlockingIOError:
            file.close()
    if len(taken) < width:
        for file in taken.values():
            file.close()
        raise errors.ConfigError(
            f"A worker of {stage} needs {width} of the devices {', '.join(pool)} (OMNIQUEUE_DEVICE_POOL), and "
            f"{len(taken)} of them {'is' if len(taken) == 1 else 'are'} free; name more, or start fewer workers.",
            param="OMNIQUEUE_DEVICE_POOL",
        )
    _locks.extend(taken.values())
    return ",".join(taken)
