"""A config whose stages hand over what queues cannot carry is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from omniqueue import cli, configfile, errors, handover

PAGES = "has vLLM's own connector move key-value pages from worker to worker, which queues do not carry; leave it out"


def refused(tmp_path: Path, text: str) -> str:
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(errors.ConfigError) as caught:
        configfile.load(file)
    return caught.value.message


@pytest.mark.parametrize(
    ("pipeline", "reason", "instead"),
    [
        ("voxtral_tts", "pieces while it runs (async_chunk)", "vLLM-Omni itself serves it"),
        ("moss_tts_local", "pieces while it runs (async_chunk)", "vLLM-Omni itself serves it"),
        ("minimax_h3_disaggregated", "all stages' parameters (prepare_encoder_prompt)", "vLLM-Omni itself serves it"),
        ("minimax_music3", "beside each request, for guidance (expand_cfg_prompts)", "vLLM-Omni itself serves it"),
    ],
)
def test_a_pipeline_that_cannot_be_served_is_told_why_and_what_can(
    tmp_path: Path, pipeline: str, reason: str, instead: str
) -> None:
    said = refused(tmp_path, f"pipeline: {pipeline}\nstages: []\n")
    assert f"mine.yaml:1: pipeline: is {pipeline}, which queues cannot carry: stage 0 -> stage 1: " in said
    assert reason in said
    assert instead in said


def test_pages_that_only_the_file_asks_for_are_refused_at_their_lines(tmp_path: Path) -> None:
    text = """
pipeline: hunyuan_image_3_moe
stages:
  - {stage_id: 0, kv_transfer_config: {kv_role: kv_producer}}
  - {stage_id: 1, engine_extras: {kv_transfer_config: {kv_role: kv_consumer}}}
"""
    said = refused(tmp_path, text)
    assert f"mine.yaml:4: stages[0].kv_transfer_config: {PAGES}" in said
    assert f"mine.yaml:5: stages[1].engine_extras.kv_transfer_config: {PAGES}" in said


@pytest.mark.parametrize(
    "text",
    [
        "pipeline: hunyuan_image_3_moe\nstages: [{stage_id: 0, omni_kv_config: {need_send_cache: true}}]\n",
        "pipeline: bagel\nstages: []\n",
        "pipeline: bagel_single_stage\nstages: [{stage_id: 0}]\n",
        "pipeline: voxtral_tts\nstages: [{stage_id: 0, engine: fake}, {stage_id: 1, engine: fake}]\n",
    ],
    ids=["a cache", "a cache and companions", "one stage", "other engines"],
)
def test_what_queues_carry_is_not_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    assert configfile.load(file).stages


def test_validate_says_it_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("pipeline: voxtral_tts\nstages: []\n", encoding="utf-8")
    assert cli.main(["validate", str(file)]) == 2
    assert "pieces while it runs" in capsys.readouterr().err


# -- edges by connector ------------------------------------------------------------------------------------------------

SPEECH = """
pipeline: qwen2_5_omni
stages:
  - {stage_id: 0%s}
  - {stage_id: 1%s}
  - {stage_id: 2}
"""
FIRST = "edges: [{from: 0, to: 1, route: connector}]\n"
BOTH = "edges: [{from: 0, to: 1, route: connector}, {from: 1, to: 2, route: connector}]\n"
STORE = "connectors: {store: {name: MooncakeStoreConnector, extra: {host: 10.0.0.1}}}\n"


def routed(tmp_path: Path, text: str) -> dict[tuple[int, int], dict[str, object]]:
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    pipe = configfile.load(file)
    return handover.connectors(pipe.deploy, {stage.stage_id: stage.deploy for stage in pipe.stages})


def test_an_edge_goes_by_reference_unless_the_file_routes_it_whatever_connectors_it_names(tmp_path: Path) -> None:
    named = SPEECH % (", output_connectors: {to_stage_1: store}", "") + STORE
    assert routed(tmp_path, named) == {}
    assert routed(tmp_path, named + "edges: [{from: 0, to: 1}, {from: 1, to: 2, route: reference}]\n") == {}


def test_an_edge_by_connector_has_the_one_that_either_stage_names_or_shared_memory(tmp_path: Path) -> None:
    shared = {"name": "SharedMemoryConnector", "extra": {}}
    assert routed(tmp_path, SPEECH % ("", "") + BOTH) == {(0, 1): shared, (1, 2): shared}
    [first, _] = configfile.load(tmp_path / "mine.yaml").notes
    assert first.startswith("stage 0 -> stage 1 goes by SharedMemoryConnector: a job fails ")
    for stages in ((", output_connectors: {to_stage_1: store}", ""), ("", ", input_connectors: {from_stage_0: store}")):
        found = routed(tmp_path, SPEECH % stages + STORE + FIRST)
        assert found == {(0, 1): {"name": "MooncakeStoreConnector", "extra": {"host": "10.0.0.1"}}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pipeline: glm_image\n" + FIRST, "stage 0 -> stage 1 has nothing that vLLM-Omni's own workers could hand"),
        ("pipeline: personaplex\n" + FIRST, "stage 0 -> stage 1 has nothing that vLLM-Omni's own workers could hand"),
        (
            SPEECH % ("", "") + "edges: [{from: 0, to: 2, route: connector}]\n",
            "stage 0 -> stage 2 has nothing that vLLM-Omni's own workers could hand to each other",
        ),
        (SPEECH % (", engine: fake", "") + FIRST, "is for two stages on vllm_omni"),
        (SPEECH % ("", "") + "model_runner: v2\n" + FIRST, "set it to v1"),
        (
            SPEECH % (", output_connectors: {to_stage_1: {name: NixlConnector}}", "") + FIRST,
            "cannot use NixlConnector: its reader has to know the sender's address",
        ),
        (SPEECH % (", output_connectors: {to_stage_1: store}", "") + STORE + BOTH, "name one for all of them"),
        (SPEECH % ("", "") + "edges: [{from: 0, to: 1, route: connecter}]\n", "did you mean connector?"),
    ],
    ids=["output", "nobody waits", "no edge", "fake", "v2", "addressed", "two", "typo"],
)
def test_an_edge_that_cannot_go_by_connector_is_refused_at_its_line(tmp_path: Path, text: str, reason: str) -> None:
    said = refused(tmp_path, text)
    assert "edges[0].route: " in said
    assert reason in said
