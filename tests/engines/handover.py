"""A pipeline's requests answered by vLLM-Omni's own ``Omni`` in one go; and its stages' engines, without workers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import yaml

from omniqueue import audio
from omniqueue.payloads import Tensor
from tests.engines import checkpoints, reference
from tests.engines.handover_cases import PIPELINES
from tests.engines.stage_process import StageProcess

#: For native ``Omni`` on a small machine; the last keeps a worker in its engine's process, as omniqueue has it.
SMALL = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
#: How long native ``Omni`` may take over all requests of a pipeline, its start included, in seconds.
NATIVE_S = 500


@dataclass(frozen=True)
class Native:
    """What native ``Omni`` made: by request and stage the ids and the text; tensors by "request:stage/path"."""

    answers: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, Any]

    def stage(self, request: str, stage_id: int) -> Any:
        return self.answers[request][str(stage_id)]


class References:
    """Checkpoints and what native ``Omni`` makes of them, made when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written = False
        self._native: dict[str, Native] = {}

    def checkpoint(self, name: str) -> Path:
        """A checkpoint's folder. All are written in one process: importing the libraries takes longest."""
        if not self._written:
            places = [word for one in checkpoints.names() for word in (one, str(self._folder / one))]
            command = [sys.executable, "-m", "tests.engines.checkpoints", *places]
            subprocess.run(command, check=True, env=reference.environment(), timeout=300, stderr=subprocess.DEVNULL)
            self._written = True
        return self._folder / name

    def __call__(self, name: str) -> tuple[Path, Native]:
        checkpoint = self.checkpoint(name)
        if name not in self._native:
            out = self._folder / f"{name}_native"
            out.mkdir()
            self._native[name] = native(name, checkpoint, out)
        return checkpoint, self._native[name]


def native(name: str, checkpoint: Path, folder: Path) -> Native:
    """Run ``native_pipeline.py``: about a minute for three stages on two cores."""
    pipe = reference.pipeline(checkpoint, str(checkpoints.config(name)))
    deploy = folder / "deploy.yaml"
    deploy.write_text(yaml.safe_dump({**pipe.deploy, "stages": [dict(stage.deploy) for stage in pipe.stages]}))
    script = Path(__file__).with_name("native_pipeline.py")
    # What a user would set for any vLLM on a small machine; nothing of omniqueue's own.
    env = {**reference.environment(), **SMALL, **PIPELINES[name].variables(str(checkpoint))}
    log = folder / "native.log"
    with open(log, "wb") as file:
        done = subprocess.run(
            [sys.executable, str(script), name, str(checkpoint), str(deploy), str(folder)],
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=NATIVE_S,
            cwd=folder,
            check=False,
        )
    assert done.returncode == 0, log.read_text(errors="replace")[-4000:]
    with numpy.load(folder / "tensors.npz") as tensors:
        return Native(json.loads((folder / "outputs.json").read_text()), dict(tensors))


def wav(wave: Any, rate: int) -> bytes:
    """The file that a client gets of a wave at ``rate`` Hz, whatever its shape."""
    samples = numpy.ascontiguousarray(wave.reshape(-1), dtype=numpy.float32)
    content, _, _ = audio.encode(Tensor("float32", samples.shape, memoryview(samples).cast("B")), rate, "wav")
    return content


@contextlib.contextmanager
def stages(
    name: str, checkpoint: Path, folder: Path, config: Path | None = None, **environment: str
) -> Iterator[list[StageProcess]]:
    """All stages of the pipeline, each an engine in a process of its own; with the checkpoint's config or another."""
    path = str(config or checkpoints.config(name))
    pipe = reference.pipeline(checkpoint, path)
    variables = {**PIPELINES[name].variables(str(checkpoint)), **environment}
    processes = [StageProcess(stage.stage_id, checkpoint, folder, path, variables) for stage in pipe.stages]
    try:
        for process in processes:
            process.started()
        yield processes
    finally:
        left = [process.close() for process in processes]
        assert left == [[] for _ in processes]


def array(tensor: Tensor) -> Any:
    """A payload's tensor as an array of its own."""
    return numpy.frombuffer(bytes(tensor.buffer), dtype=tensor.dtype).reshape(tensor.shape)
