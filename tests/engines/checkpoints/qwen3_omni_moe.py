"""A tiny random Qwen3-Omni: thinker and talker of two layers with four experts each, and the 16-codebook vocoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.engines.checkpoints import common

#: vLLM-Omni's hooks and models have these written in, and with them the size of the vocabulary.
_TOKENS = {
    "user": 872,
    "system": 8948,
    "assistant": 77091,
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
    "<|audio_start|>": 151669,
    "<|audio_end|>": 151670,
    "<tts_pad>": 151671,
    "<tts_text_bos>": 151672,
    "<tts_text_eod>": 151673,
    "<|audio_pad|>": 151675,
}
_NAMES = {
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
_VOCABULARY = 152064
_HIDDEN = common.QWEN3_LAYERS["hidden_size"]
_GROUPS = 16
_CODEBOOK = 2048
_ROPE = {"rope_type": "default", "rope_theta": 1000000.0, "interleaved": True, "mrope_section": [6, 5, 5]}
_LAYERS = {**common.QWEN3_LAYERS, "max_position_embeddings": 4096}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_MEDIA = {
    "image_token_id": _TOKENS["<|image_pad|>"],
    "video_token_id": _TOKENS["<|video_pad|>"],
    "audio_token_id": _TOKENS["<|audio_pad|>"],
    "audio_start_token_id": _TOKENS["<|audio_start|>"],
    "vision_start_token_id": _TOKENS["<|vision_start|>"],
}


def write(folder: Path) -> None:
    """Write the checkpoint into ``folder``, half of it the two matrices of the vocabulary: 50 MB."""
    import vllm_omni  # noqa: F401  # before any vllm symbol: it replaces classes in vllm's modules
    from transformers import GenerationConfig
    from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as configuration
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

    torch.manual_seed(0)
    config = configuration.Qwen3OmniMoeConfig(
        thinker_config=_thinker(),
        talker_config=_talker(),
        code2wav_config=_code2wav(),
        enable_audio_output=True,
        architectures=["Qwen3OmniMoeForConditionalGeneration"],
    )
    model = common.level(modeling.Qwen3OmniMoeForConditionalGeneration(config)).to(torch.bfloat16)
    with torch.no_grad():  # the vocoder's snake activations only ever add, and the wave is cut at one
        model.code2wav.decoder[-1].conv.weight.mul_(0.002)
        model.code2wav.decoder[-1].conv.bias.zero_()
    model.generation_config = GenerationConfig(eos_token_id=_TOKENS["<|im_end|>"])
    model.save_pretrained(folder)
    _processor().save_pretrained(folder)


def _thinker() -> dict[str, Any]:
    return {
        "text_config": {**_LAYERS, **_EXPERTS, "vocab_size": _VOCABULARY, "rope_parameters": _ROPE},
        "vision_config": {
            "depth": 1,
            "image_size": 224,
            "num_position_embeddings": 196,
            "apply_vit_abs_pos_embed": True,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": _HIDDEN,
            "deepstack_visual_indexes": [0],
        },
        "audio_config": {
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "d_model": 64,
            "downsample_hidden_size": 16,
            "output_dim": _HIDDEN,
        },
        **_MEDIA,
    }


def _talker() -> dict[str, Any]:
    return {
        "text_config": {
            **_LAYERS,
            **_EXPERTS,
            "shared_expert_intermediate_size": 64,
            "vocab_size": 3072,
            "rope_parameters": _ROPE,
        },
        "code_predictor_config": {**_LAYERS, "vocab_size": _CODEBOOK, "num_code_groups": _GROUPS},
        "num_code_groups": _GROUPS,
        "thinker_hidden_size": _HIDDEN,
        "accept_hidden_layer": 1,
        "spatial_merge_size": 2,
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "codec_eos_token_id": 2150,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "speaker_id": {"chelsie": 2301, "ethan": 2302},
        **_MEDIA,
    }


def _code2wav() -> dict[str, Any]:
    return {
        "codebook_size": _CODEBOOK,
        "num_quantizers": _GROUPS,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "decoder_dim": 32,
    }


def _processor() -> Any:
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        Qwen3OmniMoeProcessor,
        WhisperFeatureExtractor,
    )

    tokens = common.tokenizer(_TOKENS, _NAMES)
    return Qwen3OmniMoeProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=16),
        video_processor=Qwen2VLVideoProcessor(patch_size=16),
        feature_extractor=WhisperFeatureExtractor(feature_size=128, sampling_rate=16000),
        tokenizer=tokens,
        chat_template=tokens.chat_template,
    )
