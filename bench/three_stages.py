"""The tiny Qwen2.5-Omni of the tests as ``omniqueue up`` serves it: thinker, talker and vocoder, real engines all."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from tests.engines import checkpoints, reference
from tests.pipeline.conftest import Product, started

NAME = "qwen2_5_omni"
#: What prompts are made of; the checkpoint's tokenizer has learned these.
_WORDS = ("hello", "to", "the", "nice", "world", "a", "red", "ball", "on", "blue", "sea", "helpful", "voice")


def written(folder: Path) -> Path:
    """The checkpoint, made in a process of its own: importing the libraries takes memory that nobody gives back."""
    checkpoint = folder / "checkpoint"
    command = [sys.executable, "-m", "tests.engines.checkpoints", NAME, str(checkpoint)]
    subprocess.run(command, check=True, env=reference.environment(), timeout=300, stderr=subprocess.DEVNULL)
    return checkpoint


def config(folder: Path, tokens: int, codes: int) -> Path:
    """The tests' stage config with a thinker of at most ``tokens`` tokens and a talker of ``codes``."""
    limits = [
        {"stage_id": stage_id, "default_sampling_params": {"max_tokens": limit}}
        for stage_id, limit in enumerate((tokens, codes))
    ]
    path = folder / "stages.yaml"
    path.write_text(yaml.safe_dump({"base_config": str(checkpoints.config(NAME)), "stages": limits}))
    return path


@contextlib.contextmanager
def served(folder: Path, checkpoint: Path, config_path: Path) -> Iterator[Product]:
    """All of it, ready for requests."""
    place = folder / "up"
    place.mkdir()
    with started(checkpoint, place, str(config_path)) as product:
        yield product


def prompts(count: int, seed: int) -> Sequence[str]:
    """Conversations of one turn, as the thinker was taught to read them: the same words, each time in another order.

    So all are equally long. Engines keep kernels for every length of a batch that they have met, which are many where
    lengths differ, and would look like memory that is lost.
    """
    dice = random.Random(seed)
    said = [" ".join(("say", *dice.sample(_WORDS, len(_WORDS)))) for _ in range(count)]
    return [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in said]
