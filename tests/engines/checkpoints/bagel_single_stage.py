"""BAGEL's checkpoint again, for the stage config that has one stage do all."""

from __future__ import annotations

from tests.engines.checkpoints.bagel import write

__all__ = ["write"]
