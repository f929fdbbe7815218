"""The small trained checkpoint: complete, small, and laid out in tokens as vLLM-Omni reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.cases import CASES
from tests.engines.reference import NativeReference

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["a red circle", "一张海报，上面写着「你好，世界」", "🦉 “Brille” \t\n  ملصق", "ﬁ é e\u0301", "<sop>1 2<eop>"]
SIZES = [(8, 8), (6, 10), (10, 6), (1, 1), (16, 16), (2, 7), (3, 5)]

_TOKENS = """
import json, sys
from transformers import PreTrainedTokenizerFast as Tokenizer
from examples.tiny_glm_image import layout, parts
asked, prompts = json.loads(sys.argv[2])
tokens = Tokenizer.from_pretrained(sys.argv[1])
ids = [tokens.encode(text, add_special_tokens=False) for text in prompts]
whole = [tokens.encode(text + layout.suffix(*size), add_special_tokens=False) for text, size in asked]
print(json.dumps({"back": [tokens.decode(one) for one in ids], "lowest": min(map(min, ids)), "whole": whole}))
"""

_LAYOUT = """
import json, sys, types
import vllm_omni
from vllm_omni.model_executor.models.glm_image.glm_image_ar import GlmImageForConditionalGeneration as Model
from vllm_omni.model_executor.stage_input_processors.glm_image import compute_max_tokens
from examples.tiny_glm_image import layout
prompt = [20, 30, 40, 16384]
config = types.SimpleNamespace(image_token_id=1, image_start_token_id=16384, image_end_token_id=16385)
found = []
for rows, columns in json.loads(sys.argv[2]):
    high, wide = layout.preview(rows, columns)
    size = {"target_h": 32 * rows, "target_w": 32 * columns}
    theirs, _ = Model.get_mrope_input_positions(types.SimpleNamespace(config=config), prompt, **size)
    ours = layout.image_positions(rows, columns) + len(prompt)
    same = bool((theirs[:, len(prompt) : -1] == ours).all())
    found.append([compute_max_tokens(32 * rows, 32 * columns) == high * wide + rows * columns + 1, same])
print(json.dumps(found))
"""


def run(program: str, checkpoint: Path, *arguments: Any) -> Any:
    """What a program prints last, as JSON; this process stays without torch."""
    command = [sys.executable, "-W", "ignore", "-c", program, str(checkpoint), *map(json.dumps, arguments)]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_it_has_the_parts_of_the_real_one(checkpoint: Path) -> None:
    parts = {path.name for path in checkpoint.iterdir()}
    folders = {"processor", "scheduler", "text_encoder", "tokenizer", "transformer", "vae", "vision_language_encoder"}
    assert parts == {"model_index.json", *folders}
    assert json.loads((checkpoint / "model_index.json").read_text())["_class_name"] == "GlmImagePipeline"


def test_its_weights_are_at_most_16_mb(checkpoint: Path) -> None:
    assert sum(path.stat().st_size for path in checkpoint.rglob("*.safetensors")) <= 16_000_000


@pytest.mark.engine
def test_prompts_tokenise_as_in_vllm_omni_and_come_back(checkpoint: Path, native_reference: NativeReference) -> None:
    asked = [(case.prompt, (case.height // 32, case.width // 32)) for case in CASES]
    found = run(_TOKENS, checkpoint / "processor", [asked, PROMPTS])
    assert found["back"] == PROMPTS
    assert found["lowest"] >= 16512
    assert found["whole"] == [native_reference.tokens[case.name]["prompt_token_ids"] for case in CASES]


@pytest.mark.engine
def test_grids_and_positions_are_those_of_vllm_omni(checkpoint: Path) -> None:
    assert run(_LAYOUT, checkpoint, SIZES) == [[True, True]] * len(SIZES)
