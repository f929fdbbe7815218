"""A folder for a checkpoint that is written here: whole, or not there at all."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from omniqueue import errors


@contextlib.contextmanager
def folder(directory: Path) -> Iterator[Path]:
    """A folder beside ``directory`` that becomes it when the block ends; one that raises leaves nothing.

    Raises ConfigError when ``directory`` exists and holds something.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise errors.ConfigError(f"{directory} exists and is not an empty folder; name another one with --out.")
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
