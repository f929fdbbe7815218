"""Draws prompts with vLLM-Omni's own ``Omni``: python native.py CHECKPOINT FOLDER SEED SIZE...

FOLDER has deploy.yaml and prompts.txt, and gets a file of pictures for each size. Nothing of omniqueue is imported
here; that it runs on a CPU at all shows that vLLM-Omni finds omniqueue's platform by itself.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy


def prompt_of(text: str, width: int, height: int) -> dict[str, Any]:
    """One prompt with its size in pixels, where vLLM-Omni's server puts it."""
    size = {"target_h": height, "target_w": width}
    return {"prompt": text, "modalities": ["image"], "mm_processor_kwargs": size, "height": height, "width": width}


def main(checkpoint: str, folder: str, seed: str, *sizes: str) -> None:
    """Draw every prompt at every size."""
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.model_executor.stage_input_processors.glm_image import compute_max_tokens

    omni = Omni(model=checkpoint, deploy_config=str(Path(folder, "deploy.yaml")))
    texts = Path(folder, "prompts.txt").read_text().splitlines()
    for name in sizes:
        width, height = map(int, name.split("x"))
        tokens, diffusion = (params.clone() for params in omni.default_sampling_params_list)
        tokens.max_tokens, tokens.seed = compute_max_tokens(height, width), int(seed)
        tokens.min_tokens = tokens.max_tokens - 1
        tokens.extra_args = {"target_h": height, "target_w": width}
        diffusion.height, diffusion.width, diffusion.seed = height, width, int(seed)
        answers = omni.generate([prompt_of(text, width, height) for text in texts], [tokens, diffusion], use_tqdm=False)
        by_number = sorted(answers, key=lambda answer: int(str(answer.request_id).split("_")[0]))
        pictures = numpy.stack([numpy.asarray(answer.images[0].convert("RGB")) for answer in by_number])
        numpy.savez(Path(folder, name), pictures=pictures)
    omni.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
