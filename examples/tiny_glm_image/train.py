"""Trains the tiny GLM-Image: python -m examples.tiny_glm_image.train [--work DIR] [--out DIR] [--time].

Three parts in a row: the autoencoder, the autoregressive model, the diffusion transformer with its glyph encoder. Each
leaves its weights in the work folder and every 250 steps what it needs to go on, so that an interrupted run continues.
The same seed gives the same batches. A GPU is used when there is one; none is needed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from examples.tiny_glm_image import chart, fit, painter, parts, vae, writer


def write_checkpoint(run: fit.Run, out: Path) -> None:
    """Put the trained weights together in the Hub's layout."""
    torch.manual_seed(run.seed)
    language = parts.language_model(parts.tokenizer())
    words = writer.Writer(language)
    words.load_state_dict(torch.load(run.work / "ar.weights", weights_only=True))
    words.write_head(language)
    paints = painter.Painter()
    paints.load_state_dict(torch.load(run.work / "dit.weights", weights_only=True))
    trained, mean, std = vae.trained(run)
    autoencoder = parts.autoencoder(mean.flatten().tolist(), std.flatten().tolist())
    autoencoder.load_state_dict(trained.state_dict())
    modules = {"vision_language_encoder": language, "text_encoder": paints.glyphs, "transformer": paints.transformer}
    parts.save(out, {**modules, "vae": autoencoder})


def main() -> None:
    """Train what is not trained yet, then write the checkpoint and the plot of the curves."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("out/tiny_glm_image"), help="folder of unfinished things")
    parser.add_argument("--out", type=Path, default=here / "checkpoint", help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time", action="store_true", help="only measure how long the whole training will take")
    parser.add_argument("--only", choices=["vae", "ar", "dit"], help="train just this part and stop")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    options.work.mkdir(parents=True, exist_ok=True)
    run = fit.Run(options.work, options.seed, device, probe=15 if options.time else 0)
    train(run, options.only)
    if not options.time and not options.only:
        write_checkpoint(run, options.out)
        chart.draw(
            {part.name: run.work / f"{part.name}.jsonl" for part in (vae.PART, writer.PART, painter.PART)},
            here / "training.png",
        )
        print(f"written to {options.out}")


def train(run: fit.Run, only: str | None) -> None:
    """All parts that have no weights yet, with the time that each takes."""
    total_s = 0.0
    for module in (vae, writer, painter):
        part = module.PART
        if (only in (None, part.name) and not (run.work / f"{part.name}.weights").exists()) or run.probe:
            torch.manual_seed(run.seed)
            step_s = module.train(run)
            total_s += step_s * part.steps
            print(f"{part.name}: {part.steps} steps, {step_s:.2f} s each, {step_s * part.steps / 60:.0f} min")
    print(f"together {total_s / 60:.0f} min on {run.device}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
