"""How much room a payload folder has, and whether two processes see the same one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from omniqueue.payloads import PayloadStore


def identity(folder: Path) -> str:
    """Two processes get the same answer exactly when they see the same folder: kernel, file system, folder."""
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    facts = os.stat(folder)
    return f"{kernel[:8]}-{facts.st_dev:x}-{facts.st_ino:x}"


def size_bytes(folder: Path) -> int:
    """Size of the file system that holds the folder."""
    facts = os.statvfs(folder)
    return facts.f_blocks * facts.f_frsize


def facts(shared: PayloadStore) -> dict[str, Any]:
    """What a process announces of its payload folder; sizes in bytes."""
    return {
        "id": identity(shared.directory),
        "folder": str(shared.directory),
        "size": size_bytes(shared.directory),
        "free": shared.free_bytes(),
        "resident": shared.resident_bytes(),
    }
