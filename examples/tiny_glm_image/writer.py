"""Training the autoregressive model: captions to tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy
import torch
from torch.nn import functional

from examples.tiny_glm_image import captions, fit, layout, parts, world

PART = fit.Part("ar", 3400, 24, 2.5e-3)


class Writer(torch.nn.Module):
    """The language model with an output layer of the ids in use: the codes and the end token.

    All others have rows of zeros in the real output layer, so that together they are one more score that never
    changes: a softmax over 16512 ids costs as little as over 4242, and is exact.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.text = model.model.language_model
        self.head = torch.nn.Linear(self.text.config.hidden_size, layout.CODES + 1, bias=False)
        with torch.no_grad():
            start = layout.meanings(self.text.config.hidden_size, torch.Generator().manual_seed(1))
            self.text.embed_tokens.weight[: layout.CODES] = start
            torch.nn.init.normal_(self.head.weight, std=0.02)
            self.head.weight[: layout.CODES] = start * 0.05
        self.others = math.log(parts.VISION_VOCABULARY - layout.CODES - 1)

    def forward(self, ids: Any, positions: Any, begin: Any, tokens: int) -> Any:
        """Scores (batch, tokens, CODES + 2) of what follows each place from ``begin`` (batch,) on."""
        hidden = self.text(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        places = begin[:, None] + torch.arange(tokens, device=ids.device)
        scores = self.head(hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1])))
        return functional.pad(scores, (0, 1), value=self.others)

    @torch.no_grad()
    def write_head(self, model: Any) -> None:
        """Fill the real output layer."""
        model.lm_head.weight.zero_()
        model.lm_head.weight[: layout.CODES] = self.head.weight[: layout.CODES]
        model.lm_head.weight[parts.IMAGE_END] = self.head.weight[layout.CODES]


def any_size(random: numpy.random.Generator) -> tuple[int, int]:
    """A size that training knows well, or now and then any that is allowed."""
    if random.random() < 0.9:
        return layout.SIZES[random.integers(len(layout.SIZES))]
    rows = int(random.integers(1, 17))
    return rows, int(random.integers(1, min(16, layout.MOST_CELLS // rows) + 1))


def sequences(
    texts: list[str], given: Any, codes: Any, rows: int, columns: int, tokens: Any
) -> tuple[Any, Any, Any, Any]:
    """Ids (batch, length), positions (3, batch, length), each prompt's last place (batch,), and what is to follow.

    ``codes`` are the preview's and the picture's, int64 (batch, n), and the end token follows; ``given`` are those that
    the model reads in their place.
    """
    ending = layout.suffix(rows, columns)
    prompts = [tokens.encode(text + ending, add_special_tokens=False) for text in texts]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    count, places = codes.shape[1], layout.image_positions(rows, columns)
    ids = torch.zeros(len(texts), int(lengths.max()) + count, dtype=torch.long)
    positions = torch.zeros(3, *ids.shape, dtype=torch.long)
    for index, prompt in enumerate(prompts):
        end = len(prompt)
        ids[index, :end] = torch.tensor(prompt)
        ids[index, end : end + count] = given[index]
        positions[:, index, :end] = torch.arange(end)
        positions[:, index, end : end + count] = places + end
    target = torch.cat([codes, torch.full((len(texts), 1), layout.CODES)], dim=1)
    return ids, positions, lengths - 1, target


def train(run: fit.Run) -> float:
    """Captions to tokens."""
    tokens = parts.tokenizer()
    writer = Writer(parts.language_model(tokens)).to(run.device)

    def loss_of(random: numpy.random.Generator, rows: int, columns: int, count: int, held_out: bool) -> Any:
        source = world.scenes(random, held_out)
        scenes = [next(source) for _ in range(count)]
        wordings = captions.HELD_OUT_WORDINGS if held_out else captions.WORDINGS
        texts = [captions.caption(scene, random, wordings) for scene in scenes]
        grids = (layout.preview(rows, columns), (rows, columns))
        codes = torch.stack([torch.cat([layout.codes(scene, *grid) for grid in grids]) for scene in scenes])
        share = 0.0 if held_out else 0.5
        given = torch.stack([layout.confuse(one, share * random.integers(2), random) for one in codes])
        ids, positions, begin, target = (
            one.to(run.device) for one in sequences(texts, given, codes, rows, columns, tokens)
        )
        scores = writer(ids, positions, begin, target.shape[1])
        each = functional.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="none").reshape(target.shape)
        # Where an object or a sign begins in a row is where the model decides; the rest mostly goes on.
        ahead = layout.in_front(target)
        begins = ahead & ~functional.pad(ahead, (1, 0))[:, :-1]
        weight = 1.0 + 7.0 * begins.float()
        return (weight * each).sum() / weight.sum()

    def loss(step: int) -> Any:
        random = run.random("ar", step)
        return loss_of(random, *any_size(random), PART.batch, held_out=False)

    @torch.no_grad()
    def check() -> dict[str, float]:
        return {"held_out": float(loss_of(run.random("ar", 2**31), 8, 8, 64, held_out=True))}

    return fit.fit(run, PART, writer, loss, check)
