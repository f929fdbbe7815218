"""vLLM-Omni on a machine without an accelerator: a platform plugin, which vLLM-Omni finds by its entry point."""

from __future__ import annotations

from omniqueue.platforms.cpu import torchvision_ops


def platform_plugin() -> str | None:
    """Dotted path of the platform class where vLLM is a CPU build and torch has no accelerator, else None.

    vLLM-Omni calls it in every process that resolves its platform, spawned children too.
    """
    import torch
    from vllm.platforms import current_platform

    # Also here, because VLLM_TARGET_DEVICE=cpu makes vLLM skip the group that would install the hook.
    torchvision_ops.plugin()
    if not current_platform.is_cpu() or torch.accelerator.is_available():
        return None
    return "omniqueue.platforms.cpu.platform.CpuOmniPlatform"
