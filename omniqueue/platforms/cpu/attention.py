"""Diffusion attention on a CPU: vLLM-Omni's scaled-dot-product back end, whose dispatch knows GPUs only."""

from __future__ import annotations

from typing import Any

from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuSdpaBackend(SDPABackend):
    """The back end by name."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return CpuSdpaImpl


class CpuSdpaImpl(SDPAImpl):
    """``forward_cuda`` is plain torch code; the base class refuses to pick it for a platform it does not know."""

    def forward(self, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> Any:
        return self.forward_cuda(query, key, value, attn_metadata)
