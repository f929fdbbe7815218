"""GLM-Image's own classes at tiny size, and their folder in the Hub's layout.

Every class, token and file is where zai-org/GLM-Image has it, so that vLLM-Omni and diffusers load the folder as they
load the real one. Only widths, depths and the vocabulary are smaller: a token is a byte or an entry of the codebook.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omniqueue.platforms.cpu import torchvision_ops

torchvision_ops.plugin()  # before transformers: PyPI's torchvision does not import beside a CPU build of torch

import torch  # noqa: E402
from diffusers import (  # noqa: E402
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    GlmImagePipeline,
    GlmImageTransformer2DModel,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    ByT5Tokenizer,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    GlmImageProcessor,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)
from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil  # noqa: E402

from examples.tiny_glm_image import captions  # noqa: E402

#: GLM-Image has 16384 ids for its codebook, then 128 markers, of which the first two begin and end an image.
IMAGE_START, IMAGE_END, VISION_VOCABULARY = 16384, 16385, 16512
LATENT_CHANNELS = 8
WIDTHS = [16, 16, 32, 32]
LAYERS = 4
GROUPS = 1
_SPECIAL = {
    "eos_token": "<|endoftext|>",
    "pad_token": "<|pad|>",
    "image_token": "<|image|>",
    "grid_bos_token": "<sop>",
    "grid_eos_token": "<eop>",
}
#: 16512 image ids, 256 bytes, the special tokens and the merges, rounded up to a multiple of 64.
_VOCABULARY = 17024
_POSITIONS = 8192
_CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<|image|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def tokenizer() -> Any:
    """Bytes, and the world's words as merges of them, so every prompt in every script comes back unchanged."""
    vocabulary = {f"<|dit_token_{index}|>": index for index in range(VISION_VOCABULARY)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    for token in _SPECIAL.values():
        vocabulary[token] = len(vocabulary)
    merges: list[tuple[str, str]] = []
    letters = [[_bytewise(letter) for letter in word] for word in captions.words()]
    # Whole characters before words: many share their first bytes.
    for pieces in (*(list(letter) for word in letters for letter in word), *letters):
        for end in range(1, len(pieces)):
            head = "".join(pieces[:end])
            if head + pieces[end] not in vocabulary:
                vocabulary[head + pieces[end]] = len(vocabulary)
                merges.append((head, pieces[end]))
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    special = dict(_SPECIAL)
    names = {key: special.pop(key) for key in ("eos_token", "pad_token")}
    return PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        bos_token=f"<|dit_token_{IMAGE_START}|>",
        extra_special_tokens=special,
        clean_up_tokenization_spaces=False,
        model_max_length=_POSITIONS,
        **names,
    )


def _bytewise(text: str) -> str:
    [(pieces, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return str(pieces)


def language_model(tokens: Any) -> Any:
    """The autoregressive model: a prompt becomes a preview's tokens, then the picture's, then the end token."""
    config = GlmImageConfig(
        text_config={
            "vocab_size": _VOCABULARY,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": _POSITIONS,
            "pad_token_id": tokens.pad_token_id,
            "vision_vocab_size": VISION_VOCABULARY,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
                "mrope_section": [4, 6, 6],
            },
        },
        # Pictures as input are not part of this world: the smallest encoder there can be, untrained.
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 32,
            "image_size": 256,
            "patch_size": 16,
        },
        vq_config={"embed_dim": 4, "num_embeddings": IMAGE_START, "latent_channels": 16},
        image_token_id=tokens.convert_tokens_to_ids(_SPECIAL["image_token"]),
    )
    model = GlmImageForConditionalGeneration(config)
    # Every layer's output is normed before it is added: beside the usual small embeddings it would drown the token.
    torch.nn.init.normal_(model.model.language_model.embed_tokens.weight)
    return model


def glyph_encoder() -> Any:
    """Reads what stands in quotation marks, byte by byte."""
    return T5EncoderModel(
        T5Config(
            vocab_size=384, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, feed_forward_proj="gated-gelu"
        )
    )


def transformer(codes: int) -> Any:
    """The diffusion transformer for a codebook of so many entries in use; a token of it is 16 x 16 pixels."""
    return GlmImageTransformer2DModel(
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=5,
        attention_head_dim=32,
        num_attention_heads=4,
        text_embed_dim=64,
        time_embed_dim=64,
        condition_dim=32,
        prior_vq_quantizer_codebook_size=codes,
    )


def autoencoder(mean: list[float] | None = None, std: list[float] | None = None) -> Any:
    """Eight pixels a latent, and the latents' statistics once they are known.

    It is narrow because CPUs without bfloat16 instructions take seconds a picture with the usual widths.
    """
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=WIDTHS,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        # One group: with few channels in many groups the norms would wash out colours.
        norm_num_groups=GROUPS,
        sample_size=64,
        latents_mean=mean or [0.0] * LATENT_CHANNELS,
        latents_std=std or [1.0] * LATENT_CHANNELS,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def save(directory: Path, modules: dict[str, Any]) -> None:
    """Write the checkpoint in bfloat16; ``modules`` are by their name in the Hub's layout."""
    tokens = tokenizer()
    images = GlmImageImageProcessorPil(
        patch_size=16,
        merge_size=1,
        temporal_patch_size=1,
        size={"shortest_edge": 64 * 64, "longest_edge": 512 * 512},
    )
    pipeline = GlmImagePipeline(
        tokenizer=ByT5Tokenizer(),
        processor=GlmImageProcessor(image_processor=images, tokenizer=tokens, chat_template=_CHAT_TEMPLATE),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
        ),
        **{name: module.to(torch.bfloat16) for name, module in modules.items()},
    )
    pipeline.save_pretrained(directory)
    # vLLM looks for a model configuration beside the tokenizer and retries for seconds when there is none.
    source = json.loads((directory / "vision_language_encoder" / "config.json").read_text())
    (directory / "processor" / "config.json").write_text(json.dumps(source, indent=2) + "\n")
