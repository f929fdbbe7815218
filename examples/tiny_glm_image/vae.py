"""Training the autoencoder: pictures to latents and back."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from examples.tiny_glm_image import fit, layout, parts, world

PART = fit.Part("vae", 1500, 12, 3e-3, 200)


def pictures(random: numpy.random.Generator, rows: int, columns: int, count: int, held_out: bool = False) -> Any:
    """Random scenes and their pictures, float32 (count, 3, height, width) from -1 to 1."""
    source = world.scenes(random, held_out)
    found = [next(source) for _ in range(count)]
    drawn = numpy.stack([world.render(scene, rows * layout.CELL, columns * layout.CELL) for scene in found])
    return found, torch.from_numpy(drawn).permute(0, 3, 1, 2).float() / 127.5 - 1.0


def train(run: fit.Run) -> float:
    """Pictures to latents and back."""
    model = parts.autoencoder().to(run.device)

    def loss_of(random: numpy.random.Generator, rows: int, columns: int, count: int, held_out: bool) -> Any:
        scenes, images = pictures(random, rows, columns, count, held_out)
        height, width = images.shape[2:]
        empty = numpy.stack([world.background(scene.setting, height, width) for scene in scenes])
        behind = torch.from_numpy(empty).permute(0, 3, 1, 2) / 127.5 - 1.0
        # Most of a picture is its setting; what stands before it counts five times.
        weight = 1.0 + 4.0 * ((images - behind).abs().amax(1, keepdim=True) > 0.05).float()
        images, weight = images.to(run.device), weight.to(run.device)
        posterior = model.encode(images).latent_dist
        off = model.decode(posterior.sample()).sample - images
        return (weight * (off.abs() + off * off)).mean() + 1e-3 * posterior.kl().mean() / posterior.mean[0].numel()

    def loss(step: int) -> Any:
        random = run.random("vae", step)
        rows, columns = ((4, 4), (4, 4), (8, 8), (3, 5), (5, 3))[step % 5]
        return loss_of(random, rows, columns, max(1, PART.batch * 16 // (rows * columns)), held_out=False)

    @torch.no_grad()
    def check() -> dict[str, float]:
        return {"held_out": float(loss_of(run.random("vae", 2**31), 8, 8, 16, held_out=True))}

    return fit.fit(run, PART, model, loss, check)


def trained(run: fit.Run) -> tuple[Any, Any, Any]:
    """The autoencoder, and mean and standard deviation of its latents, (1, channels, 1, 1) each."""
    vae = parts.autoencoder()
    if (run.work / "vae.weights").exists():
        vae.load_state_dict(torch.load(run.work / "vae.weights", weights_only=True))
    vae.to(run.device).eval()
    with torch.no_grad():
        _, images = pictures(run.random("vae", 2**31 + 1), 8, 8, 64)
        latents = torch.cat([vae.encode(few.to(run.device)).latent_dist.mode() for few in images.split(8)])
    return vae, latents.mean((0, 2, 3), keepdim=True), latents.std((0, 2, 3), keepdim=True)
