"""How fast the tiny GLM-Image draws: ``python -m bench.pictures`` starts everything and prints a table.

Start-up is from the command to a ready router; memory is that of all processes together once pictures were drawn, with
shared pages counted once (PSS). Pictures are 256 x 256 pixels, eight denoising steps.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from omniqueue import demo, up


def memory_bytes() -> int:
    """What this process and everything below it holds."""
    own = psutil.Process()
    return sum(process.memory_full_info().pss for process in (own, *own.children(recursive=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=24, help="pictures at once (default: %(default)s)")
    options = parser.parse_args()
    began = time.monotonic()
    wanted = up.Options(config="glm_image_tiny", port=demo.free_port(), model=str(demo.tiny_model()))
    with up.running(wanted, print) as machine:
        start_s = time.monotonic() - began
        body = {"model": machine.pipe.served_model_names[0], "prompt": "A red apple on a white table"}

        def draw(seed: int) -> float:
            asked = time.monotonic()
            demo.post(wanted.port, "/v1/images/generations", {**body, "size": "256x256", "seed": seed})
            return time.monotonic() - asked

        draw(0)
        alone_s = min(draw(seed) for seed in range(1, 5))
        began = time.monotonic()
        with ThreadPoolExecutor(options.count) as clients:
            list(clients.map(draw, range(options.count)))
        together_s = (time.monotonic() - began) / options.count
        held = memory_bytes()
    print(
        f"| start-up | memory | one after another | {options.count} at once |\n|---|---|---|---|\n"
        f"| {start_s:.0f} s | {held / 1e9:.1f} GB | {60 / alone_s:.0f} pictures a minute, {alone_s:.1f} s each "
        f"| {60 / together_s:.0f} pictures a minute |"
    )


if __name__ == "__main__":
    main()
