"""Payload tensors and torch tensors share bytes."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest

from omniqueue import errors
from omniqueue.engines import tensors
from omniqueue.payloads import ITEM_BYTES, Tensor

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(name="torch")
def imported_torch() -> Any:
    import torch

    return torch


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4), (1,)])
def test_every_type_and_shape_comes_back(torch: Any, dtype: str, shape: tuple[int, ...]) -> None:
    original = torch.full(shape, 3).to(getattr(torch, dtype))
    stored = tensors.from_torch(original)
    assert (stored.dtype, stored.shape) == (dtype, shape)
    again = tensors.to_torch(Tensor(stored.dtype, stored.shape, bytes(stored.buffer)))
    assert again.dtype == original.dtype
    assert again.shape == original.shape
    assert again.equal(original)


def test_views_are_stored_in_row_major_order(torch: Any) -> None:
    original = torch.arange(6).reshape(2, 3).T
    assert tensors.to_torch(tensors.from_torch(original)).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_dense_tensor_is_not_copied(torch: Any) -> None:
    original = torch.zeros(4, dtype=torch.int32)
    stored = tensors.from_torch(original)
    original[0] = 7
    assert memoryview(stored.buffer)[0] == 7


def test_writable_memory_is_used_and_read_only_memory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(bytes(8))
    with open(tmp_path / "t", "r+b") as file:
        read_only = memoryview(mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ))
        private = memoryview(mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_COPY))
    tensors.to_torch(Tensor("uint8", (8,), read_only)).fill_(1)
    assert bytes(read_only) == bytes(8)
    tensors.to_torch(Tensor("uint8", (8,), private)).fill_(1)
    assert bytes(private) == b"\1" * 8


def test_plain_lists_are_facts_and_lists_with_tensors_are_not(torch: Any) -> None:
    arrays, facts = tensors.split({"codes": [1, 2], "deep": {"parts": [torch.ones(1)], "name": "x", "none": None}})
    assert facts == {"codes": [1, 2], "deep/name": "x", "deep/none": None}
    assert list(arrays) == ["deep/parts/[0]"]


def test_a_value_that_is_neither_is_an_error_that_names_it() -> None:
    with pytest.raises(errors.EngineError, match="deep/what"):
        tensors.split({"deep": {"what": object()}})


def test_keys_that_are_numbers_stay_numbers(torch: Any) -> None:
    nested = {"hidden": {3: torch.ones(2), 11: torch.zeros(1)}, "names": {"a": 1}}
    again = tensors.join(*tensors.split(nested))
    assert again["hidden"].keys() == {3, 11}
    assert again["hidden"][3].tolist() == [1.0, 1.0]
    assert again["names"] == {"a": 1}
