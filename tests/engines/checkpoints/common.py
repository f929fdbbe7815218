"""What several checkpoint writers need: a tokenizer trained on a few words, weights with spread, and saving."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omniqueue.platforms.cpu import torchvision_ops

# Before transformers: PyPI's torchvision is built for CUDA (see the module).
torchvision_ops.plugin()

_WORDS = (
    "say hello to the nice world",
    "system user assistant You are a helpful voice",
    "a red ball on a blue sea, the number 4",
)
#: Sizes of a small Qwen3 decoder, by the names of its configuration.
QWEN3_LAYERS = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
#: ChatML with the contents of a message as one text or as parts.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(
    special: Sequence[str] | Mapping[str, int],
    names: Mapping[str, str] | None = None,
    *,
    words: Iterable[str] = _WORDS,
    size: int = 400,
) -> Any:
    """A byte-level BPE tokenizer; ``special`` are its first tokens, in order, and ``names`` such as eos_token.

    Names that transformers does not know become extra special tokens, which processors look for. ``special`` as a
    mapping gives each token its id, as published code has them; ids between are filled with tokens that no text has.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    placed = dict(special) if isinstance(special, Mapping) else {}
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[] if placed else list(special), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(list(words) * 10, trainer)
    if placed:
        made.model = _filled(made, placed)
        made.add_special_tokens(list(placed))
    known = {name: token for name, token in (names or {}).items() if name in ("eos_token", "pad_token", "bos_token")}
    extra = {name: token for name, token in (names or {}).items() if name not in known}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **known, **({"extra_special_tokens": extra} if extra else {}))
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _filled(made: Any, placed: Mapping[str, int]) -> Any:
    """The tokenizer's model with tokens of given ids, and no id below them without a token."""
    from tokenizers import models

    learned = json.loads(made.to_str())["model"]
    free = set(range(len(learned["vocab"]), max(placed.values()))) - set(placed.values())
    vocabulary = {**learned["vocab"], **{f"<{number}>": number for number in sorted(free)}, **placed}
    return models.BPE(vocabulary, [tuple(merge) for merge in learned["merges"]])


def spread(module: Any, *, embedding: float = 0.3, matrix: float = 0.08) -> None:
    """Draw a language model's weights so widely that its tokens vary; ``torch.manual_seed`` decides which they are."""
    import torch

    with torch.no_grad():
        for name, weight in module.named_parameters():
            if any(part in name for part in ("embed_tokens", "lm_head", "codec_head")):
                weight.normal_(0, embedding)
            elif weight.dim() == 2:
                weight.normal_(0, matrix)


def prefer_known(head: Any, known: int) -> None:
    """Let a language model with a published vocabulary write tokens that its small tokenizer knows: then it has text.

    ``head`` is the output layer's weight, of shape (vocabulary, hidden); the first ``known`` tokens are preferred.
    """
    import torch

    with torch.no_grad():
        head.zero_()
        head[:known].normal_(0, 1.0)


def level(module: Any) -> Any:
    """Draw every matrix and kernel so that what passes through keeps its size; returns the module."""
    import torch

    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, weight[0].numel() ** -0.5)
    return module


def drawn(shapes: Mapping[str, tuple[int, ...]], **gains: float) -> dict[str, Any]:
    """Weights by name where there is no module to draw for: as :func:`level` has them, ones in norms, zeros in biases.

    ``gains`` are factors by part of a name; a head's of a few spreads the chances of tokens.
    """
    import torch

    weights = {}
    for name, shape in shapes.items():
        if len(shape) < 2:
            weights[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
            continue
        gain = next((gain for part, gain in gains.items() if part in name), 1.0)
        weights[name] = torch.randn(shape) * gain / torch.Size(shape[1:]).numel() ** 0.5
    return weights


def decoder_shapes(
    prefix: str,
    *,
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dim: int,
) -> dict[str, tuple[int, ...]]:
    """The shapes of a Qwen3 decoder's layers and last norm, by the names of published checkpoints."""
    queries, keys = num_attention_heads * head_dim, num_key_value_heads * head_dim
    layer = {
        "input_layernorm.weight": (hidden_size,),
        "post_attention_layernorm.weight": (hidden_size,),
        "self_attn.q_proj.weight": (queries, hidden_size),
        "self_attn.k_proj.weight": (keys, hidden_size),
        "self_attn.v_proj.weight": (keys, hidden_size),
        "self_attn.o_proj.weight": (hidden_size, queries),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "mlp.gate_proj.weight": (intermediate_size, hidden_size),
        "mlp.up_proj.weight": (intermediate_size, hidden_size),
        "mlp.down_proj.weight": (hidden_size, intermediate_size),
    }
    layers = range(num_hidden_layers)
    named = {f"{prefix}layers.{index}.{name}": shape for index in layers for name, shape in layer.items()}
    return {**named, f"{prefix}norm.weight": (hidden_size,)}


def save(weights: Mapping[str, Any], folder: Path, name: str = "model.safetensors", *, dtype: Any = None) -> None:
    """Write tensors in one file, numbers with a fraction as ``dtype``, float32 unless given."""
    import torch
    from safetensors.torch import save_file

    dense = {key: value.detach().clone().contiguous() for key, value in weights.items()}
    floats = {
        key: value.to(dtype or torch.float32) if value.is_floating_point() else value for key, value in dense.items()
    }
    save_file(floats, folder / name, metadata={"format": "pt"})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write one of a checkpoint's configuration files."""
    path.write_text(json.dumps(value, indent=2))


def matrix(*shape: int) -> Any:
    """Weights that keep the size of what passes through them."""
    import torch

    return torch.randn(*shape) * torch.Size(shape[1:]).numel() ** -0.5


def linear(name: str, outputs: int, inputs: int) -> dict[str, Any]:
    """A layer with a bias, by its name in a checkpoint."""
    return {f"{name}.weight": matrix(outputs, inputs), f"{name}.bias": matrix(outputs, 100)[:, 0]}


def norm(name: str, size: int) -> dict[str, Any]:
    """A norm with a bias, as it is before training."""
    import torch

    return {f"{name}.weight": torch.ones(size), f"{name}.bias": torch.zeros(size)}


def siglip(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """SigLIP's picture encoder in the published names, its patches flat."""
    size, width = config["hidden_size"], config["intermediate_size"]
    made = linear("embeddings.patch_embedding", size, config["num_channels"] * config["patch_size"] ** 2)
    made["embeddings.position_embedding.weight"] = matrix(config["num_patches"], size)
    made |= norm("post_layernorm", size)
    for index in range(config["num_hidden_layers"]):
        layer = norm("layer_norm1", size) | norm("layer_norm2", size)
        layer |= linear("mlp.fc1", width, size) | linear("mlp.fc2", size, width)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            layer |= linear(f"self_attn.{part}", size, size)
        made |= {f"encoder.layers.{index}.{key}": tensor for key, tensor in layer.items()}
    return {f"{name}.{key}": tensor for key, tensor in made.items()}
