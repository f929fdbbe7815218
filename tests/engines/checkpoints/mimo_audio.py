"""MiMo-Audio: one language model that writes text and, where it says so, groups of sound codes; then codes to a wave.

The audio tokenizer, a checkpoint of its own as published, goes into the folder ``audio_tokenizer``; vLLM-Omni finds it
by the environment variable MIMO_AUDIO_TOKENIZER_PATH.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from tests.engines.checkpoints import common

#: As in added_tokens.json of XiaomiMiMo/MiMo-Audio-7B-Instruct; vLLM-Omni's code has them as numbers.
SPECIAL = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|sosp|>": 151665,
    "<|eosp|>": 151666,
    "<|empty|>": 151667,
    "<|sostm|>": 151670,
    "<|eostm|>": 151671,
    "<|eot|>": 151672,
}
_VOCABULARY = 151680
#: One head: vLLM-Omni fixes the rotary embedding's three sections, and they add up to half a head.
_HEAD = 128
_HIDDEN = 32
#: Codes a frame and frames a group; vLLM-Omni takes no others.
_CHANNELS, _GROUP = 8, 4
_CODES = [1024, 1024] + 6 * [128]


def write(folder: Path) -> None:
    """Write the language model (bfloat16, 80 MB) and the audio tokenizer (float32, 2 MB) below ``folder``."""
    import torch

    torch.manual_seed(0)
    _write_language_model(folder)
    _write_audio_tokenizer(folder / "audio_tokenizer")


def _write_language_model(folder: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model

    text = common.tokenizer(SPECIAL, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    text.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=_VOCABULARY,
        hidden_size=_HEAD,
        intermediate_size=2 * _HEAD,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=4096,
    )
    model = common.level(Qwen2ForCausalLM(config))
    model.lm_head.weight.data = _output_layer(text)
    local = Qwen2Config(
        vocab_size=1,
        hidden_size=_HIDDEN,
        intermediate_size=4 * _HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    sizes = [codes + 1 for codes in _CODES]
    parts: dict[str, Any] = {
        "": model,
        "input_local_transformer.": Qwen2Model(local),
        "local_transformer.": Qwen2Model(local),
        "hidden_states_downcast.": torch.nn.Linear(_HEAD, _HIDDEN, bias=False),
        "speech_group_downcast.": torch.nn.Linear(_GROUP * _HIDDEN, _HEAD, bias=False),
    }
    for channel, size in enumerate(sizes):
        parts[f"local_transformer_lm_heads.{channel}."] = torch.nn.Linear(_HIDDEN, size, bias=False)
        parts[f"speech_embeddings.{channel}."] = torch.nn.Embedding(size, _HIDDEN)
    tensors = {
        prefix + name: value
        for prefix, part in parts.items()
        for name, value in (part if part is model else common.level(part)).state_dict().items()
        if not (name == "embed_tokens.weight" and part is not model)
    }
    common.save(tensors, folder, dtype=torch.bfloat16)
    published = {
        **config.to_dict(),
        "architectures": ["MiMoAudioModel"],
        "dtype": "bfloat16",
        "speech_vocab_size": "-".join(str(size) for size in sizes),
        "speech_zeroemb_idx": "-".join(str(size - 1) for size in sizes),
        "delay_pattern": "0-1-2-3-4-5-6-7",
        "group_size": _GROUP,
        "audio_channels": _CHANNELS,
        "local_dim": _HIDDEN,
        "local_layers": 1,
        "local_attn_heads": 2,
        "local_ffn_dim": 4 * _HIDDEN,
        "input_local_layers": 1,
        "input_local_dim": _HIDDEN,
        "input_full_attention": True,
    }
    common.write_json(folder / "config.json", published)


def _output_layer(text: Any) -> Any:
    """Scores for letters and for "a group of codes follows" only; the latter often wins, as in speech."""
    import torch

    weight = torch.zeros(_VOCABULARY, _HEAD)
    letters = text.convert_tokens_to_ids(list(string.ascii_letters + string.digits))
    weight[letters] = torch.randn(len(letters), _HEAD)
    weight[SPECIAL["<|empty|>"]] = 4.0 * torch.randn(_HEAD)
    return weight


def _write_audio_tokenizer(folder: Path) -> None:
    from vllm_omni.model_executor.models.mimo_audio.config_mimo_audio import MiMoAudioTokenizerConfig
    from vllm_omni.model_executor.models.mimo_audio.modeling_audio_tokenizer import MiMoAudioTokenizer

    config = MiMoAudioTokenizerConfig(
        d_model=_HIDDEN,
        avg_pooler=2,
        encoder_layers=1,
        encoder_attention_heads=2,
        encoder_ffn_dim=64,
        encoder_causal=True,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=64,
        nfft=960,
        window_size=960,
        vocoder_dim=64,
        vocoder_intermediate_dim=128,
        vocoder_num_layers=1,
        vocoder_attention_heads=2,
        num_quantizers=_CHANNELS,
        codebook_size=_CODES,
    )
    model = common.level(MiMoAudioTokenizer(config))
    tensors = model.state_dict()
    for name, value in tensors.items():
        if name.endswith(".embed"):
            value.normal_()
    folder.mkdir()
    common.save(tensors, folder)
    common.write_json(folder / "config.json", config.to_dict())
