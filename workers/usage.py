"""What a stage's attempt used and made, for the counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omniqueue.engines.base import StageOutput
from omniqueue.payloads import Reference


def of(outputs: Sequence[StageOutput], reference: Reference | None) -> dict[str, float]:
    """Amounts by name: tokens read and written, pictures made, bytes written to the payload store; none that is 0."""
    amounts = {
        "prompt_tokens": sum(_tokens(output.data, "prompt_tokens", "prompt_token_ids") for output in outputs),
        "generation_tokens": sum(_tokens(output.data, "completion_tokens", "token_ids") for output in outputs),
        "images": sum("image" in output.tensors for output in outputs),
        "payload_bytes": reference.nbytes if reference else 0,
    }
    return {name: amount for name, amount in amounts.items() if amount}


def _tokens(data: Mapping[str, Any], name: str, ids: str) -> int:
    """As the engine counted them, or else as many as it gave."""
    usage = data.get("usage")
    counted = usage.get(name) if isinstance(usage, Mapping) else data.get(name)
    return int(counted) if counted is not None else len(data.get(ids) or ())
