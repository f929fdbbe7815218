"""BAGEL: a language model whose layers have a second set of weights for pictures, and an autoencoder of fixed size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.engines.checkpoints import common

_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|fim_middle|>",
)
_HIDDEN, _HEADS, _KEYS, _WIDTH, _LAYERS, _VOCABULARY = 128, 4, 2, 128, 2, 448
_SIDE = 32  # latents, of 16 x 16 pixels each; the engine warms up with a picture of 512 x 512
_LANGUAGE: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": _VOCABULARY,
    "hidden_size": _HIDDEN,
    "intermediate_size": _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KEYS,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "qk_norm": True,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_channels": 3,
    "image_size": 56,
    "patch_size": 14,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "vision_use_head": False,
}
_PATCHES = _VISION["image_size"] // _VISION["patch_size"]
_LATENT = 2 * 2 * 16


def write(folder: Path) -> None:
    """Write the checkpoint, 170 MB: vLLM-Omni's code has the autoencoder's widths as numbers."""
    common.write_json(folder / "llm_config.json", _LANGUAGE)
    common.write_json(folder / "vit_config.json", _VISION)
    common.write_json(
        folder / "config.json",
        {
            "model_type": "bagel",
            "architectures": ["BagelForConditionalGeneration"],
            "llm_config": _LANGUAGE,
            "vit_config": _VISION,
            "vae_config": {"z_channels": 16, "downsample": 8},
            "latent_patch_size": 2,
            "max_latent_size": _SIDE,
            "vit_max_num_patch_per_side": _PATCHES,
            "connector_act": "gelu_pytorch_tanh",
            "interpolate_pos": False,
            "timestep_shift": 1.0,
        },
    )
    size = _VISION["image_size"]
    common.write_json(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "SiglipImageProcessor",
            "processor_class": "BagelProcessor",
            "size": {"height": size, "width": size},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    )
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    common.tokenizer(_SPECIAL, names).save_pretrained(folder)
    torch.manual_seed(0)
    vision = common.siglip("vit_model.vision_model", {**_VISION, "num_patches": _PATCHES**2})
    common.save({**_language(), **vision, **_between()}, folder, "ema.safetensors")
    common.save(_autoencoder(), folder, "ae.safetensors", dtype=torch.bfloat16)


def _language() -> dict[str, Any]:
    head = _HIDDEN // _HEADS
    model: dict[str, Any] = {"model.embed_tokens.weight": torch.randn(_VOCABULARY, _HIDDEN)}
    model["lm_head.weight"] = common.matrix(_VOCABULARY, _HIDDEN)
    for kind in ("", "_moe_gen"):  # for words, for pictures
        model[f"model.norm{kind}.weight"] = torch.ones(_HIDDEN)
        for layer in range(_LAYERS):
            own: dict[str, Any] = {
                f"input_layernorm{kind}.weight": torch.ones(_HIDDEN),
                f"post_attention_layernorm{kind}.weight": torch.ones(_HIDDEN),
                f"self_attn.q_norm{kind}.weight": torch.ones(head),
                f"self_attn.k_norm{kind}.weight": torch.ones(head),
                f"self_attn.o_proj{kind}.weight": common.matrix(_HIDDEN, _HEADS * head),
                f"mlp{kind}.gate_proj.weight": common.matrix(_WIDTH, _HIDDEN),
                f"mlp{kind}.up_proj.weight": common.matrix(_WIDTH, _HIDDEN),
                f"mlp{kind}.down_proj.weight": common.matrix(_HIDDEN, _WIDTH),
            }
            for name, heads in (("q_proj", _HEADS), ("k_proj", _KEYS), ("v_proj", _KEYS)):
                own |= common.linear(f"self_attn.{name}{kind}", heads * head, _HIDDEN)
            model |= {f"model.layers.{layer}.{name}": tensor for name, tensor in own.items()}
    return {f"language_model.{name}": tensor for name, tensor in model.items()}


def _between() -> dict[str, Any]:
    """What joins words, pictures as input and latents."""
    return {
        **common.linear("connector.fc1", _HIDDEN, _VISION["hidden_size"]),
        **common.linear("connector.fc2", _HIDDEN, _HIDDEN),
        **common.linear("vae2llm", _HIDDEN, _LATENT),
        **common.linear("llm2vae", _LATENT, _HIDDEN),
        **common.linear("time_embedder.mlp.0", _HIDDEN, 256),
        **common.linear("time_embedder.mlp.2", _HIDDEN, _HIDDEN),
        "vit_pos_embed.pos_embed": common.matrix(_PATCHES**2, _HIDDEN),
        "latent_pos_embed.pos_embed": common.matrix(_SIDE**2, _HIDDEN),
    }


def _autoencoder() -> dict[str, Any]:
    """vLLM-Omni's own class says what it consists of."""
    from vllm_omni.diffusion.models.bagel.autoencoder import AutoEncoder
    from vllm_omni.diffusion.models.bagel.pipeline_bagel import default_ae_params

    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in AutoEncoder(default_ae_params()).state_dict().items()}
    plain = {name: torch.zeros(shape) if name.endswith("bias") else torch.ones(shape) for name, shape in shapes.items()}
    return {name: common.matrix(*shape) if len(shape) > 1 else plain[name] for name, shape in shapes.items()}
