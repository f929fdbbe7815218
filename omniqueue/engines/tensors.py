"""Payload tensors and torch tensors: the same bytes, not copied where that is safe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omniqueue import errors
from omniqueue.payloads import Tensor

#: Parts of a nested value's name are joined with this; a list's elements are "[0]", "[1]", ..., the key 3 is "#3".
SEPARATOR = "/"


def to_torch(tensor: Tensor) -> Any:
    """A CPU ``torch.Tensor`` over the same memory, or over a copy when that memory must not be written to."""
    import torch

    dtype = getattr(torch, tensor.dtype)
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=dtype)
    view = memoryview(tensor.buffer).cast("B")
    # Model code may write to its inputs, and a write to a read-only mapping would kill the process.
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=dtype).reshape(tensor.shape)


def from_torch(tensor: Any) -> Tensor:
    """A payload tensor over the same memory when it is dense and on the CPU, else over a copy."""
    import torch

    dense = tensor.detach().to("cpu").contiguous()
    flat = dense.reshape(-1).view(torch.uint8) if dense.numel() else torch.empty(0, dtype=torch.uint8)
    return Tensor(str(dense.dtype).removeprefix("torch."), tuple(dense.shape), memoryview(flat.numpy()))


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings and of lists that hold tensors, each with its name; plain lists are leaves."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            part = f"#{key}" if isinstance(key, int) else str(key)
            yield from flatten(inner, f"{prefix}{SEPARATOR}{part}" if prefix else part)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes) and any(map(_is_tensor, value)):
        for index, inner in enumerate(value):
            yield from flatten(inner, f"{prefix}{SEPARATOR}[{index}]")
    else:
        yield prefix, value


def unflatten(leaves: Mapping[str, Any]) -> dict[Any, Any]:
    """The inverse of :func:`flatten`."""
    root: dict[str, Any] = {}
    for name, value in leaves.items():
        *path, last = name.split(SEPARATOR)
        node = root
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return {_key(key): _lists(value) for key, value in root.items()}


def _lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    inner = {key: _lists(value) for key, value in node.items()}
    if inner and all(key.startswith("[") for key in inner):
        return [inner[f"[{index}]"] for index in range(len(inner))]
    return {_key(key): value for key, value in inner.items()}


def _key(part: str) -> Any:
    return int(part[1:]) if part.startswith("#") else part


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "dtype")


def split(nested: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and JSON-able facts of a nested mapping, by flattened name. Raises EngineError for other values."""
    arrays: dict[str, Tensor] = {}
    facts: dict[str, Any] = {}
    for name, value in flatten(nested):
        if _is_tensor(value):
            arrays[name] = from_torch(value)
        elif value is None or isinstance(value, bool | int | float | str | list):
            facts[name] = value
        else:
            raise errors.EngineError(f"The engine's output {name!r} is a {type(value).__name__}, which is not stored.")
    return arrays, facts


def join(arrays: Mapping[str, Tensor], facts: Mapping[str, Any]) -> dict[Any, Any]:
    """The inverse of :func:`split`, with torch tensors."""
    return unflatten({**facts, **{name: to_torch(tensor) for name, tensor in arrays.items()}})
