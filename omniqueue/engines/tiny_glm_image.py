"""A GLM-Image checkpoint with random weights and a few million parameters, laid out as on the Hub.

vLLM-Omni loads it like the real one, on a CPU in seconds, so everything but the pictures' content can be tried without
a GPU. Its autoregressive model never ends by itself and only names entries of the image codebook; the caller limits
the number of tokens. Its weights are scaled so that prompt, size, seed, steps and guidance all show in the pixels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omniqueue import errors
from omniqueue.engines import checkpoint

#: Ids below are image tokens: the codebook, then 128 markers, of which the first two begin and end an image.
CODEBOOK = 16384
VISION_VOCABULARY = 16512
IMAGE_START = 16384
#: What a trained model ends an image with; this one never does.
IMAGE_END = 16385

_SPECIAL = {
    "eos_token": "<|endoftext|>",
    "pad_token": "<|pad|>",
    "image_token": "<|image|>",
    "grid_bos_token": "<sop>",
    "grid_eos_token": "<eop>",
}
#: Rounded up to a multiple of 64 from 16512 image ids, 256 bytes and the special tokens.
_VOCABULARY = 16832
_HIDDEN = 128
#: Prompt bytes and image tokens together; a 512 x 512 picture has 513.
_POSITIONS = 8192
_CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<|image|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def write(directory: Path, seed: int = 0, report: Callable[[str], None] = lambda phase: None) -> Path:
    """Write the checkpoint (about 30 MB) to ``directory``, which must not exist or be empty, and return it.

    The same ``seed`` gives the same weights. An interrupted call leaves nothing at ``directory``. Raises ConfigError
    when the folder holds something already, or when transformers or diffusers is not installed.
    """
    with checkpoint.folder(directory) as unfinished:
        report("importing torch, transformers and diffusers")
        pipeline = _pipeline(seed, report)
        report("saving")
        pipeline.save_pretrained(unfinished)
        _add_processor_config(unfinished)
    return directory


def _pipeline(seed: int, report: Callable[[str], None]) -> Any:
    from omniqueue.platforms.cpu import torchvision_ops

    torchvision_ops.plugin()
    try:
        import torch
        from diffusers import FlowMatchEulerDiscreteScheduler, GlmImagePipeline
        from transformers import ByT5Tokenizer
    except ImportError as exc:
        raise errors.ConfigError(
            f"A tiny checkpoint needs transformers and diffusers: pip install 'omniqueue[cpu]' ({exc})."
        ) from exc
    processor = _processor()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        report("making random weights")
        modules = {
            "vision_language_encoder": _language_model(processor.tokenizer),
            "text_encoder": _glyph_encoder(),
            "transformer": _transformer(),
            "vae": _autoencoder(),
        }
    return GlmImagePipeline(
        tokenizer=ByT5Tokenizer(),
        processor=processor,
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
        ),
        **{name: module.to(torch.bfloat16) for name, module in modules.items()},
    )


def _tokenizer() -> Any:
    """One token a byte, so every prompt in every script tokenises and comes back unchanged."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"<|dit_token_{index}|>": index for index in range(VISION_VOCABULARY)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    for token in _SPECIAL.values():
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict(_SPECIAL)
    names = {key: special.pop(key) for key in ("eos_token", "pad_token")}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=f"<|dit_token_{IMAGE_START}|>",
        extra_special_tokens=special,
        clean_up_tokenization_spaces=False,
        model_max_length=_POSITIONS,
        **names,
    )


def _processor() -> Any:
    from transformers import GlmImageProcessor
    from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

    images = GlmImageImageProcessorPil(
        patch_size=16,
        merge_size=1,
        temporal_patch_size=1,
        size={"shortest_edge": 64 * 64, "longest_edge": 512 * 512},
    )
    return GlmImageProcessor(image_processor=images, tokenizer=_tokenizer(), chat_template=_CHAT_TEMPLATE)


def _language_model(tokenizer: Any) -> Any:
    from transformers import GlmImageConfig, GlmImageForConditionalGeneration

    config = GlmImageConfig(
        text_config={
            "vocab_size": _VOCABULARY,
            "hidden_size": _HIDDEN,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": _POSITIONS,
            "pad_token_id": tokenizer.pad_token_id,
            "vision_vocab_size": VISION_VOCABULARY,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
                "mrope_section": [8, 12, 12],
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 64,
            "num_heads": 2,
            "intermediate_size": 128,
            "image_size": 256,
            "patch_size": 16,
        },
        vq_config={"embed_dim": 32, "num_embeddings": CODEBOOK, "latent_channels": 64},
        image_token_id=tokenizer.convert_tokens_to_ids(_SPECIAL["image_token"]),
    )
    model = GlmImageForConditionalGeneration(config)
    _keep_to_codebook(model)
    return model


def _keep_to_codebook(model: Any) -> None:
    """Scale the weights for varied tokens, and rule out the ids after the codebook.

    The output layer has no bias, so one component of the hidden state is made constant: every embedding has it, no
    layer writes to it, and only the rows of the ids to rule out read it.
    """
    text = model.model.language_model
    text.embed_tokens.weight.normal_(0.0, 1.0)
    text.embed_tokens.weight[:, 0] = 2.0
    for layer in text.layers:
        for weight in (layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight):
            weight.normal_(0.0, 0.2)
        for norm in (layer.post_self_attn_layernorm, layer.post_mlp_layernorm):
            norm.weight[0] = 0.0
    head = model.lm_head.weight
    head.normal_(0.0, 0.25)
    head[:, 0] = 0.0
    head[CODEBOOK:] = 0.0
    head[CODEBOOK:, 0] = -200.0


def _glyph_encoder() -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(
            vocab_size=384, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, feed_forward_proj="gated-gelu"
        )
    )


def _transformer() -> Any:
    from diffusers import GlmImageTransformer2DModel

    return GlmImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        text_embed_dim=64,
        time_embed_dim=64,
        condition_dim=32,
        prior_vq_quantizer_codebook_size=CODEBOOK,
    )


def _autoencoder() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        # Narrow: CPUs without bfloat16 instructions take seconds a picture with the usual widths.
        block_out_channels=[4, 4, 8, 8],
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        sample_size=64,
        latents_mean=[0.0] * 16,
        latents_std=[1.0] * 16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def _add_processor_config(directory: Path) -> None:
    """vLLM looks for a model configuration beside the tokenizer and retries for seconds when there is none."""
    source = json.loads((directory / "vision_language_encoder" / "config.json").read_text())
    (directory / "processor" / "config.json").write_text(json.dumps(source, indent=2))
