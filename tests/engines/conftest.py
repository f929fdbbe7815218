"""Engines are slow to start, so each is started once for all tests of this folder that only ask it something."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.stage_process import StageProcess


@pytest.fixture(scope="package")
def stages(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StageProcess, StageProcess]]:
    folder = tmp_path_factory.mktemp("stages")
    pair = (StageProcess(0, checkpoint, folder), StageProcess(1, checkpoint, folder))
    try:
        for stage in pair:
            stage.started()
        yield pair
    finally:
        left = [stage.close() for stage in pair]
        assert left == [[], []]


@pytest.fixture(scope="package")
def ar(stages: tuple[StageProcess, StageProcess]) -> StageProcess:
    return stages[0]


@pytest.fixture(scope="package")
def dit(stages: tuple[StageProcess, StageProcess]) -> StageProcess:
    return stages[1]
