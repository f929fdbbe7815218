"""Key-value caches that a CPU stage hands over, in the layout that other stages read.

vLLM's CPU kernels keep a block's keys before its values, in an order of their own for each instruction set. vLLM-Omni
takes what it finds for FlashAttention's layout, whose shape is the same, and hands over noise. So a stage that hands
over caches keeps a second one beside, in that layout: (blocks, heads, places in a block, keys then values).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def keep(layers: dict[str, Any], manager: Any) -> None:
    """Have every attention layer's keys and values written to a plain cache too, and ``manager`` take them from it."""
    plain: dict[int, torch.Tensor] = {}
    for layer in layers.values():
        implementation: Any = getattr(layer, "impl", None)
        if hasattr(implementation, "do_kv_cache_update"):
            implementation.do_kv_cache_update = _writing(implementation.do_kv_cache_update, plain)
    extract = manager._extract_kv_cache

    def extract_plain(request_id: str, block_ids: list[int], seq_len: int, caches: list[Any], *rest: Any) -> Any:
        written = [plain.get(cache.data_ptr(), cache) for cache in caches]
        return extract(request_id, block_ids, seq_len, written, *rest)

    manager._extract_kv_cache = extract_plain


def _writing(update: Callable[..., None], plain: dict[int, torch.Tensor]) -> Callable[..., None]:
    def write(
        layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, *rest: Any
    ) -> None:
        update(layer, key, value, cache, slots, *rest)
        address = cache.data_ptr()
        if address not in plain:
            plain[address] = torch.empty_like(cache)  # its pages take memory once they are written
        used = slots >= 0
        count, block_size, size = len(slots), cache.shape[2], key.shape[-1]
        blocks, places = (slots // block_size)[used], (slots % block_size)[used]
        plain[address][blocks, :, places, :size] = key[:count][used].to(cache.dtype)
        plain[address][blocks, :, places, size:] = value[:count][used].to(cache.dtype)

    return write
