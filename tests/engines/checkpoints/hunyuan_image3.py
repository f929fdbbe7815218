"""HunyuanImage-3.0: one checkpoint that the language-model stage and the diffusion stage both load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.engines.checkpoints import common

#: Ids that vLLM-Omni's code has as numbers, and others between them that it looks for by name.
_SPECIAL = {
    "<|endoftext|>": 127957,
    "<|startoftext|>": 127958,
    "<boi>": 128000,
    "<eoi>": 128001,
    "<img>": 128006,
    "<pad>": 128009,
    "<cfg>": 128010,
    "<recaption>": 128018,
    "</recaption>": 128019,
    "<think>": 128023,
    "</think>": 128024,
    "<answer>": 128025,
    "</answer>": 128026,
    "<joint_img_sep>": 128030,
    "<timestep>": 128031,
    "<img_size_128>": 128036,
    "<img_size_1024>": 128037,
    **{f"<img_ratio_{index}>": 128044 + index for index in range(33)},
    **{f"<img_ratio_{index}>": 130070 + index for index in range(33, 37)},
}
_VOCABULARY = 130112
#: How many ids the tokenizer writes; all others have rows of zeros, so that the model does not choose them.
_WRITTEN = 1600
_HIDDEN, _HEADS, _KEYS, _HEAD, _LAYERS, _WIDTH, _EXPERTS = 64, 4, 2, 32, 2, 64, 4
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_channels": 3,
    "num_patches": 16,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_CONFIG: dict[str, Any] = {
    "model_type": "hunyuan_image_3_moe",
    "architectures": ["HunyuanImage3ForCausalMM"],
    "auto_map": {"AutoConfig": "configuration_hunyuan_image_3.HunyuanImage3Config"},
    "vocab_size": _VOCABULARY,
    "hidden_size": _HIDDEN,
    "intermediate_size": _WIDTH,
    "moe_intermediate_size": _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KEYS,
    "attention_head_dim": _HEAD,
    "num_experts": _EXPERTS,
    "moe_topk": 2,
    "num_shared_expert": 1,
    "moe_layer_num_skipped": 0,
    "use_mixed_mlp_moe": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "use_qk_norm": True,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "bos_token_id": _SPECIAL["<|startoftext|>"],
    "eos_token_id": _SPECIAL["<|endoftext|>"],
    "pad_token_id": _SPECIAL["<pad>"],
    # Pictures of about 128 x 128 pixels, a token for 16 x 16.
    "image_base_size": 128,
    "patch_size": 1,
    "patch_embed_hidden_dim": 32,
    "img_proj_type": "unet",
    "vae_downsample_factor": [16, 16],
    "vae": {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 8,
        "block_out_channels": [32, 32, 32, 32, 32],
        "layers_per_block": 1,
        "ffactor_spatial": 16,
        "ffactor_temporal": 4,
        "sample_size": 384,
        "sample_tsize": 96,
        "scaling_factor": 0.5,
    },
    "vit": _VISION,
    "vit_processor": {"patch_size": 16, "max_num_patches": 16, "image_processor_type": "Siglip2ImageProcessorFast"},
    "vit_aligner": {"projector_type": "mlp_gelu", "depth": 2, "input_dim": 32, "n_embed": _HIDDEN},
    "cfg_distilled": False,
    "use_meanflow": False,
}
_GENERATION = {"flow_shift": 3.0, "drop_think": False, "sequence_template": "instruct", "max_length": 4096}
_CONFIG_CODE = '''from transformers import PretrainedConfig


class HunyuanImage3Config(PretrainedConfig):
    """Every value is in config.json, but for one that transformers takes out of configurations."""

    model_type = "hunyuan_image_3_moe"
    use_cache = True
'''


def write(folder: Path) -> None:
    """Write the checkpoint, in bfloat16 21 MB."""
    common.write_json(folder / "config.json", _CONFIG)
    (folder / "configuration_hunyuan_image_3.py").write_text(_CONFIG_CODE)
    common.write_json(folder / "generation_config.json", _GENERATION)
    names = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<pad>"}
    common.tokenizer(_SPECIAL, names, words=_words(), size=_WRITTEN).save_pretrained(folder)
    torch.manual_seed(0)
    vision = common.siglip("vision_model", _VISION)
    aligner = common.linear("vision_aligner.layers.0", _HIDDEN, _VISION["hidden_size"])
    aligner |= common.linear("vision_aligner.layers.2", _HIDDEN, _HIDDEN)
    common.save({**_language(), **vision, **aligner, **_pictures()}, folder, dtype=torch.bfloat16)


def _words() -> list[str]:
    """The instructions that vLLM-Omni puts before a prompt, so that they are hundreds of tokens and not thousands."""
    from vllm_omni.diffusion.models.hunyuan_image3.system_prompt import get_system_prompt

    return [get_system_prompt("en_unified", "think") or "", "a red ball on a blue sea, the nice world"]


def _language() -> dict[str, Any]:
    words = torch.zeros(_VOCABULARY, _HIDDEN)
    words[:_WRITTEN] = torch.randn(_WRITTEN, _HIDDEN)
    words[list(_SPECIAL.values())] = torch.randn(len(_SPECIAL), _HIDDEN)
    tensors = {"model.wte.weight": words, "lm_head.weight": words, "model.ln_f.weight": torch.ones(_HIDDEN)}
    for layer in range(_LAYERS):
        own = {
            "input_layernorm.weight": torch.ones(_HIDDEN),
            "post_attention_layernorm.weight": torch.ones(_HIDDEN),
            "self_attn.query_layernorm.weight": torch.ones(_HEAD),
            "self_attn.key_layernorm.weight": torch.ones(_HEAD),
            "self_attn.qkv_proj.weight": common.matrix((_HEADS + 2 * _KEYS) * _HEAD, _HIDDEN),
            "self_attn.o_proj.weight": common.matrix(_HIDDEN, _HEADS * _HEAD),
            "mlp.gate.wg.weight": common.matrix(_EXPERTS, _HIDDEN),
        }
        for part in ("shared_mlp", *(f"experts.{index}" for index in range(_EXPERTS))):
            own[f"mlp.{part}.gate_and_up_proj.weight"] = common.matrix(2 * _WIDTH, _HIDDEN)
            own[f"mlp.{part}.down_proj.weight"] = common.matrix(_HIDDEN, _WIDTH)
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in own.items()}
    return tensors


def _pictures() -> dict[str, Any]:
    """What only pictures go through; vLLM-Omni's own classes say what it consists of."""
    from vllm_omni.diffusion.models.hunyuan_image3 import hunyuan_image3_transformer as parts
    from vllm_omni.model_executor.models.hunyuan_image3.autoencoder_kl_3d import AutoencoderKLConv3D

    latents, between = _CONFIG["vae"]["latent_channels"], _CONFIG["patch_embed_hidden_dim"]
    modules = {
        "vae": AutoencoderKLConv3D.from_config(_CONFIG["vae"]),
        "patch_embed": parts.UNetDown(1, latents, _HIDDEN, between, _HIDDEN),
        "final_layer": parts.UNetUp(1, _HIDDEN, _HIDDEN, between, latents, out_norm=True),
        **{name: parts.TimestepEmbedder(_HIDDEN) for name in ("timestep_emb", "time_embed", "time_embed_2")},
    }
    return {f"{name}.{key}": tensor for name, module in modules.items() for key, tensor in _spread(module).items()}


def _spread(module: Any) -> dict[str, Any]:
    """A module's weights, matrices drawn anew: some begin as zeros, with which a picture would not depend on them."""
    return {
        name: common.matrix(*tensor.shape) if tensor.dim() > 1 else tensor
        for name, tensor in module.state_dict().items()
    }
