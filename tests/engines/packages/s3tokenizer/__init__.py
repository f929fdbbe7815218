"""Stands in for s3tokenizer, whose ``load_model`` downloads a published model by name: a random one with its functions.

CosyVoice3 has its reference sound cut into 25 tokens a second by it. Found by ``PYTHONPATH`` in the processes of tests.
"""

from __future__ import annotations

from typing import Any

import torch

_WINDOW, _HOP = 400, 160
_MELS = 128
#: Mel frames in one token, and digits of three values in its number: 6,561 tokens.
_FRAMES, _DIGITS = 4, 8


class Tokenizer:
    """One random projection, rounded."""

    def __init__(self) -> None:
        self.weight = torch.randn(_MELS, _DIGITS, generator=torch.Generator().manual_seed(0))

    def to(self, device: Any) -> Tokenizer:
        self.weight = self.weight.to(device)
        return self

    def eval(self) -> Tokenizer:
        return self

    def quantize(self, mels: Any, lengths: Any) -> tuple[Any, Any]:
        """Tokens (batch, frames / 4) of mels (batch, 128, frames), and how many of them each sound has."""
        whole = mels.shape[-1] // _FRAMES * _FRAMES
        pooled = mels[..., :whole].unflatten(-1, (-1, _FRAMES)).mean(-1).transpose(1, 2)
        digits = (torch.sin(pooled @ self.weight) * 1.49).round().long() + 1
        return (digits * 3 ** torch.arange(_DIGITS)).sum(-1), lengths // _FRAMES


def load_model(name: str) -> Tokenizer:
    return Tokenizer()


def log_mel_spectrogram(audio: Any) -> Any:
    """Of a sound at 16 kHz, shape (128, frames)."""
    window = torch.hann_window(_WINDOW)
    power = torch.stft(audio, _WINDOW, _HOP, window=window, return_complex=True)[..., :-1].abs() ** 2
    bands = torch.nn.functional.adaptive_avg_pool1d(power.T.unsqueeze(0), _MELS)[0].T
    return bands.clamp(min=1e-10).log10()


def padding(mels: list[Any]) -> tuple[Any, Any]:
    lengths = torch.tensor([mel.shape[-1] for mel in mels])
    return torch.nn.utils.rnn.pad_sequence([mel.T for mel in mels], batch_first=True).transpose(1, 2), lengths
