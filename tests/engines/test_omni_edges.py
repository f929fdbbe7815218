"""What travels on an edge is read from the pipeline's description; the registry's pipelines are the examples."""

from __future__ import annotations

from typing import Any

import pytest

from omniqueue.engines import omni_edges

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


def registered(name: str) -> Any:
    from omniqueue.engines import environment

    environment.prepare("")
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES

    return OMNI_PIPELINES[name]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("qwen2_5_omni", [omni_edges.PAYLOAD, omni_edges.PAYLOAD]),
        ("aura_omni", [omni_edges.OUTPUT, omni_edges.OUTPUT, omni_edges.PAYLOAD]),
        ("personaplex", [omni_edges.PAYLOAD]),
        ("glm_image", [omni_edges.OUTPUT]),
        ("minimax_h3_disaggregated", [omni_edges.PARAMETERS]),
        ("mammoth_moda2", [omni_edges.OUTPUT]),
        ("ming_flash_omni", [omni_edges.TOKENS]),
        ("step_audio_2", [omni_edges.TOKENS]),
        ("voxtral_tts", [omni_edges.CHUNKS]),
        ("moss_tts_local", [omni_edges.CHUNKS]),
        ("bagel", [omni_edges.CACHE]),
        ("audex_tts", [omni_edges.PAYLOAD]),
        ("bagel_single_stage", []),
    ],
)
def test_the_kind_follows_from_the_description(name: str, kinds: list[str]) -> None:
    found = omni_edges.edges(registered(name))
    assert [edge.kind for edge in found] == kinds
    assert [edge.served for edge in found] == [
        kind in (omni_edges.TOKENS, omni_edges.OUTPUT, omni_edges.PAYLOAD, omni_edges.CACHE) for kind in kinds
    ]


def test_a_payload_has_the_hook_that_packs_it() -> None:
    first, second = omni_edges.edges(registered("qwen2_5_omni"))
    assert first.hook is not None
    assert omni_edges.load(first.hook).__name__ == "thinker2talker_full_payload"
    assert second.hook is not None
    assert omni_edges.load(second.hook).__name__ == "talker2code2wav_full_payload"
    assert str(second) == "stage 1 -> stage 2"


@pytest.mark.parametrize(
    ("name", "connects"),
    [("qwen2_5_omni", [True, True]), ("personaplex", [False]), ("aura_omni", [False, False, True]), ("bagel", [False])],
)
def test_a_payload_can_go_by_connector_where_the_next_stages_worker_waits_for_it(
    name: str, connects: list[bool]
) -> None:
    assert [edge.connects for edge in omni_edges.edges(registered(name))] == connects


@pytest.mark.parametrize("deploys", [{0: {"need_send_cache": True}}, {1: {"need_recv_cache": True}}], ids=str)
def test_a_deploy_file_can_ask_for_the_cache(deploys: dict[int, Any]) -> None:
    source = registered("hunyuan_image_3_moe")
    [plain] = omni_edges.edges(source)
    [cached] = omni_edges.edges(source, {stage_id: {"omni_kv_config": asked} for stage_id, asked in deploys.items()})
    assert (plain.kind, cached.kind) == (omni_edges.OUTPUT, omni_edges.CACHE)


def test_pages_that_vllm_moves_itself_are_not_served_and_the_edge_says_what_is() -> None:
    [edge] = omni_edges.edges(
        registered("hunyuan_image_3_moe"), {1: {"kv_transfer_config": {"kv_role": "kv_consumer"}}}
    )
    assert not edge.served
    assert edge.instead is not None
    assert "omni_kv_config" in edge.instead


def test_guidance_that_a_file_asks_for_by_default_takes_companions_that_are_not_served() -> None:
    source = registered("minimax_music3")
    [plain] = omni_edges.edges(source)
    guided = {"cfg_role": "cond", "cfg_scale": 1.5}
    [asked] = omni_edges.edges(source, {0: {"default_sampling_params": {"extra_args": guided}}})
    assert (plain.kind, asked.kind) == (omni_edges.OUTPUT, omni_edges.COMPANIONS)
    assert "expand_cfg_prompts" in asked.reason


@pytest.mark.parametrize(
    ("extra_args", "made"),
    [
        (None, False),
        ({"cfg_scale": 1.0, "cfg_role": "cond"}, False),
        ({"cfg_scale": 3.0, "cfg_role": "cond", "cfg_pair_id": "a", "cfg_null_prompt": "x"}, True),
        ({"cfg_scale": 3.0, "cfg_role": "cond"}, True),  # guided, and the pair is missing
    ],
    ids=str,
)
def test_whether_a_request_has_companions_is_asked_of_the_pipelines_own_function(
    extra_args: dict[str, Any] | None, made: bool
) -> None:
    [edge] = omni_edges.edges(registered("audex_tts"))
    assert edge.companions is not None
    assert omni_edges.makes_companions(edge.companions, {"prompt": "hello"}, extra_args) == made


def test_alternatives_are_pipelines_of_the_same_model() -> None:
    assert omni_edges.alternatives(registered("bagel")) == ("bagel_think", "bagel_single_stage")
    assert "audex_thinker_only" in omni_edges.alternatives(registered("audex_tts"))
    assert omni_edges.alternatives(registered("moss_tts_local")) == ()
