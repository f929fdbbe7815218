"""A router without engines; ``router`` has workers that succeed, ``idle_router`` has none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.conftest import records
from tests.web import support
from tests.web.support import Router

#: Fixtures of another folder that tests here use.
__all__ = ["records"]


@pytest.fixture
def idle_router(valkey: str, tmp_path: Path) -> Iterator[Router]:
    with support.running(valkey, tmp_path, support.pipeline()) as router:
        yield router


@pytest.fixture
def router(idle_router: Router) -> Iterator[Router]:
    with support.Workers(idle_router):
        yield idle_router
