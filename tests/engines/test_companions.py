"""A request that takes companion requests is refused where their outputs would not reach the later stage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from omniqueue import errors
from omniqueue.engines import omni_edges
from omniqueue.engines.base import StageRequest
from omniqueue.engines.omni_handover import Handover

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


def handover(name: str) -> Handover:
    from omniqueue.engines import environment

    environment.prepare("")
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES

    source: Any = OMNI_PIPELINES[name]
    return Handover(omni_edges.edges(source), 0, source.stages[-1].stage_id)


def ask(name: str, prompt: dict[str, Any], extra_args: dict[str, Any] | None, **job: Any) -> None:
    hands = handover(name)
    request = StageRequest("one", job, 0, {}, {})
    with hands.running(request):
        hands.check_alone("one", prompt, SimpleNamespace(extra_args=extra_args))


def test_a_plain_request_runs() -> None:
    ask("audex_tts", {"prompt": "hello"}, None)
    ask("ming_flash_omni_image", {"prompt": "a ball", "modalities": ["image"]}, None)


@pytest.mark.parametrize(
    ("name", "prompt", "extra_args"),
    [
        ("audex_tts", {"prompt": "hello"}, {"cfg_scale": 2.0, "cfg_role": "cond"}),
        ("ming_flash_omni_image", {"prompt": "a ball", "modalities": ["image"], "negative_prompt": "blur"}, None),
    ],
)
def test_a_guided_request_is_refused_and_the_edge_is_named(
    name: str, prompt: dict[str, Any], extra_args: dict[str, Any] | None
) -> None:
    with pytest.raises(errors.EngineRejected, match="stage 0 -> stage 1") as caught:
        ask(name, prompt, extra_args)
    assert caught.value.param == "negative_prompt"


def test_later_stages_whose_prompts_are_no_mappings_are_not_asked() -> None:
    edges = (omni_edges.Edge(0, 1, omni_edges.PAYLOAD, ""), omni_edges.Edge(1, 2, omni_edges.PAYLOAD, ""))
    Handover(edges, 1, 2).check_alone("one", object(), SimpleNamespace(extra_args=None))


def test_a_request_that_ends_before_the_later_stage_may_be_guided() -> None:
    ask("audex_tts", {"prompt": "hello"}, {"cfg_scale": 2.0, "cfg_role": "cond"}, last_stage=0)
