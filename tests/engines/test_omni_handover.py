"""What one stage takes and leaves follows from its edges and from where the request ends."""

from __future__ import annotations

from typing import Any

import pytest

from omniqueue import errors
from omniqueue.engines.base import StageOutput, StageRequest
from omniqueue.engines.omni_edges import OUTPUT, PAYLOAD, TOKENS, Edge
from omniqueue.engines.omni_handover import Handover

EDGES = (
    Edge(0, 1, OUTPUT, "", reads_output=True),
    Edge(1, 2, TOKENS, ""),
    Edge(2, 3, PAYLOAD, "", hook="module.hook"),
)


def request(**job: Any) -> StageRequest:
    return StageRequest("r", job, 0, {}, {2: StageOutput({"token_ids": [1]})})


@pytest.mark.parametrize(
    ("stage_id", "job", "emits"),
    [(0, {}, True), (0, {"last_stage": 1}, True), (0, {"last_stage": 0}, False), (1, {}, False), (3, {}, False)],
)
def test_tensors_are_kept_only_for_a_stage_that_runs_and_reads_them(
    stage_id: int, job: dict[str, Any], emits: bool
) -> None:
    handover = Handover(EDGES, stage_id, last_stage=3)
    with handover.running(request(**job)):
        assert handover.emits("r") is emits
        assert handover.left("r") == StageOutput()


def test_nothing_of_a_request_is_kept_after_it() -> None:
    handover = Handover(EDGES, 0, last_stage=3)
    with pytest.raises(ZeroDivisionError), handover.running(request()):
        raise ZeroDivisionError
    assert handover._ends == {}


def test_a_prompt_without_a_payload_edge_stays_as_it_is() -> None:
    prompt = {"prompt_token_ids": [1, 2]}
    assert Handover(EDGES, 2, last_stage=3).given(prompt, request(), generation=False) is prompt


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
def test_a_payload_that_is_not_there_names_its_edge() -> None:
    with pytest.raises(errors.EngineError, match=r"stage 2 -> stage 3: .*no payload"):
        Handover(EDGES, 3, last_stage=3).given({"prompt_token_ids": [1]}, request(), generation=True)
