"""vLLM-Omni's diffusion runner on a CPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner


class CpuDiffusionRunner(DiffusionModelRunner):  # type: ignore[misc]
    """Loads pipelines so that they compute in precisions that a CPU has."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        for module in self.pipeline.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Conv2d | torch.nn.Conv3d | torch.nn.GroupNorm):
                compute_in_own_precision(module)


def compute_in_own_precision(module: Any) -> None:
    """Have a layer take what is not in its weights' precision.

    Some pipelines leave mixing precisions to autocast and switch that off on a CPU, where they then fail (BAGEL's).
    Others decode under autocast to float16, in which a CPU convolves a hundred times slower (HunyuanImage-3.0's).
    """
    plain = module.forward

    @functools.wraps(plain)
    def forward(given: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return plain(given.to(module.weight.dtype), *rest, **named)
        if torch.get_autocast_dtype("cpu") is not torch.float16:
            return plain(given, *rest, **named)
        with torch.autocast("cpu", enabled=False):
            return plain(given.to(module.weight.dtype), *rest, **named)

    module.forward = forward
