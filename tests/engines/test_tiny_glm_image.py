"""The tiny checkpoint: complete, the same for a seed, and never half written."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from omniqueue import errors
from omniqueue.engines import tiny_glm_image
from tests.engines import reference

PROMPTS = ["a red circle", "一张海报，上面写着「你好，世界」", "🦉 “Brille” \t\n  ملصق", "ﬁ é e\u0301", "<sop>1 2<eop>"]


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(errors.ConfigError, match="not an empty folder"):
        tiny_glm_image.write(tmp_path)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seed: int, report: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_glm_image, "_pipeline", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tiny_glm_image.write(tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []


def digests(checkpoint: Path) -> dict[str, str]:
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    return {str(path.relative_to(checkpoint)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.engine
class TestWritten:
    def test_it_has_the_parts_of_the_real_one(self, checkpoint: Path) -> None:
        parts = {path.name for path in checkpoint.iterdir()}
        assert parts == {
            "model_index.json",
            "processor",
            "scheduler",
            "text_encoder",
            "tokenizer",
            "transformer",
            "vae",
            "vision_language_encoder",
        }
        index = json.loads((checkpoint / "model_index.json").read_text())
        assert index["_class_name"] == "GlmImagePipeline"

    def test_it_is_small(self, checkpoint: Path) -> None:
        assert sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()) < 40 << 20

    def test_the_same_seed_gives_the_same_files(self, checkpoint: Path, tmp_path: Path) -> None:
        assert digests(reference.write_checkpoint(tmp_path / "again")) == digests(checkpoint)

    def test_every_prompt_tokenises_and_comes_back(self, checkpoint: Path) -> None:
        code = (
            "import json, sys; from transformers import PreTrainedTokenizerFast as T\n"
            "t = T.from_pretrained(sys.argv[1]); out = []\n"
            "for p in json.loads(sys.argv[2]):\n"
            "    ids = t.encode(p, add_special_tokens=False); out.append([t.decode(ids), min(ids)])\n"
            "print(json.dumps(out))"
        )
        command = [sys.executable, "-c", code, str(checkpoint / "processor"), json.dumps(PROMPTS)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        for prompt, (back, lowest) in zip(PROMPTS, json.loads(done.stdout), strict=True):
            assert back == prompt
            assert lowest >= tiny_glm_image.VISION_VOCABULARY
