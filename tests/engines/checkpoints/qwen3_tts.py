"""A tiny random Qwen3-TTS with two voices: a talker of two layers, and the 12 Hz speech tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.engines.checkpoints import common

#: Token ids, codebook sizes and frame length are fixed by vLLM-Omni's pipeline and hooks; the widths are not.
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")
_GROUPS = 16
_CODEBOOK = 2048
_VOCABULARY = 3072
_HIDDEN = common.QWEN3_LAYERS["hidden_size"]
_VOICES = {"vivian": 3065, "serena": 3066}
_CODEC_IDS = {
    "codec_pad_id": 2148,
    "codec_bos_id": 2149,
    "codec_eos_token_id": 2150,
    "codec_think_id": 2154,
    "codec_nothink_id": 2155,
    "codec_think_bos_id": 2156,
    "codec_think_eos_id": 2157,
}


def write(folder: Path) -> None:
    """Write the checkpoint into ``folder``: 23 MB."""
    import vllm_omni  # noqa: F401  # before any vllm symbol: it replaces classes in vllm's modules

    torch.manual_seed(0)
    tokens = common.tokenizer(_SPECIAL, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    config = _config(tokens)
    common.save(_talker(len(tokens)), folder)
    common.write_json(folder / "config.json", config)
    tokens.save_pretrained(folder)
    _write_speech_tokenizer(folder / "speech_tokenizer")


def _config(tokens: Any) -> dict[str, Any]:
    ids = tokens.convert_tokens_to_ids
    talker = {
        **common.QWEN3_LAYERS,
        **_CODEC_IDS,
        "vocab_size": _VOCABULARY,
        "text_vocab_size": len(tokens),
        "text_hidden_size": _HIDDEN,
        "num_code_groups": _GROUPS,
        "max_position_embeddings": 4096,
        "rope_theta": 1000000,
        "rope_scaling": {"rope_type": "default", "interleaved": True, "mrope_section": [6, 5, 5]},
        "code_predictor_config": {**common.QWEN3_LAYERS, "vocab_size": _CODEBOOK, "num_code_groups": _GROUPS},
        "codec_language_id": {"english": 2050, "german": 2053},
        "spk_id": _VOICES,
        "spk_is_dialect": dict.fromkeys(_VOICES, False),
    }
    speaker = {
        "enc_dim": _HIDDEN,
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_attention_channels": 8,
        "enc_res2net_scale": 2,
        "enc_se_channels": 8,
    }
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "dtype": "bfloat16",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": "0b6",
        "tts_model_type": "custom_voice",
        "talker_config": talker,
        "speaker_encoder_config": speaker,
        "im_start_token_id": ids("<|im_start|>"),
        "im_end_token_id": ids("<|im_end|>"),
        "tts_pad_token_id": ids("<tts_pad>"),
        "tts_bos_token_id": ids("<tts_text_bos>"),
        "tts_eos_token_id": ids("<tts_text_eod>"),
    }


def _talker(words: int) -> dict[str, torch.Tensor]:
    shapes = {
        **common.decoder_shapes("talker.model.", **common.QWEN3_LAYERS),
        "talker.model.codec_embedding.weight": (_VOCABULARY, _HIDDEN),
        "talker.model.text_embedding.weight": (words, _HIDDEN),
        "talker.codec_head.weight": (_VOCABULARY, _HIDDEN),
        **common.decoder_shapes("talker.code_predictor.model.", **common.QWEN3_LAYERS),
    }
    for part in ("linear_fc1", "linear_fc2"):
        shapes[f"talker.text_projection.{part}.weight"] = (_HIDDEN, _HIDDEN)
        shapes[f"talker.text_projection.{part}.bias"] = (_HIDDEN,)
    for index in range(_GROUPS - 1):
        shapes[f"talker.code_predictor.model.codec_embedding.{index}.weight"] = (_CODEBOOK, _HIDDEN)
        shapes[f"talker.code_predictor.lm_head.{index}.weight"] = (_CODEBOOK, _HIDDEN)
    return common.drawn(shapes, head=3.0)


def _write_speech_tokenizer(folder: Path) -> None:
    from transformers import EncodecFeatureExtractor
    from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import (
        configuration_qwen3_tts_tokenizer_v2 as configuration,
    )
    from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import modeling_qwen3_tts_tokenizer_v2 as modeling

    width = 32
    encoder = {
        "hidden_size": width,
        "intermediate_size": 64,
        "num_filters": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "codebook_size": _CODEBOOK,
        "codebook_dim": 16,
        "vector_quantization_hidden_dimension": 16,
        "num_quantizers": _GROUPS,
        "upsample_groups": width,
        "use_cache": False,
    }
    decoder = {
        "codebook_size": _CODEBOOK,
        "codebook_dim": width,
        "hidden_size": width,
        "latent_dim": width,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "num_quantizers": _GROUPS,
        "decoder_dim": width,
    }
    config = configuration.Qwen3TTSTokenizerV2Config(encoder_config=encoder, decoder_config=decoder)
    config.architectures = ["Qwen3TTSTokenizerV2Model"]
    model = modeling.Qwen3TTSTokenizerV2Model(config)
    common.level(model)
    with torch.no_grad():  # its snake activations only ever add, and the wave is cut at one
        model.decoder.decoder[-1].conv.weight.mul_(0.002)
        model.decoder.decoder[-1].conv.bias.zero_()
    config.save_pretrained(folder)
    common.save(model.state_dict(), folder)
    EncodecFeatureExtractor(feature_size=1, sampling_rate=config.input_sample_rate).save_pretrained(folder)
