"""Tiny random checkpoints in the published layouts, one module for each pipeline of vLLM-Omni that is tested here.

``python -m tests.engines.checkpoints NAME FOLDER ...`` writes them. NAME is the module's; beside it NAME.yaml is
the stage config to serve it with on a CPU.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent


def names() -> list[str]:
    """All checkpoints that can be written."""
    return sorted(path.stem for path in HERE.glob("*.yaml"))


def config(name: str) -> Path:
    """The stage config of a checkpoint."""
    return HERE / f"{name}.yaml"


def write(name: str, folder: Path) -> None:
    """Write the checkpoint into a folder, which is made. Takes seconds, most of it imports."""
    folder.mkdir(parents=True, exist_ok=True)
    import_module(f"{__name__}.{name}").write(folder)
