"""stage_configs/README.md names every key there is, and its examples are real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from omniqueue import configfile, schema, stages, topology

README = (topology.shipped() / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "key",
    sorted({*schema.OWN, *schema.DEPLOY, *schema.STAGE_OWN, *schema.STAGE_WRAPPER, *schema.FAKE, *schema.PLATFORMS})
    + [f"size.{key}" for key in schema.SIZE]
    + [f"video.{key}" for key in schema.VIDEO],
)
def test_every_key_is_explained(key: str) -> None:
    assert f"`{key}`" in README


def test_every_shipped_file_is_listed() -> None:
    for file in topology.shipped().glob("*.yaml"):
        assert f"`{file.name}`" in README


def test_the_examples_load(tmp_path: Path) -> None:
    smallest, routed, overlay = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL))
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(smallest), encoding="utf-8")
    assert len(configfile.load(file).stages) == 2
    file.write_text(yaml.safe_dump(routed), encoding="utf-8")
    assert configfile.load(file).name == "qwen2_5_omni"
    file.write_text(yaml.safe_dump({"base_config": "glm_image.yaml", **overlay}), encoding="utf-8")
    assert configfile.load(file).name == "glm_image"


def test_the_widths_it_promises_are_the_defaults() -> None:
    assert stages.MAX_NUM_SEQS == {"diffusion": 1, "llm": 16, "fake": 16, "user": 1}
    assert "`vllm_omni` diffusion 1, language models 16, `fake` 16, a class of your own 1" in README
