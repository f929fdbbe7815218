"""The requests that vLLM-Omni in one go and omniqueue stage by stage must answer alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One request for one picture; sizes in pixels."""

    name: str
    prompt: str
    width: int = 64
    height: int = 64
    seed: int = 42
    steps: int = 4
    guidance: float = 1.5
    negative_prompt: str | None = None

    def job(self) -> dict[str, Any]:
        """The accepted request, as the router would write it into the job record."""
        fields = {
            "kind": "image",
            "prompt": self.prompt,
            "negative_prompt": self.negative_prompt,
            "n": 1,
            "seed": self.seed,
            "width": self.width,
            "height": self.height,
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance,
        }
        return {name: value for name, value in fields.items() if value is not None}


# GLM-Image's diffusion stage reads of the prompt only what stands in quotation marks, so most cases have some.
CASES = (
    Case("square", 'a red ball on a blue sea with the number "4"'),
    Case("chinese", "一张海报，上面写着「你好，世界」", seed=7),
    Case("tall", "a lighthouse called 'Ada'", height=128, seed=11, steps=3),
    Case("wide", 'a train, "EXPRESS" on its side', width=160, height=96, steps=6, guidance=3.0),
    Case("no guidance", "a plain grey wall", guidance=1.0, seed=0),
    Case("negative", 'a blue square, "sale"', negative_prompt="blurry, text", seed=2**40 + 1, guidance=4.0),
    Case("emoji", "🦉 wearing “Brille”, 夜", width=96, height=96, steps=2, seed=123456789),
    Case("smallest", "x", width=32, height=32, steps=1),
)
