"""How a payload lies in a file: a small JSON header, and then raw tensors. No pickle.

Layout: ``b"OQP1"``, header length (u32, little endian), header (JSON, UTF-8), tensors, each aligned to 64 bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from omniqueue import errors

#: What other readers of JSON do not know, such as NaN, is refused.
_strict = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_MAGIC = b"OQP1"
_ALIGN = 64

#: Bytes per element, by the names that numpy and torch share.
ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
}

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")


@dataclass(frozen=True)
class Tensor:
    """A dense row-major array without a framework: dtype name, shape, little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    buffer: Buffer

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise errors.PayloadError(f"dtype {self.dtype!r} cannot be stored; one of {', '.join(ITEM_BYTES)} can.")
        wanted = ITEM_BYTES[self.dtype]
        for side in self.shape:
            wanted *= side
        if min(self.shape, default=0) < 0 or memoryview(self.buffer).nbytes != wanted:
            raise errors.PayloadError(
                f"A {self.dtype} tensor of shape {self.shape} has {wanted} bytes, not {memoryview(self.buffer).nbytes}."
            )

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return memoryview(self.buffer).nbytes


@dataclass(frozen=True)
class Item:
    """One item of a payload: JSON facts and named tensors."""

    data: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def pack(items: Sequence[Item]) -> tuple[bytes, list[tuple[int, Buffer]], int]:
    """Header bytes, (offset, buffer) of every tensor, and the size of the whole."""
    described: list[dict[str, Any]] = []
    buffers: list[tuple[int, Buffer]] = []
    offset = 0  # relative to the first byte after the header
    for item in items:
        entry: dict[str, Any] = {"data": dict(item.data), "tensors": {}}
        for name, tensor in item.tensors.items():
            offset = _aligned(offset)
            entry["tensors"][name] = [tensor.dtype, list(tensor.shape), offset]
            buffers.append((offset, tensor.buffer))
            offset += tensor.nbytes
        described.append(entry)
    text = _strict.encode({"items": described}).encode()
    head = _MAGIC + struct.pack("<I", len(text)) + text
    start = _aligned(len(head))
    return head, [(start + at, buffer) for at, buffer in buffers], start + offset


def joined(head: bytes, buffers: Sequence[tuple[int, Buffer]], total: int) -> bytearray:
    """What :func:`pack` made, in one piece."""
    content = bytearray(total)
    for offset, buffer in ((0, head), *buffers):
        view = memoryview(buffer)
        if view.nbytes:  # one with a side of zero cannot be cast
            content[offset : offset + view.nbytes] = view.cast("B")
    return content


class MappedPayload:
    """A payload opened for reading; its tensors are views into the mapping and live as long as they are used."""

    def __init__(self, view: memoryview, name: str) -> None:
        """Raises PayloadError for whatever is not a whole payload: nothing outside ``view`` is ever read."""
        try:
            if bytes(view[:4]) != _MAGIC:
                raise errors.PayloadError(f"{name} is not a payload of this version.")
            (length,) = struct.unpack("<I", view[4:8])
            if 8 + length > len(view):
                raise ValueError(f"its header of {length} bytes does not fit")
            header = msgspec.json.decode(view[8 : 8 + length])
            body = view[_aligned(8 + length) :]
            self.items = tuple(_item(entry, body) for entry in _typed(_typed(header, dict)["items"], list))
        except (ValueError, KeyError, TypeError, struct.error, RecursionError, msgspec.DecodeError) as exc:
            raise errors.PayloadError(f"{name} is damaged: {exc}") from exc


def _typed(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} where {kind.__name__} belongs")
    return value


def _item(entry: Any, body: memoryview) -> Item:
    tensors = {}
    for name, described in _typed(_typed(entry, dict)["tensors"], dict).items():
        dtype, shape, offset = _typed(described, list)
        nbytes = ITEM_BYTES[_typed(dtype, str)]
        for side in _typed(shape, list):
            nbytes *= _natural(side)
        if _natural(offset) + nbytes > len(body):
            raise ValueError(f"tensor {name!r} ends behind the file")
        tensors[name] = Tensor(dtype, tuple(shape), body[offset : offset + nbytes])
    return Item(_typed(entry["data"], dict), tensors)


def _natural(value: Any) -> int:
    if _typed(value, int) < 0:
        raise ValueError(f"{value} where a size belongs")
    return int(value)
