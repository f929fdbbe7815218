"""AuK: the thinker of a Qwen2.5-Omni reads the instruction; a diffusion transformer makes sound of all its layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engines.checkpoints import common, qwen2_5_omni

_HIDDEN = 64
_VOCABULARY = 512
_LATENTS = 16
_DIT = {
    "dim": _HIDDEN, "heads": 2, "dim_head": 32, "ff_mult": 2, "text_hidden_dim": _HIDDEN, "num_layers": 1,
    "num_single_layers": 1, "attn_mask_enabled": True,
}  # fmt: skip
#: 50 frames a second of 480 samples each, as published.
_VAE = {
    "upsample_rates": [5, 4, 3, 2, 2, 2], "upsample_kernel_sizes": [10, 8, 6, 4, 4, 4], "upsample_initial_channel": 128,
    "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]], "downsample_rates": [2, 2, 2, 3, 4, 5],
    "downsample_channels": [2, 2, 4, 4, 8, 8, 8], "latent_dim": _LATENTS,
}  # fmt: skip
#: Of the last layer, so that the wave stays below full scale.
_LOUDNESS = 0.01


def write(folder: Path) -> None:
    """Write the checkpoint as vLLM-Omni's tools/prepare_auk_checkpoint.py assembles the published ones (2 MB)."""
    import torch

    torch.manual_seed(0)
    _write_thinker(folder)
    _write_sound(folder)


def _write_thinker(folder: Path) -> None:
    from transformers import GenerationConfig
    from transformers.models.qwen2_5_omni import configuration_qwen2_5_omni as configuration
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

    text = qwen2_5_omni.tokenizer()
    qwen2_5_omni.save_processor(text, folder)
    config = qwen2_5_omni.configured(configuration, text).to_dict()
    thinker = config["thinker_config"]
    end = text.convert_tokens_to_ids("<|im_end|>")
    thinker["text_config"] |= {"vocab_size": _VOCABULARY, "eos_token_id": end}
    model = modeling.Qwen2_5OmniThinkerForConditionalGeneration(configuration.Qwen2_5OmniThinkerConfig(**thinker))
    common.spread(model)
    weights = {qwen2_5_omni.published("thinker", name): value for name, value in model.state_dict().items()}
    common.save(weights, folder)
    GenerationConfig(eos_token_id=[end]).save_pretrained(folder)
    sound: dict[str, Any] = {
        "dit": _DIT,
        "vae": {
            "latent_dim": _LATENTS,
            "downsample_rate": 480,
            "target_sample_rate": 24_000,
            "model_init_kwargs": _VAE,
        },
        "variant": "base",
    }
    named = {"model_type": "auk", "architectures": ["AuKForConditionalGeneration"], "dtype": "float32"}
    common.write_json(folder / "config.json", {**config, **sound, **named})


def _write_sound(folder: Path) -> None:
    import torch
    from vllm_omni.diffusion.models.auk.auk_transformer import AuKTransformer
    from vllm_omni.diffusion.models.auk.auk_vae import AuKVAE

    transformer = common.level(AuKTransformer(latent_dim=_LATENTS, **_DIT))
    layers = {"layer_weights": torch.randn(2), "layer_scale": torch.ones(1)}
    weights = {f"transformer.{name}": value for name, value in transformer.state_dict().items()}
    common.save({**layers, **weights}, folder, "auk.safetensors")
    codec = common.level(AuKVAE.from_config(_VAE))
    with torch.no_grad():
        for name, weight in codec.named_parameters():
            if name.endswith("weight_g"):
                weight.fill_(_LOUDNESS if name.startswith("conv_post") else 1.0)
    common.save(codec.state_dict(), folder, "vae.safetensors")
