"""The engines a stage can run on: the only place, with platforms/, where vllm, vllm_omni and torch are imported."""

from __future__ import annotations

import importlib

from omniqueue import errors
from omniqueue.engines.base import Engine
from omniqueue.pipeline import Stage

_METHODS = ("start", "generate", "abort", "check_health", "close")
_BUILT_IN = {
    "fake": "omniqueue.engines.fake:FakeEngine",
    "vllm": "omniqueue.engines.vllm:VllmEngine",
    "vllm_omni": "omniqueue.engines.vllm_omni:VllmOmniEngine",
}


def create(stage: Stage) -> Engine:
    """An engine for a stage, not started. Raises ConfigError when its class cannot be imported or is no engine."""
    path = _BUILT_IN.get(stage.engine, stage.engine)
    module, _, name = path.partition(":")
    try:
        engine = getattr(importlib.import_module(module), name)()
    except Exception as exc:  # a user's module and constructor may raise anything
        raise errors.ConfigError(f"engine {stage.engine!r} of stage {stage.stage_id} cannot be loaded: {exc}.") from exc
    if not isinstance(engine, Engine):
        missing = [name for name in _METHODS if not hasattr(engine, name)]
        raise errors.ConfigError(f"{path} is not an engine; it lacks {', '.join(missing)}.")
    return engine
