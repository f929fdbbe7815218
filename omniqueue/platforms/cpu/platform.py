"""The CPU platform class: vLLM's own for everything of vLLM, and answers to what vLLM-Omni asks on top."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """One device, the CPU; memory figures in bytes are the machine's."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        return "omniqueue.platforms.cpu.worker.CpuARWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        return "omniqueue.platforms.cpu.worker.CpuGenerationWorker"

    @classmethod
    def get_diffusion_model_runner_cls(cls) -> str:
        return "omniqueue.platforms.cpu.diffusion.CpuDiffusionRunner"

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        if selected_backend is not None and selected_backend.upper() != "TORCH_SDPA":
            raise ValueError(f"Attention back end {selected_backend} needs an accelerator; on a CPU use TORCH_SDPA.")
        return "omniqueue.platforms.cpu.attention.CpuSdpaBackend"

    @classmethod
    def supports_diffusion_dense_flash_attention(cls) -> bool:
        return False

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def supports_talker_mtp_graph_capture(cls) -> bool:
        return False

    @classmethod
    def supports_cpu_offload(cls) -> bool:
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def device_count(cls) -> int:
        return 1

    @classmethod
    def current_device(cls) -> int:
        return 0

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        """Nothing runs behind the caller's back on a CPU."""

    @classmethod
    def empty_cache(cls) -> None:
        """There is no caching allocator to empty."""

    @classmethod
    def reset_peak_memory_stats(cls, *args: Any, **kwargs: Any) -> None:
        """No allocator statistics on a CPU."""

    @classmethod
    def max_memory_allocated(cls, *args: Any, **kwargs: Any) -> int:
        return 0

    @classmethod
    def max_memory_reserved(cls, *args: Any, **kwargs: Any) -> int:
        return 0

    @classmethod
    def memory_allocated(cls, *args: Any, **kwargs: Any) -> int:
        return 0

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return int(psutil.virtual_memory().available)

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)
