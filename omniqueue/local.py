"""What a running ``omniqueue up`` leaves in its folder, so that other commands on the machine find its parts."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path

_NAME = "environment.json"


def tell(folder: Path, environment: Mapping[str, str]) -> None:
    """Write down the variables that the parts were started with; the folder is this user's alone."""
    (folder / _NAME).write_text(json.dumps(dict(environment)))


def told(folder: Path) -> dict[str, str]:
    """Those variables while ``omniqueue up`` runs, nothing otherwise."""
    try:
        with open(folder / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pass  # held: it runs
    except OSError:
        return {}
    else:
        return {}
    try:
        found = json.loads((folder / _NAME).read_text())
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in found.items()}
