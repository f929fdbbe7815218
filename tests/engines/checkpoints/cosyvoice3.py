"""A tiny random CosyVoice3: a Qwen2 of two layers that writes speech tokens, a flow to mel frames, and a vocoder.

Sizes come from the stage config beside this: vLLM-Omni's configuration class knows the published ones alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from tests.engines import checkpoints
from tests.engines.checkpoints import common

#: The folder of the text model that CosyVoice started from, by its published name.
_TEXT = "CosyVoice-BlankEN"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|endofprompt|>")
#: Tokens beside the speech tokens: where it starts, ends and fills.
_MARKS = 200


def write(folder: Path) -> None:
    """Write the checkpoint into ``folder``: 12 MB."""
    import vllm_omni  # noqa: F401  # before any vllm symbol: it replaces classes in vllm's modules
    from transformers import Qwen2Config
    from vllm_omni.transformers_utils.configs.cosyvoice3 import CosyVoice3Config

    torch.manual_seed(0)
    sizes = yaml.safe_load(checkpoints.config("cosyvoice3").read_text())["stages"][0]["hf_overrides"]
    config = CosyVoice3Config()
    config.update(sizes)
    text = Qwen2Config(
        **{name: sizes[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")},
        num_hidden_layers=sizes["num_hidden_layers"],
        intermediate_size=128,
        max_position_embeddings=4096,
        architectures=["Qwen2ForCausalLM"],
    )
    text.save_pretrained(folder / _TEXT)
    common.tokenizer(_SPECIAL, {"eos_token": "<|endoftext|>"}).save_pretrained(folder / _TEXT)
    common.write_json(folder / "config.json", {"model_type": "cosyvoice3", "architectures": ["CosyVoice3Model"]})
    torch.save(_talker(text, config.llm["speech_token_size"] + _MARKS), folder / "llm.pt")
    _write_vocoder(config, folder)
    _write_speaker_model(config.spk_embed_dim, folder / config.campplus_onxx_path)


def _talker(config: Any, words: int) -> dict[str, torch.Tensor]:
    from transformers import Qwen2Model

    model = common.level(Qwen2Model(config))
    weights = {f"llm.model.model.{name}": weight for name, weight in model.state_dict().items()}
    shape = (words, config.hidden_size)
    heads = common.drawn({"speech_embedding.weight": shape, "llm_decoder.weight": shape}, llm_decoder=3.0)
    return {**weights, **heads}


def _write_vocoder(config: Any, folder: Path) -> None:
    from vllm_omni.model_executor.models.cosyvoice3.cosyvoice3_code2wav import CosyVoice3Code2Wav

    model = common.level(CosyVoice3Code2Wav(config))
    last = model.hift.conv_post
    with torch.no_grad():  # it makes logarithms of magnitudes, and the wave is cut at one
        last.parametrizations.weight.original0.mul_(0.3)
        last.bias[: config.hift["istft_params"]["n_fft"] // 2 + 1] = -2.0
    torch.save(model.flow_model.state_dict(), folder / "flow.pt")
    torch.save({f"generator.{name}": weight for name, weight in model.hift.state_dict().items()}, folder / "hift.pt")


def _write_speaker_model(width: int, path: Path) -> None:
    """A voice's mean spectrum, projected, as an ONNX model like the published one."""
    import numpy
    import onnx
    from onnx import helper, numpy_helper

    weight = numpy.random.default_rng(0).standard_normal((80, width)).astype(numpy.float32)
    axes = numpy.array([1], dtype=numpy.int64)
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["feat", "axes"], ["mean"], keepdims=0),
            helper.make_node("MatMul", ["mean", "weight"], ["embedding"]),
        ],
        "speaker",
        [helper.make_tensor_value_info("feat", onnx.TensorProto.FLOAT, [1, "frames", 80])],
        [helper.make_tensor_value_info("embedding", onnx.TensorProto.FLOAT, [1, width])],
        [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(axes, "axes")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), str(path))
