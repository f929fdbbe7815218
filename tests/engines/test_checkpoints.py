"""What the writers of tiny checkpoints write is what vLLM-Omni takes for the published models."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from omniqueue import configfile
from tests.engines import checkpoints
from tests.engines.handover import References
from tests.engines.reference import environment

_READ = """
import json, sys
from pathlib import Path
from omniqueue.platforms.cpu import torchvision_ops
torchvision_ops.plugin()
import torch
from safetensors import safe_open
from omniqueue.engines import omni_stage
from omniqueue.pipeline import Pipeline
found = {}
for name, path in zip(sys.argv[1::2], sys.argv[2::2]):
    tensors = {}
    for file in sorted(Path(path).rglob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors[str(file.relative_to(path))] = len(list(opened.keys()))
    for file in sorted(Path(path).glob("*.pt")):
        tensors[file.name] = len(torch.load(file, weights_only=True))
    source = omni_stage.source_pipeline(Pipeline("", (), deploy={}), path)
    found[name] = {"pipeline": source.model_type, "tensors": tensors, "topology": omni_stage.topology(source)}
print(json.dumps(found))
"""


#: BAGEL's form with one stage is chosen by its name; by the files it is the one with two. JoyAI-VL-Interaction's first
#: stage is a Qwen3-VL by its files, which has no pipeline.
CHOSEN = ["bagel_single_stage", "joyai_vl_interaction"]
FOUND = [name for name in checkpoints.names() if name not in CHOSEN]


@pytest.fixture(scope="module")
def found(references: References) -> dict[str, Any]:
    """By checkpoint: the pipeline that vLLM-Omni finds for it by its files, and how many tensors each has."""
    places = [word for name in FOUND for word in (name, str(references.checkpoint(name)))]
    command = [sys.executable, "-c", _READ, *places]
    answer = subprocess.run(command, env=environment(), check=True, timeout=300, capture_output=True)
    read: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return read


@pytest.mark.engine
@pytest.mark.parametrize("name", FOUND)
def test_vllm_omni_finds_the_pipeline_by_the_files(found: dict[str, Any], name: str) -> None:
    config = configfile.load(str(checkpoints.config(name)), model="unused")
    assert found[name]["pipeline"] == config.name
    assert found[name]["topology"] == list(config.topology)
    assert found[name]["tensors"]
    assert all(found[name]["tensors"].values())
