"""Runs vLLM-Omni's own ``Omni`` over the cases and stores what its stages made: python native.py MODEL DEPLOY OUT.

It imports nothing of omniqueue; that it runs on a CPU at all shows that vLLM-Omni finds omniqueue's platform by itself.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def load_cases() -> Any:
    """The module beside this script, whose folder Python looks in first."""
    return import_module("cases")


def watch_hand_over(glm_image: Any) -> list[Any]:
    """Keep every output of the first stage as it passes to the second: ``Omni`` itself does not return it."""
    seen: list[Any] = []
    original = glm_image.ar2diffusion

    def ar2diffusion(source_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        seen.append(source_outputs[0])
        return original(source_outputs, *args, **kwargs)

    glm_image.ar2diffusion = ar2diffusion
    return seen


def prompt_of(case: Any) -> dict[str, Any]:
    size = {"target_h": case.height, "target_w": case.width}
    prompt = {"prompt": case.prompt, "modalities": ["image"], "mm_processor_kwargs": size}
    prompt |= {"height": case.height, "width": case.width}
    if case.negative_prompt is not None:
        prompt["negative_prompt"] = case.negative_prompt
    return prompt


def params_of(omni: Any, case: Any, limit: int, tell_size: bool) -> list[Any]:
    tokens, diffusion = (params.clone() for params in omni.default_sampling_params_list)
    tokens.max_tokens, tokens.min_tokens, tokens.seed = limit, limit - 1, case.seed
    if tell_size:
        tokens.extra_args = {"target_h": case.height, "target_w": case.width}
    diffusion.height, diffusion.width, diffusion.seed = case.height, case.width, case.seed
    diffusion.num_inference_steps, diffusion.guidance_scale = case.steps, case.guidance
    return [tokens, diffusion]


def main(model: str, deploy: str, out: str) -> None:
    import numpy
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.model_executor.stage_input_processors import glm_image
    from vllm_omni.platforms import current_omni_platform

    seen = watch_hand_over(glm_image)
    omni = Omni(model=model, deploy_config=deploy)
    cases = load_cases().CASES
    pixels, tokens = {}, {}
    for name, case, tell_size in [(case.name, case, True) for case in cases] + [("size untold", cases[3], False)]:
        limit = glm_image.compute_max_tokens(case.height, case.width)
        params = params_of(omni, case, limit, tell_size)
        [answer] = omni.generate([prompt_of(case)], params, use_tqdm=False)
        pixels[name] = numpy.asarray(answer.images[0].convert("RGB"))
        first = seen.pop()
        tokens[name] = {
            "token_ids": list(first.outputs[0].cumulative_token_ids),
            "prompt_token_ids": list(first.prompt_token_ids),
        }
    ours = sorted(name for name in sys.modules if name.startswith("omniqueue."))
    facts = {"platform": type(current_omni_platform).__name__, "ours": ours}
    numpy.savez(Path(out) / "pixels.npz", **pixels)
    (Path(out) / "tokens.json").write_text(json.dumps({"tokens": tokens, "facts": facts}))
    omni.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
