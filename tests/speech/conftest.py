"""Qwen2.5-Omni's three stages as ``omniqueue up`` starts them; in a folder of its own, since three engines are many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines import checkpoints
from tests.engines.handover import Native, References
from tests.pipeline.conftest import Product, started

NAME = "qwen2_5_omni"


@pytest.fixture(scope="package")
def native(references: References) -> Native:
    return references(NAME)[1]


@pytest.fixture(scope="package")
def product(references: References, native: Native, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """Started after native ``Omni`` has ended."""
    with started(references(NAME)[0], tmp_path_factory.mktemp("up"), str(checkpoints.config(NAME))) as running:
        yield running
