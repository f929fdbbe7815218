"""GLM-Image that takes pictures: the trained checkpoint of the examples with a picture encoder that fits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.engines.checkpoints import common

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny_glm_image" / "checkpoint"
_ENCODER = "vision_language_encoder"


def write(folder: Path) -> None:
    """Write the checkpoint, 16 MB.

    The example's world has no pictures as input, and the untrained quantiser there reads half the channels that the
    encoder gives: vLLM-Omni's engine dies of it. Published checkpoints have the two equal.
    """
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
    for part in (_ENCODER, "processor"):
        path = folder / part / "config.json"
        config = json.loads(path.read_text())
        channels = config["vision_config"]["hidden_size"]
        config["vq_config"]["latent_channels"] = channels
        common.write_json(path, config)
    weights = folder / _ENCODER / "model.safetensors"
    tensors = load_file(weights)
    codes = config["vq_config"]["embed_dim"]
    random = torch.Generator().manual_seed(1)
    drawn = {"quant_conv": (codes, channels), "post_quant_conv": (channels, codes)}
    for name, (outputs, inputs) in drawn.items():
        weight = torch.randn(outputs, inputs, 1, 1, generator=random)
        tensors[f"model.vqmodel.{name}.weight"] = weight.to(torch.bfloat16)
        tensors[f"model.vqmodel.{name}.bias"] = torch.zeros(outputs, dtype=torch.bfloat16)
    common.save(tensors, weights.parent, dtype=torch.bfloat16)
