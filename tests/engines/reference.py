"""Small checkpoints, and what vLLM-Omni in one go makes of every case; for tests of engines and of workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import yaml

from omniqueue import configfile
from omniqueue.pipeline import Pipeline

CONFIG = "glm_image_tiny.yaml"
#: Bit equality needs equal thread counts: sums are not associative.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
PACKAGES = Path(__file__).with_name("packages")
_WRITE_DIFFUSION = """
import sys, pathlib
from omniqueue.engines import tiny_diffusion
for argument in sys.argv[1:]:
    name, _, path = argument.partition("=")
    tiny_diffusion.write(name, pathlib.Path(path))
"""


@dataclass(frozen=True)
class NativeReference:
    """By case name: the first stage's prompt and tokens, and the picture's pixels (height, width, 3)."""

    tokens: dict[str, dict[str, list[int]]]
    pixels: dict[str, Any]
    facts: dict[str, Any]


def environment() -> dict[str, str]:
    """The environment of processes whose results are compared; it has the packages that stand in for downloads."""
    path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}


def write_small(architecture: str, directory: Path) -> Path:
    """Write one of the small checkpoints by the command that users have."""
    command = [sys.executable, "-m", "omniqueue.cli", "tiny-checkpoint", architecture, "--out", str(directory)]
    subprocess.run(command, check=True, env=environment(), timeout=300, stderr=subprocess.DEVNULL)
    return directory


def write_tiny_diffusion(directory: Path) -> dict[str, Path]:
    """Write a video's and a sound's checkpoint in one process: importing the libraries takes longest."""
    paths = {name: directory / name for name in ("wan", "stable_audio")}
    arguments = [f"{name}={path}" for name, path in paths.items()]
    subprocess.run(
        [sys.executable, "-c", _WRITE_DIFFUSION, *arguments],
        check=True,
        env=environment(),
        timeout=300,
        stderr=subprocess.DEVNULL,
    )
    return paths


def pipeline(checkpoint: Path, config: str = CONFIG) -> Pipeline:
    """A stage config, the tiny one as a rule, with the checkpoint as its model."""
    return configfile.load(config, model=str(checkpoint))


def run_native(checkpoint: Path, out: Path) -> NativeReference:
    """Run ``native.py``; takes one to two minutes on two cores."""
    pipe = pipeline(checkpoint)
    deploy = out / "deploy.yaml"
    deploy.write_text(yaml.safe_dump({**pipe.deploy, "stages": [dict(stage.deploy) for stage in pipe.stages]}))
    # What a user would set for any vLLM on a small machine; nothing of omniqueue's own.
    env = {**environment(), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    script = Path(__file__).with_name("native.py")
    with open(out / "native.log", "wb") as log:
        done = subprocess.run(
            [sys.executable, str(script), str(checkpoint), str(deploy), str(out)],
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=500,
            cwd=out,
            check=False,
        )
    assert done.returncode == 0, (out / "native.log").read_text()[-4000:]
    stored = json.loads((out / "tokens.json").read_text())
    with numpy.load(out / "pixels.npz") as pixels:
        return NativeReference(stored["tokens"], dict(pixels), stored["facts"])
