"""Higgs Audio v3: a Qwen3 that writes sound frames of eight codes, and the codec, which its checkpoint contains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engines.checkpoints import common

SPECIAL = {
    "<|endoftext|>": 151643,
    "<|tts|>": 151669,
    "<|text|>": 151670,
    "<|audio_end|>": 151671,
    "<|audio|>": 151672,
}
_VOCABULARY = 151680
_HIDDEN = 64
_CODEBOOKS, _CODES = 8, 1024
#: Codes and the marks of a stream's begin and end.
_SCORES = _CODES + 2
#: vLLM-Omni fixes these of the codec: 25 frames a second, 960 samples each.
_CODEC = {"encoder_hidden_size": 8, "decoder_hidden_size": 1024, "downsampling_ratios": [3, 2, 4, 5, 8]}
_CODE_SIZE, _QUANTIZED = 64, 64
#: Of the last layer, so that the wave stays below full scale.
_LOUDNESS = 0.002


def write(folder: Path) -> None:
    """Write everything in one file (bfloat16, 70 MB, most of it the codec)."""
    import torch
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    text = common.tokenizer(SPECIAL, {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"})
    text.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=_HIDDEN // 2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    body = common.level(Qwen3Model(config)).state_dict()
    frames = "tied.embedding.modality_embeddings.0."
    weights: dict[str, Any] = {
        "tied.embedding.text_embedding.weight": body.pop("embed_tokens.weight"),
        f"{frames}embedding.weight": torch.randn(_CODEBOOKS * _SCORES, _HIDDEN) * 0.4,
        **{f"body.{name}": value for name, value in body.items()},
        **{f"{frames}model.{name}": value for name, value in codec(_CODEC, _CODE_SIZE).items()},
    }
    common.save(weights, folder, dtype=torch.bfloat16)
    sound = {"encoder_type": "discrete", "num_codebooks": _CODEBOOKS, "vocab_size": _SCORES}
    published = {
        "architectures": ["HiggsMultimodalQwen3ForConditionalGeneration"],
        "model_type": "higgs_multimodal_qwen3",
        "dtype": "bfloat16",
        "text_config": config.to_dict(),
        "audio_encoder_config": {**sound, "out_dim": _HIDDEN, "tie_word_embeddings": True},
    }
    common.write_json(folder / "config.json", published)


def codec(shape: dict[str, Any], code_size: int) -> dict[str, Any]:
    """Weights of eight quantizers, ``code_size`` numbers a code, and of the decoder that makes samples of their sum."""
    import torch
    from transformers import DacConfig, DacModel

    decoder = common.level(DacModel(DacConfig(**shape)))
    decoder.decoder.conv2.weight.data *= _LOUDNESS
    parts = {"acoustic_decoder": decoder.decoder, "fc2": torch.nn.Linear(_QUANTIZED, decoder.config.hidden_size)}
    for index in range(_CODEBOOKS):
        parts[f"quantizer.quantizers.{index}.project_out"] = torch.nn.Linear(code_size, _QUANTIZED)
    weights = {f"{part}.{name}": value for part, module in parts.items() for name, value in module.state_dict().items()}
    for index in range(_CODEBOOKS):
        weights[f"quantizer.quantizers.{index}.codebook.embed"] = torch.randn(_CODES, code_size)
    return weights
