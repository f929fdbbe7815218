"""A training that goes on where it was interrupted: the same loop for all parts of the tiny GLM-Image."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from tqdm import tqdm

_SAVE_EVERY, _WARM_UP = 250, 100


@dataclass(frozen=True)
class Part:
    """One training: how many steps, how many pictures in each, and how fast."""

    name: str
    steps: int
    batch: int
    rate: float
    #: Length in steps of the average of weights that is kept; 0 keeps the last ones.
    average: int = 0


@dataclass(frozen=True)
class Run:
    """Where a training runs and keeps its things."""

    work: Path
    seed: int
    device: Any
    #: Steps to time in place of training, 0 to train.
    probe: int = 0

    def random(self, part: str, step: int) -> numpy.random.Generator:
        """The source of one step's batch, the same whenever the step is made."""
        return numpy.random.default_rng([self.seed, sum(part.encode()), step])


Loss = Callable[[int], Any]


def fit(run: Run, part: Part, model: Any, loss: Loss, check: Callable[[], dict[str, float]]) -> float:
    """Train ``model`` in place, or time it; returns seconds a step.

    ``loss`` makes the batch of a step and returns its loss, ``check`` measures on scenes held out.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=part.rate, weight_decay=0.01, betas=(0.9, 0.98))
    averaged = {name: value.clone() for name, value in model.state_dict().items()}
    state_file, curve_file = run.work / f"{part.name}.state", run.work / f"{part.name}.jsonl"
    first, spent_s = 0, 0.0
    if state_file.exists() and not run.probe:
        state = torch.load(state_file, map_location=run.device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        averaged, first, spent_s = state["averaged"], state["step"], state["spent_s"]
    last = min(part.steps, first + run.probe) if run.probe else part.steps
    began = time.monotonic()
    recent: list[float] = []
    model.train()
    bar = tqdm(range(first, last), desc=part.name, initial=first, total=last, mininterval=2.0)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = part.rate * _pace(step, part.steps)
        torch.manual_seed(run.seed * 1_000_003 + step)
        value = loss(step)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        _average(averaged, model, step, part.average)
        recent.append(float(value.detach()))
        if (step + 1) % 50 == 0:
            line = {"step": step + 1, "loss": sum(recent) / len(recent), "spent_s": spent_s + time.monotonic() - began}
            bar.set_postfix(loss=f"{line['loss']:.4f}")
            recent.clear()
            if (step + 1) % _SAVE_EVERY == 0 and not run.probe:
                line |= check()
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "averaged": averaged}
                state |= {"step": step + 1, "spent_s": line["spent_s"]}
                torch.save(state, state_file.with_suffix(".new"))
                state_file.with_suffix(".new").rename(state_file)
            if not run.probe:
                with open(curve_file, "a") as file:
                    file.write(json.dumps(line) + "\n")
    if run.probe:
        return (time.monotonic() - began) / run.probe
    model.load_state_dict(averaged)
    model.eval()
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, run.work / f"{part.name}.weights")
    state_file.unlink(missing_ok=True)
    return (spent_s + time.monotonic() - began) / part.steps


def _pace(step: int, steps: int) -> float:
    """Part of the full rate: up over the first steps, then down along a cosine."""
    return min(1.0, (step + 1) / _WARM_UP) * (0.03 + 0.97 * (0.5 + 0.5 * math.cos(math.pi * step / steps)))


@torch.no_grad()
def _average(averaged: dict[str, Any], model: Any, step: int, length: int) -> None:
    keep = min(1.0 - 1.0 / length, step / (step + 10)) if length else 0.0
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            averaged[name].mul_(keep).add_(value, alpha=1.0 - keep)
