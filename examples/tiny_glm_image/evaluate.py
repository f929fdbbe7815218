"""How often the tiny GLM-Image draws what it is asked: python -m examples.tiny_glm_image.evaluate.

Prompts of combinations and wordings that training never saw are drawn twice: over HTTP by omniqueue's two stage
workers, and by vLLM-Omni's own ``Omni`` in one process. The table has the part of pictures on which the evaluator
agrees with the prompt, and on true drawings. Two cores need half an hour for all 200 prompts.
"""

from __future__ import annotations

import argparse
import base64
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import yaml

from examples.tiny_glm_image import captions, chart, evaluator, world
from omniqueue import configfile, demo, pictures, up

HERE = Path(__file__).parent
CHECKPOINT = HERE / "checkpoint"
SIZES = ((256, 256), (320, 192))
SEED = 42
#: Requests on their way at once; the AR stage batches this many.
_CLIENTS = 8

Held = list[tuple[world.Scene, str]]
#: Pictures, uint8 (height, width, 3), by width and height.
Pictures = dict[tuple[int, int], list[Any]]


def ours(checkpoint: Path, held: Held) -> Pictures:
    """What omniqueue's workers draw, asked over HTTP."""
    options = up.Options(config="glm_image_tiny", port=demo.free_port(), model=str(checkpoint))
    with up.running(options, lambda line: None) as machine, ThreadPoolExecutor(_CLIENTS) as clients:
        name = machine.pipe.served_model_names[0]

        def draw(prompt: str, size: tuple[int, int]) -> Any:
            body = {"model": name, "prompt": prompt, "size": f"{size[0]}x{size[1]}", "seed": SEED}
            answer = demo.post(options.port, "/v1/images/generations", {**body, "response_format": "b64_json"})
            picture = pictures.decode(base64.b64decode(answer["data"][0]["b64_json"]), "picture")
            return numpy.frombuffer(picture.buffer, numpy.uint8).reshape(picture.shape)

        return {size: list(clients.map(draw, [text for _, text in held], [size] * len(held))) for size in SIZES}


def native(checkpoint: Path, held: Held) -> Pictures:
    """What vLLM-Omni's own ``Omni`` draws, in a process that knows nothing of omniqueue but its CPU platform."""
    pipe = configfile.load("glm_image_tiny.yaml", model=str(checkpoint))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stages = [dict(stage.deploy) for stage in pipe.stages]
        (folder / "deploy.yaml").write_text(yaml.safe_dump({**pipe.deploy, "stages": stages}))
        (folder / "prompts.txt").write_text("\n".join(text for _, text in held))
        # What a user would set for any vLLM on a small machine.
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        command = [sys.executable, str(HERE / "native.py"), str(checkpoint), name, str(SEED)]
        subprocess.run([*command, *(f"{width}x{height}" for width, height in SIZES)], env=environment, check=True)
        drawn: Pictures = {}
        for width, height in SIZES:
            with numpy.load(folder / f"{width}x{height}.npz") as stored:
                drawn[width, height] = list(stored["pictures"])
        return drawn


def agreement(drawn: list[Any], held: Held) -> dict[str, float]:
    """Part of the pictures that show what was asked, field by field."""
    agreed = [evaluator.read(picture).agrees(scene) for picture, (scene, _) in zip(drawn, held, strict=True)]
    return {field: sum(one[field] for one in agreed) / len(agreed) for field in evaluator.FIELDS}


def row(name: str, size: tuple[int, int], shares: dict[str, float]) -> str:
    """A line of the table, in per cent."""
    cells = " | ".join(f"{100 * shares[field]:.1f} %" for field in evaluator.FIELDS)
    return f"| {name} | {size[0]}x{size[1]} | {cells} |"


def main() -> None:
    """Draw, read, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--count", type=int, default=200, help="prompts at each size (default: %(default)s)")
    parser.add_argument("--no-native", action="store_true", help="leave vLLM-Omni in one process out")
    parser.add_argument("--sheet", type=Path, help="write 24 of the pictures with their prompts to this PNG")
    options = parser.parse_args()
    held = captions.held_out_prompts(200)[:: max(1, 200 // options.count)][: options.count]
    print("| drawn by | size | " + " | ".join(evaluator.FIELDS) + " |\n|---|---|---|---|---|---|")
    for size in SIZES:
        wrong = evaluator.own_error([scene for scene, _ in held], size[1], size[0])
        print(row("true drawings", size, {field: 1.0 - share for field, share in wrong.items()}))
    mine = ours(options.checkpoint, held)
    for size in SIZES:
        print(row("omniqueue", size, agreement(mine[size], held)), flush=True)
    if options.sheet:
        known = [index for index, (_, text) in enumerate(held) if text.isascii()]  # Pillow's font has no Chinese
        picked = known[:: max(1, len(known) // 24)][:24]
        titles = [held[index][1] for index in picked]
        chart.sheet([mine[SIZES[0]][index] for index in picked], titles, 6, 160).save(options.sheet, optimize=True)
    if not options.no_native:
        theirs = native(options.checkpoint, held)
        for size in SIZES:
            print(row("native Omni", size, agreement(theirs[size], held)))
        pairs = [pair for size in SIZES for pair in zip(mine[size], theirs[size], strict=True)]
        same = sum(numpy.array_equal(*pair) for pair in pairs)
        print(f"{same} of {len(pairs)} pictures are the same in every pixel.")


if __name__ == "__main__":
    main()
