"""A config whose stages hand over what queues cannot carry is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from omniqueue import cli, configfile, errors

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
