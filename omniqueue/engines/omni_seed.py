"""Seeding the generators of an engine's worker process, for models that draw from them and not from a request's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

#: What ``worker_extension_cls`` of a stage is set to; vLLM mixes the class into its worker.
EXTENSION = "omniqueue.engines.omni_seed.SeededWorker"
#: The worker's method, by the name that ``collective_rpc`` takes.
METHOD = "seed_generator"
#: The same, of the one that answers whether the stage's model draws codes beside the tokens that are sampled.
OWN = "own_generators"


class SeededWorker:
    """A worker whose process's generators (Python's, numpy's, torch's on every device) can be set from outside."""

    def seed_generator(self, seed: int) -> None:
        """Set them all to ``seed``, of which numpy takes the low 32 bits."""
        import random

        import numpy
        import torch

        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def own_generators(self) -> bool:
        """Whether the model draws codes beside the sampled tokens; if so, each request gets a generator for them.

        vLLM-Omni's runner keeps one for every request with a ``tts_local_seed`` and offers it to the model, but some
        models draw from the process's generator all the same: then it stands in for that one.
        """
        runner = self.model_runner  # type: ignore[attr-defined]  # the worker's, with which this class is mixed
        if not getattr(runner, "has_talker_mtp", False):
            return False
        if "generator" not in inspect.signature(type(runner.model).talker_mtp).parameters:
            runner.talker_mtp = functools.partial(_drawing_from, runner.talker_mtp)
        return True


def flat(results: Any) -> list[Any]:
    """The workers' answers to a method, out of the lists by stage and replica that they come in."""
    return [one for inner in results for one in flat(inner)] if isinstance(results, list | tuple) else [results]


def _drawing_from(draw: Callable[..., Any], *args: Any, generator: Any = None, **named: Any) -> Any:
    """Call ``draw`` with the process's generator in the state of ``generator``, and move that one on."""
    import torch

    if generator is None:
        return draw(*args, **named)
    device = generator.device
    default = torch if device.type == "cpu" else torch.get_device_module(device)
    kept = default.get_rng_state()
    default.set_rng_state(generator.get_state())
    try:
        return draw(*args, **named)
    finally:
        generator.set_state(default.get_rng_state())
        default.set_rng_state(kept)
