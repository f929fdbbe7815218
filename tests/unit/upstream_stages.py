"""Run as a program: what vLLM-Omni itself reads from its deploy files, for every platform, as JSON on stdout."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from omniqueue import schema


def entry(stage: Any) -> dict[str, Any]:
    """A StageDeployConfig as one flat mapping, without what the file did not set."""
    fields = {field.name: field for field in dataclasses.fields(stage)}
    flat = {name: getattr(stage, name) for name in fields if getattr(stage, name) != fields[name].default}
    extras = flat.pop("engine_extras", {})
    return {key: value for key, value in {**flat, **extras}.items() if value is not None}


def stages_of(path: Path, platform: str) -> list[dict[str, Any]]:
    config = import_module("vllm_omni.config.stage_config")
    deploy = config.load_deploy_config(path)
    deploy.model_runner = "v1"
    for section in (deploy.platforms or {}).values():
        # A runner that a platform lacks is refused there; the stages are what is compared.
        section.pop("model_runner", None)
    return [entry(stage) for stage in config._apply_platform_overrides(deploy, platform).stages]


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):
        folder = Path(str(import_module("vllm_omni").__file__)).parent / "deploy"
        found = {
            f"{path.name} {platform}": stages_of(path, platform)
            for path in sorted(folder.glob("*.yaml"))
            for platform in schema.PLATFORMS
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
