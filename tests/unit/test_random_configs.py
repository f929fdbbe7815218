"""Whatever a stage config holds, it is loaded or refused with a ConfigError that names the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from omniqueue import configfile, errors, schema

_KEYS = (
    *schema.OWN,
    *schema.DEPLOY,
    *schema.SIZE,
    *schema.STAGE_OWN,
    *schema.STAGE_WRAPPER,
    *schema.RANGES,
    *schema.FAKE,
    *schema.PLATFORMS,
    *("stage_args", "stage_type", "from", "to", "parallel_config", "width", "height", "from_stage_0", "max_batch_size"),
)
_VALUES = (
    "fake",
    "vllm",
    "vllm_omni",
    "a.b:C",
    "glm_image",
    "qwen2_5_omni",
    "image",
    "diffusion",
    "llm_ar",
    "64x64",
    "0,1",
)

_words = st.sampled_from(_VALUES)
_scalars = st.one_of(_words, st.integers(-2, 3), st.booleans(), st.floats(), st.none(), st.text(max_size=5))
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(_KEYS), inner, max_size=6)),
    max_leaves=25,
)
_mappings = st.dictionaries(st.sampled_from(_KEYS), _values, max_size=5)


def _numbered(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Stages that are at least numbered and named, so that some get past the first checks."""
    return [{"engine": "fake", **stage, "stage_id": i} for i, stage in enumerate(found)]


def _outcome(file: Path) -> str:
    """What is known of a file: the text of the plan, or of the error."""
    try:
        pipeline = configfile.load(file)
    except errors.ConfigError as error:
        return error.message
    assert configfile.as_json(pipeline)["stages"]
    return configfile.as_text(pipeline)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(_mappings, st.lists(_mappings, max_size=3).map(_numbered))
@example({"size": {"default": "64x64", "max_side": 10}}, [{"stage_id": 0, "engine": "fake"}])
@example({"pipeline": "glm_image"}, [{"stage_id": 0, "engine_args": {"max_num_seqs": "a"}}])
@example({"pipeline": "glm_image"}, [{"stage_id": 1, "runtime": {"num_replicas": 2, "devices": "GPU-a"}}])
def test_random_yaml_is_loaded_or_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, top: dict[str, Any], stages: list[dict[str, Any]]
) -> None:
    file = tmp_path_factory.getbasetemp() / f"random-{os.getpid()}.yaml"
    file.write_text(yaml.safe_dump({"stages": stages, **top}), encoding="utf-8")
    assert str(file) in _outcome(file)
