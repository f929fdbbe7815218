"""JoyAI-VL-Interaction: a Qwen3-VL writes what it would do; the Qwen3-TTS in a folder below says what it would say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engines.checkpoints import common, qwen3_tts

#: Where the stage config looks for the voice.
_VOICE = "tts"
_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
_NAMES = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
_VISION = {
    "depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "num_position_embeddings": 64,
    "out_hidden_size": common.QWEN3_LAYERS["hidden_size"], "deepstack_visual_indexes": [0],
}  # fmt: skip


def write(folder: Path) -> None:
    """Write both models: 25 MB."""
    import torch
    from transformers import GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = common.tokenizer(_SPECIAL, _NAMES)
    _save_processor(text, folder)
    torch.manual_seed(0)
    config = _config(Qwen3VLConfig, text)
    model = Qwen3VLForConditionalGeneration(config)
    common.spread(model)
    common.save(model.state_dict(), folder)
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=[config.text_config.eos_token_id]).save_pretrained(folder)
    (folder / _VOICE).mkdir()
    qwen3_tts.write(folder / _VOICE)


def _config(kind: Any, text: Any) -> Any:
    ids = text.convert_tokens_to_ids
    words = {
        **common.QWEN3_LAYERS, "vocab_size": len(text), "max_position_embeddings": 4096, "rope_parameters": _ROPE,
        "eos_token_id": ids("<|im_end|>"),
    }  # fmt: skip
    return kind(
        text_config=words,
        vision_config=_VISION,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        architectures=["Qwen3VLForConditionalGeneration"],
        dtype="float32",
    )


def _save_processor(text: Any, folder: Path) -> None:
    from transformers import Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    patches = {"patch_size": 16, "merge_size": 2}
    Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessorPil(**patches),
        video_processor=Qwen3VLVideoProcessor(**patches),
        tokenizer=text,
        chat_template=text.chat_template,
    ).save_pretrained(folder)
