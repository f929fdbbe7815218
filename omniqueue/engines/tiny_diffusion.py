"""Checkpoints of one diffusion stage with random weights, laid out as on the Hub: video (Wan) and sound (Stable Audio).

vLLM-Omni loads them like the real ones, on a CPU in seconds, so everything but the content can be tried without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omniqueue.engines import checkpoint

_HIDDEN = 32
#: Channels between autoencoder and transformer.
_SOUND_LATENTS, _VIDEO_LATENTS = 8, 16
#: Latent steps of the longest sound: 3 s of 2048 samples each at 44.1 kHz.
_SOUND_STEPS = 64


def write(
    architecture: str, directory: Path, seed: int = 0, report: Callable[[str], None] = lambda phase: None
) -> Path:
    """Write ``wan`` or ``stable_audio`` (a few megabytes) to ``directory``, which must not exist or be empty.

    The same ``seed`` gives the same weights. Raises ConfigError when the folder holds something already.
    """
    from omniqueue.platforms.cpu import torchvision_ops

    torchvision_ops.plugin()
    import torch

    with checkpoint.folder(directory) as unfinished:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            report("making random weights")
            pipeline = _BUILDERS[architecture]()
        report("saving")
        pipeline.save_pretrained(unfinished)
    return directory


def _encoder(kind: Any, config: Any) -> Any:
    return kind(
        config(
            vocab_size=384, d_model=_HIDDEN, d_kv=16, d_ff=64, num_layers=1, num_heads=2, feed_forward_proj="gated-gelu"
        )
    )


def _wan() -> Any:
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
    from transformers import ByT5Tokenizer, UMT5Config, UMT5EncoderModel

    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=_HIDDEN,
        in_channels=_VIDEO_LATENTS,
        out_channels=_VIDEO_LATENTS,
        text_dim=_HIDDEN,
        freq_dim=_HIDDEN,
        ffn_dim=64,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=256,
    )
    vae = AutoencoderKLWan(base_dim=4, z_dim=_VIDEO_LATENTS, dim_mult=[1, 2, 2, 2], num_res_blocks=1)
    return WanPipeline(
        tokenizer=ByT5Tokenizer(),
        text_encoder=_encoder(UMT5EncoderModel, UMT5Config),
        transformer=transformer,
        vae=vae,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    )


def _stable_audio() -> Any:
    from diffusers import (
        AutoencoderOobleck,
        CosineDPMSolverMultistepScheduler,
        StableAudioDiTModel,
        StableAudioPipeline,
        StableAudioProjectionModel,
    )
    from transformers import T5Config, T5EncoderModel, T5TokenizerFast

    letters = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    letters += [(chr(code), -3.0) for code in range(33, 127)]
    transformer = StableAudioDiTModel(
        sample_size=_SOUND_STEPS,
        in_channels=_SOUND_LATENTS,
        out_channels=_SOUND_LATENTS,
        num_layers=2,
        attention_head_dim=_HIDDEN,
        num_attention_heads=2,
        num_key_value_attention_heads=1,
        cross_attention_dim=_HIDDEN,
        time_proj_dim=16,
        global_states_input_dim=2 * _HIDDEN,
        cross_attention_input_dim=_HIDDEN,
    )
    vae = AutoencoderOobleck(
        encoder_hidden_size=8,
        downsampling_ratios=[2, 4, 4, 8, 8],
        channel_multiples=[1, 1, 1, 1, 1],
        decoder_channels=8,
        decoder_input_channels=_SOUND_LATENTS,
        audio_channels=2,
        sampling_rate=44_100,
    )
    return StableAudioPipeline(
        tokenizer=T5TokenizerFast(vocab=letters, extra_ids=0, model_max_length=64),
        text_encoder=_encoder(T5EncoderModel, T5Config),
        projection_model=StableAudioProjectionModel(_HIDDEN, _HIDDEN, 0.0, 512.0),
        transformer=transformer,
        vae=vae,
        scheduler=CosineDPMSolverMultistepScheduler(
            solver_order=2, prediction_type="v_prediction", sigma_data=1.0, sigma_schedule="exponential"
        ),
    )


_BUILDERS: Mapping[str, Callable[[], Any]] = {"wan": _wan, "stable_audio": _stable_audio}
