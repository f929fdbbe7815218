"""Engine answers become stage outputs, and answers without content become errors."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from PIL import Image

from omniqueue import errors
from omniqueue.engines import omni_output, omni_prompt
from omniqueue.engines.base import StageOutput

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


def answer(**fields: Any) -> Any:
    return SimpleNamespace(**{"outputs": [], "images": [], "multimodal_output": {}, "prompt_token_ids": [9], **fields})


def completion(**fields: Any) -> Any:
    return SimpleNamespace(**{"token_ids": [1, 2], "text": "", "finish_reason": "stop", **fields})


def language(**fields: Any) -> StageOutput:
    return omni_output.convert(answer(**fields), diffusion=False, final=False, final_type=None)


def picture(final_type: str = "image", **fields: Any) -> StageOutput:
    return omni_output.convert(answer(**fields), diffusion=True, final=True, final_type=final_type)


def sound(**multimodal: Any) -> StageOutput:
    fields = answer(outputs=[completion(token_ids=[])], multimodal_output=multimodal)
    return omni_output.convert(fields, diffusion=False, final=True, final_type="audio")


def test_tokens_text_and_usage_are_kept() -> None:
    output = language(outputs=[completion(cumulative_token_ids=[7, 1, 2], text="c", cumulative_text="abc")])
    assert output.data == {
        "token_ids": [1, 2],
        "cumulative_token_ids": [7, 1, 2],
        "text": "c",
        "cumulative_text": "abc",
        "prompt_token_ids": [9],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 1, "completion_tokens": 3},
    }


def test_hidden_states_travel_and_come_back() -> None:
    import torch

    layers = {"0": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "24": torch.ones(1)}
    images = [torch.tensor([3, 4]), torch.tensor([5])]
    nested = {"hidden_states": {"layers": layers}, "ids": {"prior_image": images}, "meta": {"finished": True}}
    output = language(outputs=[completion()], multimodal_output=nested)
    assert set(output.tensors) == {
        "multimodal/hidden_states/layers/0",
        "multimodal/hidden_states/layers/24",
        "multimodal/ids/prior_image/[0]",
        "multimodal/ids/prior_image/[1]",
    }
    restored = omni_prompt.restore("r", output).multimodal_output
    assert restored["meta"] == {"finished": True}
    assert restored["hidden_states"]["layers"]["0"].dtype is torch.bfloat16
    assert restored["hidden_states"]["layers"]["0"].equal(layers["0"])
    assert [one.tolist() for one in restored["ids"]["prior_image"]] == [[3, 4], [5]]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_a_picture_is_height_width_and_three_channels(mode: str) -> None:
    image = Image.new(mode, (6, 4))
    tensor = picture(images=[image]).tensors["image"]
    assert (tensor.dtype, tensor.shape) == ("uint8", (4, 6, 3))


def test_pixels_are_not_changed() -> None:
    pixels: Any = numpy.arange(4 * 6 * 3, dtype=numpy.uint8).reshape(4, 6, 3)
    tensor = picture(images=[Image.fromarray(pixels)]).tensors["image"]
    assert bytes(tensor.buffer) == pixels.tobytes()


@pytest.mark.parametrize("given", ["list", "array", "multimodal"])
def test_several_frames_are_a_video(given: str) -> None:
    frames = numpy.linspace(0, 1, 5 * 2 * 4 * 3, dtype=numpy.float32).reshape(5, 2, 4, 3)
    fields: dict[str, Any] = {
        "list": {"images": [Image.fromarray((frame * 255).astype(numpy.uint8)) for frame in frames]},
        "array": {"images": [frames], "multimodal_output": {"fps": 24}},
        "multimodal": {"multimodal_output": {"video": frames, "fps": 16}},
    }
    output = picture("video", **fields[given])
    assert output.tensors["video"].shape == (5, 2, 4, 3)
    assert output.data["fps"] == {"list": 8.0, "array": 24.0, "multimodal": 16.0}[given]


def test_sound_is_one_wave_with_its_rate() -> None:
    import torch

    output = sound(audio=[torch.zeros(1, 3), torch.ones(2, dtype=torch.float64)], sr=[torch.tensor(16000)])
    assert (output.tensors["audio"].dtype, output.tensors["audio"].shape) == ("float32", (5,))
    assert output.data["sample_rate"] == 16000
    assert list(output.tensors) == ["audio"]


def test_sound_without_a_rate_has_vllm_omnis_default() -> None:
    import torch

    assert sound(audio=torch.ones(2)).data["sample_rate"] == 24000


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: omni_output.convert(None, diffusion=True, final=True, final_type="image"), "without an answer"),
        (lambda: language(outputs=[completion(token_ids=[])]), "without producing a token"),
        (lambda: language(), "without producing a token"),
        (lambda: picture(), "no picture"),
        (lambda: sound(), "no audio"),
        (lambda: sound(audio=[]), "no audio"),
        (lambda: picture(images=[numpy.full((2, 2, 3), numpy.nan)]), "NaN"),
        (lambda: picture(images=[numpy.zeros((2, 2, 4))]), "not of pictures"),
        (lambda: language(outputs=[completion(finish_reason="abort")]), "aborted"),
    ],
)
def test_an_answer_without_content_is_an_error(make: Any, said: str) -> None:
    with pytest.raises(errors.EngineError, match=said):
        make()


def test_nan_sound_is_an_error() -> None:
    import torch

    with pytest.raises(errors.EngineError, match="NaN"):
        sound(audio=torch.tensor([0.0, float("nan")]))


def test_nan_pixels_do_not_become_black_in_diffusers() -> None:
    import torch
    from diffusers.image_processor import VaeImageProcessor

    with warnings.catch_warnings():
        omni_output.refuse_nan_pixels()
        with pytest.raises(RuntimeWarning, match="invalid value"):
            VaeImageProcessor().postprocess(torch.full((1, 3, 8, 8), float("nan")), output_type="pil")


def test_both_channels_of_a_stereo_sound_are_kept_and_its_pieces_joined() -> None:
    import torch

    left, right = torch.arange(4.0), -torch.arange(4.0)
    whole = sound(audio=torch.stack([left, right])[None]).tensors["audio"]
    assert whole.shape == (2, 4)
    assert memoryview(whole.buffer).cast("B").cast("f").tolist() == [0, 1, 2, 3, 0, -1, -2, -3]
    assert sound(audio=[torch.ones(1, 2, 3), torch.ones(1, 2, 5)]).tensors["audio"].shape == (2, 8)
