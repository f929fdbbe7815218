"""Lets PyPI's torchvision, torchaudio and torchcodec, all built for CUDA, import beside a CPU build of torch.

Their native libraries do not load there, and each raises at import, and with it transformers and vLLM. torchvision adds
shape functions to the operators ``nms`` and ``qnms``, which then do not exist; torchaudio and torchcodec let an OSError
out that nobody expects. Here the schemas of the two operators are declared when they are missing, torchaudio takes a
library that does not load for one that is not there, which it is written for, and torchcodec says ImportError, which
vLLM is written for. What needs the native code still fails when it is called. Builds that match torch are left alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_SCHEMA = "{}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")

#: torch drops the declarations with the last reference to their library object.
_libraries: list[Any] = []


def _declare_operators(extension: Any) -> None:
    import torch

    missing = [name for name in _OPERATORS if not hasattr(torch.ops.torchvision, name)]
    if missing:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in missing:
            library.define(_SCHEMA.format(name))
        _libraries.append(library)
        logger.debug("torchvision was built for another torch; declared %s without kernels.", missing)


def _tolerate_missing_library(utils: Any) -> None:
    load = utils._load_lib

    def load_or_say_no(library: str) -> bool:
        try:
            return bool(load(library))
        except OSError as exc:
            logger.debug("torchaudio goes without %s: %s", library, exc)
            return False

    utils._load_lib = load_or_say_no


def _raise_import_error(utils: Any) -> None:
    load = utils.load_image_library

    def load_or_raise() -> None:
        try:
            load()
        except OSError as exc:
            raise ImportError(f"torchcodec was built for another torch: {exc}") from exc

    utils.load_image_library = load_or_raise


#: What to do right after a module has run. Both run before anything that depends on the native library.
_AFTER: dict[str, Callable[[Any], None]] = {
    "torchvision.extension": _declare_operators,
    "torchaudio._extension.utils": _tolerate_missing_library,
    "torchcodec._internally_replaced_utils": _raise_import_error,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what Python would have found and adds one step to the end of the module's execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        step = _AFTER.get(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if step else None
        if step is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_step(module: ModuleType) -> None:
            execute(module)
            step(module)

        spec.loader.exec_module = execute_and_step  # type: ignore[method-assign]
        return spec


def plugin() -> None:
    """Install the import hook, once; modules that are loaded already stay as they are.

    vLLM calls this in every process when it looks for its platform (entry point group ``vllm.platform_plugins``),
    before anything of its own imports torchvision. None says that this is not a platform.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
