"""Qwen2.5-Omni: thinker (text), talker (codec tokens of the thinker's hidden states), code2wav (a waveform)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engines.checkpoints import common

_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|IMAGE|>",
    "<|VIDEO|>", "<|vision_bos|>", "<|vision_eos|>", "<|vision_pad|>",
)  # fmt: skip
_NAMES = {
    "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "image_token": "<|IMAGE|>", "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>", "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
}  # fmt: skip
#: The published sizes: vLLM-Omni's code has the ids of speakers' and codec tokens in it.
_THINKER_VOCABULARY, _TALKER_VOCABULARY, _CODEC_BOS = 152_064, 8_448, 8_293
_HIDDEN = 64
_ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [4, 6, 6]}
_LANGUAGE_MODEL = {
    "hidden_size": _HIDDEN, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 4096, "rope_parameters": _ROPE,
}  # fmt: skip
_VISION = {
    "depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": _HIDDEN,
    "fullatt_block_indexes": [0],
}  # fmt: skip
_AUDIO = {
    "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 128, "d_model": 64, "output_dim": _HIDDEN,
}  # fmt: skip
_DIT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "ff_mult": 2, "emb_dim": 32, "head_dim": 32,
    "num_embeds": 8193, "mel_dim": 80, "enc_dim": 16, "enc_emb_dim": 16, "enc_channels": [16, 16, 16, 16, 48],
    "enc_kernel_sizes": [5, 3, 3, 3, 1], "enc_dilations": [1, 2, 3, 4, 1], "enc_attention_channels": 8,
    "enc_res2net_scale": 2, "enc_se_channels": 8, "look_ahead_layers": [1], "look_backward_layers": [0],
}  # fmt: skip
_VOCODER = {
    "mel_dim": 80, "upsample_initial_channel": 64, "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3, 5]],
    "upsample_rates": [5, 3, 2, 2, 2, 2], "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
}  # fmt: skip


def write(folder: Path) -> None:
    """Write the checkpoint (21.5 million parameters, most of them the vocabulary's)."""
    import torch
    from transformers import GenerationConfig
    from transformers.models.qwen2_5_omni import configuration_qwen2_5_omni as configuration
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

    text = tokenizer()
    save_processor(text, folder)
    config = configured(configuration, text)
    torch.manual_seed(0)
    parts = {
        "thinker": modeling.Qwen2_5OmniThinkerForConditionalGeneration(config.thinker_config),
        "talker": modeling.Qwen2_5OmniTalkerForConditionalGeneration(config.talker_config),
        "token2wav": modeling.Qwen2_5OmniToken2WavModel(config.token2wav_config),
    }
    common.spread(parts["thinker"])
    common.prefer_known(parts["thinker"].lm_head.weight, len(text))
    common.spread(parts["talker"])
    _spread_vocoder(parts["token2wav"])
    weights = {published(part, name): value for part, one in parts.items() for name, value in one.state_dict().items()}
    common.save(weights, folder)
    config.dtype = "float32"
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=[text.convert_tokens_to_ids("<|im_end|>")]).save_pretrained(folder)
    speakers = {name: _speaker() for name in ("Chelsie", "Ethan")}
    torch.save(speakers, folder / "spk_dict.pt")


def tokenizer() -> Any:
    """The tokenizer of this family, small."""
    return common.tokenizer(_SPECIAL, _NAMES)


def save_processor(text: Any, folder: Path) -> None:
    """Write what turns a conversation's texts, sounds and pictures into the thinker's input."""
    from transformers import Qwen2_5OmniProcessor, WhisperFeatureExtractor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessorPil(),
        video_processor=Qwen2VLVideoProcessor(),
        feature_extractor=WhisperFeatureExtractor(feature_size=128, sampling_rate=16_000),
        tokenizer=text,
        chat_template=text.chat_template,
    ).save_pretrained(folder)


def configured(configuration: Any, text: Any) -> Any:
    """The whole model's configuration, from transformers' module of them."""
    ids = text.convert_tokens_to_ids
    marks = {
        "audio_token_index": ids("<|AUDIO|>"), "image_token_index": ids("<|IMAGE|>"),
        "video_token_index": ids("<|VIDEO|>"), "audio_start_token_id": ids("<|audio_bos|>"),
        "audio_end_token_id": ids("<|audio_eos|>"), "vision_start_token_id": ids("<|vision_bos|>"),
        "vision_end_token_id": ids("<|vision_eos|>"),
    }  # fmt: skip
    thinker_text = {
        **_LANGUAGE_MODEL, "vocab_size": _THINKER_VOCABULARY, "tie_word_embeddings": False, "pad_token_id": None,
    }  # fmt: skip
    thinker = {
        "text_config": thinker_text, "vision_config": _VISION, "audio_config": _AUDIO, **marks,
        "user_token_id": ids("user") or 0,
    }  # fmt: skip
    talker = {
        **_LANGUAGE_MODEL, "embedding_size": _HIDDEN, "head_dim": 32, "vocab_size": _TALKER_VOCABULARY, **marks,
    }  # fmt: skip
    return configuration.Qwen2_5OmniConfig(
        thinker_config=thinker,
        talker_config=talker,
        token2wav_config={"dit_config": _DIT, "bigvgan_config": _VOCODER},
        enable_audio_output=True,
        architectures=["Qwen2_5OmniModel"],
    )


def _spread_vocoder(module: Any) -> None:
    """Keep the variance through the layers, and the waveform's below full scale."""
    import torch

    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() >= 2:
                inputs = weight.shape[0] * weight.shape[2] / 4 if ".ups." in name else weight[0].numel()
                weight.normal_(0, (0.0006 if "conv_post" in name else 1.0) / max(1, inputs) ** 0.5)


def published(part: str, name: str) -> str:
    """A tensor's published name.

    transformers has the thinker's parts under ``model``; the published files and vLLM-Omni's loader do not.
    """
    if part == "thinker":
        for inner in ("audio_tower", "visual"):
            name = name.replace(f"model.{inner}.", f"{inner}.")
        name = name.replace("model.language_model.", "model.")
    return f"{part}.{name}"


def _speaker() -> dict[str, Any]:
    import torch

    return {"cond": torch.randn(1, 16), "ref_mel": torch.randn(1, 100, 80), "bos_token": _CODEC_BOS}
