"""HunyuanImage-3.0's checkpoint again, for the stage config whose second stage continues the first one's cache."""

from __future__ import annotations

from tests.engines.checkpoints.hunyuan_image3 import write

__all__ = ["write"]
