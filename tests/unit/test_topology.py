"""Finding out which pipeline a model is, without importing anything that knows models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omniqueue import configfile, errors, topology


@pytest.fixture(autouse=True)
def _no_downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


def checkpoint(folder: Path, name: str, **files: Any) -> str:
    place = folder / name
    place.mkdir(parents=True)
    for file, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (place / f"{file}.json").write_text(text, encoding="utf-8")
    return str(place)


def test_the_table_is_whole_and_consistent() -> None:
    table = topology.table()
    assert len(table["pipelines"]) >= 60
    for key, entry in table["pipelines"].items():
        ids = [stage["stage_id"] for stage in entry["stages"]]
        assert ids == list(range(len(ids))), key
        assert all(source < stage["stage_id"] for stage in entry["stages"] for source in stage["input_sources"]), key
        assert any(stage["final_output"] for stage in entry["stages"]), key
    assert table["pipelines"]["glm_image"]["size_multiple"] == 32
    assert set(table["diffusion_classes"].values()) == {"image", "video", "audio"}


@pytest.mark.parametrize(
    ("files", "key"),
    [
        ({"config": {"model_type": "qwen3_tts"}}, "qwen3_tts"),
        ({"config": {"architecture": "voxcpm2"}}, "voxcpm2"),
        ({"config": {"model_type": "qwen2", "architectures": ["MiMoAudioModel"]}}, "mimo_audio"),
        ({"config": {"model_type": "bagel", "architectures": ["Other"]}}, "bagel"),
        ({"model_index": {"_class_name": "GlmImagePipeline"}}, "glm_image"),
        ({"model_index": {"_class_name": "WanDMDPipeline"}}, "wan2_2_ti2v"),
        ({"model_index": {"_class_name": "QwenImagePipeline"}}, None),
        ({"config": {"model_type": "qwen3_tts"}, "model_index": {"_class_name": "GlmImagePipeline"}}, "qwen3_tts"),
    ],
)
def test_a_checkpoint_says_what_it_is(tmp_path: Path, files: dict[str, Any], key: str | None) -> None:
    found = topology.by_model(checkpoint(tmp_path, "weights", **files))
    assert found is not None
    assert found.key == key
    assert "weights" in found.found_by


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"config": "not json"},
        {"config": "[1]"},
        {"config": "[" * 100_000},
        {"config": {"model_type": 7, "architectures": "text"}},
        {"config": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}},
        {"config": {"model_type": "x", "architectures": ["MiniCPMO", 5]}},
        {"model_index": {"_class_name": ["x"]}},
        {"model_index": {"_class_name": "UnknownPipeline"}},
    ],
)
def test_a_checkpoint_that_says_nothing_known_is_not_guessed_at(tmp_path: Path, files: dict[str, Any]) -> None:
    assert topology.by_model(checkpoint(tmp_path, "weights", **files)) is None


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ("zai-org/GLM-Image", "glm_image"),
        ("/models/cosyvoice3-0.5b/", "cosyvoice3"),
        ("FunAudioLLM/CosyVoice3", "cosyvoice3"),
        ("glm-image-bucket/other", None),
        ("Qwen/Qwen2.5-Omni-7B", None),
        ("ming-flash-omni-tts", "ming_flash_omni_tts"),
    ],
)
def test_a_name_is_matched_by_its_last_part_and_the_longest_key(model: str, key: str | None) -> None:
    found = topology.by_model(model)
    assert (found.key if found else None) == key


def test_a_hub_id_that_was_downloaded_is_looked_at(tmp_path: Path) -> None:
    root = tmp_path / "hf" / "hub" / "models--Qwen--Qwen3-Omni"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("abc123\n", encoding="utf-8")
    checkpoint(root / "snapshots", "abc123", config={"model_type": "qwen3_omni_moe"})
    found = topology.by_model("Qwen/Qwen3-Omni")
    assert found is not None
    assert found.key == "qwen3_omni_moe"


def test_a_diffusers_model_without_a_key_is_one_diffusion_stage(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, "qwen-image", model_index={"_class_name": "QwenImagePipeline"})
    file = tmp_path / "mine.yaml"
    file.write_text(f"model: {model}\nstages: [{{stage_id: 0, ulysses_degree: 2, devices: '0,1'}}]\n", encoding="utf-8")
    pipeline = configfile.load(file)
    (stage,) = pipeline.stages
    assert (pipeline.name, stage.name, stage.execution_type, stage.final_output_type) == (
        "mine",
        "diffusion",
        "diffusion",
        "image",
    )
    assert "pipeline" not in pipeline.deploy
    assert "model_index.json" in pipeline.notes[0]


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("glm_image.yaml", "stages: [{stage_id: 0}]\n", "glm_image"),
        ("audio8_tts.yaml", "engine: x\n", None),
        ("step_audio_2_mine.yaml", "stages: []\n", "step_audio_2"),
        ("other.yaml", "stages: [{stage_id: 0, model_arch: GlmImageForConditionalGeneration}]\n", "glm_image"),
        ("other.yaml", "stages: [{stage_id: 0, model_class_name: WanPipeline}]\n", "other"),
        (
            "own.yaml",
            "stages: [{stage_id: 0, execution_type: diffusion, final_output: true, final_output_type: image}]\n",
            "own",
        ),
        (
            "own.yaml",
            "pipeline: out_of_tree\nstages: [{stage_id: 0, execution_type: llm_ar, final_output: true}]\n",
            "out_of_tree",
        ),
    ],
)
def test_without_a_model_the_file_tells(tmp_path: Path, name: str, text: str, key: str | None) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    if key is None:
        with pytest.raises(errors.ConfigError):
            configfile.load(file)
    else:
        assert configfile.load(file).name == key


def test_the_model_wins_over_the_files_name_and_the_key_over_both(tmp_path: Path) -> None:
    file = tmp_path / "glm_image.yaml"
    file.write_text("stages: []\n", encoding="utf-8")
    assert configfile.load(file, model="x/cosyvoice3").name == "cosyvoice3"
    file.write_text("pipeline: qwen2_5_omni\n", encoding="utf-8")
    assert configfile.load(file, model="x/cosyvoice3").name == "qwen2_5_omni"
