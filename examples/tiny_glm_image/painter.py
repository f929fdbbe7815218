"""Training the diffusion transformer with its glyph encoder: tokens and a digit to latents, by flow matching."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy
import torch

from examples.tiny_glm_image import fit, layout, parts, vae

PART = fit.Part("dit", 4000, 24, 3.5e-3, 300)


class Painter(torch.nn.Module):
    """The diffusion transformer and the glyph encoder, trained together."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer, self.glyphs = parts.transformer(layout.CODES), parts.glyph_encoder()
        torch.nn.init.zeros_(self.transformer.proj_out.weight)
        with torch.no_grad():
            table = self.transformer.prior_token_embedding.weight
            table.copy_(layout.meanings(table.shape[1], torch.Generator().manual_seed(1)))

    def forward(self, latents: Any, time: Any, codes: Any, drop: Any, glyphs: Any, height: int, width: int) -> Any:
        """The velocity (batch, channels, h, w); ``time`` (batch,) is from 0 to 1000, ``drop`` bool (batch, n)."""
        batch = len(latents)
        return self.transformer(
            hidden_states=latents,
            encoder_hidden_states=self.glyphs(input_ids=glyphs).last_hidden_state,
            prior_token_id=codes,
            prior_token_drop=drop,
            timestep=time - 1.0,
            target_size=torch.tensor([[height, width]] * batch, dtype=latents.dtype, device=latents.device),
            crop_coords=torch.zeros(batch, 2, dtype=latents.dtype, device=latents.device),
            return_dict=False,
        )[0]


def glyph_ids(byte: Any) -> Any:
    """The glyph encoder's input for quoted bytes, int64 (batch,): ids of ByT5, padded to an odd number in front.

    Where nothing is quoted, bytes are 0, and the end is all there is: (batch, 1) in place of (batch, 3).
    """
    end = torch.ones_like(byte)
    return torch.stack([torch.zeros_like(byte), byte + 3, end], dim=1) if bool(byte.any()) else end[:, None]


def shifted(time: Any, tokens: int) -> Any:
    """How much of a picture of so many transformer tokens is noise at a time from 0 to 1: the scheduler's shift."""
    mu = 0.25 + 0.75 * math.sqrt(tokens / 256)
    return mu * time / (mu * time + 1.0 - time)


#: Different batches of latents; each is used again with other noise, which saves most of the drawing and encoding.
_BATCHES = 250


def train(run: fit.Run) -> float:
    """Tokens and a digit to latents, by flow matching."""
    painter = Painter().to(run.device)
    autoencoder, mean, std = vae.trained(run)

    @torch.no_grad()
    def draw(random: numpy.random.Generator, rows: int, columns: int, count: int, held_out: bool) -> Any:
        scenes, images = vae.pictures(random, rows, columns, count, held_out)
        latents = torch.cat([autoencoder.encode(few.to(run.device)).latent_dist.mode() for few in images.split(8)])
        codes = torch.stack([layout.codes(scene, rows, columns) for scene in scenes]).to(run.device)
        doubled = codes.reshape(count, rows, columns).repeat_interleave(2, 1).repeat_interleave(2, 2).reshape(count, -1)
        quoted = torch.tensor([ord(scene.digit or "\0") for scene in scenes]).to(run.device)
        return ((latents - mean) / std).half(), doubled, quoted, rows * layout.CELL, columns * layout.CELL

    @functools.lru_cache(maxsize=_BATCHES)
    def made(index: int) -> Any:
        random = run.random("dit", index)
        rows, columns = layout.SIZES[random.integers(len(layout.SIZES))]
        return draw(random, rows, columns, max(4, min(64, PART.batch * 64 // (rows * columns))), held_out=False)

    def loss_of(batch: tuple[Any, ...], unconditional: float) -> Any:
        latents, codes, quoted, height, width = batch
        latents = latents.float()
        count, tokens = codes.shape
        # Eight denoising steps never look at a picture with less noise than this.
        time = 0.08 + 0.92 * torch.rand(count, device=run.device)
        noise = torch.randn_like(latents)
        share = shifted(time, tokens)[:, None, None, None]
        nothing = torch.rand(count, device=run.device) < unconditional
        quoted = torch.where(nothing, 0, quoted)
        drop = nothing[:, None].expand(count, tokens)
        noisy, velocity = (1.0 - share) * latents + share * noise, torch.zeros_like(latents)
        # Texts of one length at a time: there is no mask for glyphs.
        for some in (quoted > 0, quoted == 0):
            if some.any():
                inputs = noisy[some], time[some] * 1000.0, codes[some], drop[some], glyph_ids(quoted[some])
                velocity[some] = painter(*inputs, height, width)
        rows, columns = height // layout.CELL, width // layout.CELL
        weight = 1.0 + 3.0 * layout.in_front(codes).float().reshape(count, 1, 2 * rows, 2 * columns)
        weight = weight.repeat_interleave(2, 2).repeat_interleave(2, 3)
        return (weight * (velocity - (noise - latents)) ** 2).mean()

    def loss(step: int) -> Any:
        return loss_of(made(step % _BATCHES), unconditional=0.1)

    held_out = draw(run.random("dit", 2**31), 8, 8, 32, True)

    @torch.no_grad()
    def check() -> dict[str, float]:
        torch.manual_seed(0)
        return {"held_out": float(loss_of(held_out, unconditional=0.0))}

    return fit.fit(run, PART, painter, loss, check)
