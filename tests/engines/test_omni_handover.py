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


# -- by connector ------------------------------------------------------------------------------------------------------

CONNECTED = (Edge(0, 1, PAYLOAD, "", hook="module.hook", connects=True, connector={"name": "SharedMemoryConnector"}),)


def test_what_is_stored_of_a_payload_by_connector_is_the_id_that_it_was_sent_by() -> None:
    first, second = (Handover(CONNECTED, stage_id, last_stage=1) for stage_id in (0, 1))
    with first.running(request()):
        left = first.left("r")
    assert left == StageOutput({"connector": "r"})
    later = StageRequest("another", {}, 0, {}, {0: left})
    assert second.renamed(later).request_id == "r"
    prompt = {"prompt_token_ids": [1, 2]}
    assert second.given(prompt, second.renamed(later), generation=True) is prompt


def test_two_attempts_at_once_do_not_share_what_can_be_read_once() -> None:
    handover = Handover(CONNECTED, 1, last_stage=1)
    later = StageRequest("another", {}, 0, {}, {0: StageOutput({"connector": "r"})})
    with (
        handover.running(handover.renamed(later)),
        pytest.raises(errors.EngineError, match="stage 0 -> stage 1: an earlier attempt"),
    ):
        handover.renamed(later)
    assert handover.renamed(later).request_id == "r"


def test_a_request_that_ends_before_the_edge_sends_nothing() -> None:
    handover = Handover(CONNECTED, 0, last_stage=1)
    with handover.running(request(last_stage=0)):
        assert handover.left("r") == StageOutput()


def test_an_output_that_was_not_sent_by_connector_names_the_edge() -> None:
    later = StageRequest("r", {}, 0, {}, {0: StageOutput({"payload": {}})})
    with pytest.raises(errors.EngineError, match=r"stage 0 -> stage 1: .*the same stage config"):
        Handover(CONNECTED, 1, last_stage=1).renamed(later)


def test_only_a_payload_that_was_waited_for_in_vain_is_said_to_be_lost() -> None:
    handover = Handover(CONNECTED, 1, last_stage=1)
    said = handover.lost(RuntimeError("Timed out waiting for connector input after 30s"))
    assert said is not None
    assert str(said).startswith("stage 0 -> stage 1: the payload did not come through SharedMemoryConnector.")
    assert handover.lost(RuntimeError("anything else")) is None
    assert Handover(EDGES, 3, last_stage=3).lost(RuntimeError("waiting for connector input")) is None
