"""Writes checkpoints: python -m tests.engines.checkpoints NAME FOLDER [NAME FOLDER ...]."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.engines import checkpoints

if __name__ == "__main__":
    for name, folder in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        checkpoints.write(name, Path(folder))
