"""Pipelines whose stages hand over tensors: a process a stage, equal to vLLM-Omni in one go, to the last bit.

All requests of a pipeline are in flight together here and one after the other in vLLM-Omni. Both sides seed the
generator of stages that draw from a global one, which vLLM-Omni by itself does not (see native_pipeline.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import pytest

from omniqueue import errors
from omniqueue.engines.base import StageOutput
from tests.engines import handover
from tests.engines.handover import Native, References
from tests.engines.handover_cases import PIPELINES, Pipeline
from tests.engines.stage_process import StageProcess

pytestmark = pytest.mark.engine

#: What a stage's output holds for a later stage beside tokens and text.
_BESIDE = {"payload", "cache"}


@dataclass(frozen=True)
class Both:
    """One pipeline, answered both ways, its engines still there."""

    pipeline: Pipeline
    native: Native
    made: dict[str, dict[int, StageOutput]]
    processes: list[StageProcess]


@pytest.fixture(scope="module", params=sorted(PIPELINES))
def both(
    request: pytest.FixtureRequest, references: References, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    pipeline = PIPELINES[request.param]
    folder = tmp_path_factory.mktemp(pipeline.name)
    checkpoint, native = references(pipeline.name)
    with handover.stages(pipeline.name, checkpoint, folder) as processes:
        yield Both(pipeline, native, handover.run(pipeline, processes), processes)


def test_tokens_of_every_stage_are_those_of_native_omni(both: Both) -> None:
    for request in both.pipeline.requests:
        for stage_id, what in both.pipeline.compared.items():
            if "tokens" in what:
                mine, theirs = both.made[request.name][stage_id].data, both.native.stage(request.name, stage_id)
                assert mine["prompt_token_ids"] == theirs["prompt_token_ids"], (request.name, stage_id)
                assert mine["cumulative_token_ids"] == theirs["token_ids"], (request.name, stage_id)
                assert theirs["token_ids"], (request.name, stage_id)


@pytest.mark.parametrize("kind", ["audio", "image"])
def test_what_the_client_gets_is_that_of_native_omni(both: Both, kind: str) -> None:
    for request in both.pipeline.requests:
        for stage_id, what in both.pipeline.compared.items():
            if kind in what:
                mine = handover.array(both.made[request.name][stage_id].tensors[kind])
                name = f"{request.name}:{stage_id}/{kind}" + ("/0" if kind == "image" else "")
                theirs = both.native.tensors[name]
                assert mine.std() > 0, "silence, or a single colour, would prove nothing"
                numpy.testing.assert_array_equal(mine.reshape(-1), theirs.reshape(-1))


def test_requests_have_answers_of_their_own(both: Both) -> None:
    """So that the comparison above can fail."""
    last = both.pipeline.requests
    seen = {
        (name, bytes(tensor.buffer))
        for request in last
        for name, tensor in both.made[request.name][max(both.pipeline.compared)].tensors.items()
    }
    assert len(seen) == len(last)


def test_an_answer_does_not_depend_on_what_came_before(both: Both) -> None:
    """The last stage again, in another order, alone: the same bytes."""
    process = both.processes[-1]
    for request in reversed(both.pipeline.requests):
        first = both.made[request.name]
        sources = {one: first[one] for one in process.stage.input_sources}
        again = process.generate(request.job, sources, inputs=handover.pictures(request)).result()
        mine = {name: bytes(tensor.buffer) for name, tensor in again.tensors.items()}
        assert mine == {name: bytes(tensor.buffer) for name, tensor in first[process.stage.stage_id].tensors.items()}


def test_an_empty_hand_over_fails_the_job_and_names_the_edge(both: Both) -> None:
    request = both.pipeline.requests[0]
    made = both.made[request.name]
    edges = [(one, process) for process in both.processes for one in process.stage.input_sources]
    edges = [(one, process) for one, process in edges if _BESIDE & made[one].data.keys()]
    if not edges:  # tokens and text are all that these stages need of each other
        return
    source, process = edges[-1]
    full, inputs = made[source], handover.pictures(request)
    bare = StageOutput({name: value for name, value in full.data.items() if name not in _BESIDE})
    with pytest.raises(errors.EngineError, match=f"stage {source} -> stage {process.stage.stage_id}"):
        process.generate(request.job, {source: bare}, inputs=inputs).result()
    again = process.generate(request.job, {source: full}, inputs=inputs).result()
    assert again.tensors.keys() == made[process.stage.stage_id].tensors.keys()
