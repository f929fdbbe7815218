"""Which pipeline a model is and what its stages are: vLLM-Omni's registry, shipped as stage_configs/topologies.yaml."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from omniqueue import errors

#: A checkpoint's config file is small; a larger one is not read.
_MAX_JSON_BYTES = 8 << 20


def shipped() -> Path:
    """The folder of the stage configs that come with the package."""
    return Path(str(resources.files("stage_configs")))


def find_config(text: str) -> Path:
    """A stage config by path, or by name among those that ship. Raises ConfigError."""
    for path in (Path(text), shipped() / text, shipped() / f"{text}.yaml"):
        if path.is_file():
            return path.resolve()
    names = ", ".join(sorted(path.stem for path in shipped().glob("*.yaml") if path.stem != "topologies"))
    raise errors.ConfigError(f"There is no stage config {text}; give a path, or one that ships: {names}.")


@functools.cache
def table() -> dict[str, Any]:
    """The generated table; see :mod:`omniqueue.engines.registry`."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: dict[str, Any] = yaml.load((shipped() / "topologies.yaml").read_text(encoding="utf-8"), Loader=loader)
    return found


@dataclass(frozen=True)
class Topology:
    """A pipeline's stages before a file has said anything about them."""

    #: Registry key; None for a single diffusion stage that has no key of its own.
    key: str | None
    stages: tuple[Mapping[str, Any], ...]
    size_multiple: int = 1
    #: What stages hand to each other: ``from``, ``to``, ``carries``; ``connects`` where it can go by connector as well,
    #: ``refused`` where queues cannot carry it.
    edges: tuple[Mapping[str, Any], ...] = ()
    #: Other pipelines of the same model that can be served, where this one cannot.
    alternatives: tuple[str, ...] = ()
    #: How it was found, for the notes; empty when the file names it.
    found_by: str = ""


def keys() -> list[str]:
    """The registry's keys."""
    return list(table()["pipelines"])


def parse(key: str, entry: Mapping[str, Any], found_by: str = "") -> Topology:
    """The topology that an entry of the table describes."""
    return Topology(
        key,
        tuple(entry["stages"]),
        size_multiple=entry.get("size_multiple", 1),
        edges=tuple(entry.get("edges", ())),
        alternatives=tuple(entry.get("alternatives", ())),
        found_by=found_by,
    )


def named(key: str, found_by: str = "") -> Topology:
    """The topology behind a registry key."""
    return parse(key, table()["pipelines"][key], found_by)


def _generic(class_name: object, found_by: str) -> Topology | None:
    """A diffusers model without a key of its own is one diffusion stage, as in vLLM-Omni."""
    output_type = table()["diffusion_classes"].get(class_name) if isinstance(class_name, str) else None
    if output_type is None:
        return None
    stage = {"stage_id": 0, "name": "diffusion", "execution_type": "diffusion", "input_sources": []}
    row = {**stage, "final_output": True, "final_output_type": output_type}
    return Topology(None, (row,), found_by=found_by)


def _squeezed(text: str) -> str:
    return text.lower().replace("-", "").replace("_", "")


def by_name(text: str) -> str | None:
    """The longest registry key within a name, dashes and underscores ignored."""
    name = _squeezed(text)
    found = [key for key in keys() if _squeezed(key) in name]
    return max(found, key=lambda key: len(_squeezed(key)), default=None)


def by_architecture(names: Iterable[object]) -> str | None:
    """The first pipeline that claims one of these architectures and needs no code to be sure."""
    wanted = set(filter(lambda name: isinstance(name, str), names))
    for key, entry in table()["pipelines"].items():
        if not entry.get("by_predicate") and wanted.intersection(entry.get("architectures", ())):
            return str(key)
    return None


def _by_diffusers_class(class_name: object) -> str | None:
    return next((key for key, e in table()["pipelines"].items() if class_name in e.get("diffusers", ())), None)


def _cache_folder(model: str) -> Path | None:
    """Where a hub id's files lie if they have been downloaded before."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    root = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{model.replace('/', '--')}"
    try:
        return root / "snapshots" / (root / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None


def _json(folder: Path | None, name: str) -> dict[str, Any]:
    """A JSON object from a checkpoint folder; empty when there is none to read."""
    try:
        if folder is None or (folder / name).stat().st_size > _MAX_JSON_BYTES:
            return {}
        found = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _by_config(config: Mapping[str, Any]) -> str | None:
    """The key that config.json's model_type or architectures stand for."""
    model_type = config.get("model_type") or config.get("architecture")
    if isinstance(model_type, str) and model_type in table()["pipelines"]:
        return model_type
    architectures = config.get("architectures")
    return by_architecture(architectures if isinstance(architectures, list) else ())


def by_model(model: str) -> Topology | None:
    """What a checkpoint folder or hub id is, in vLLM-Omni's order: config.json, model_index.json, then its name."""
    folder = Path(model) if Path(model).is_dir() else _cache_folder(model)
    config, index = _json(folder, "config.json"), _json(folder, "model_index.json")
    key = _by_config(config)
    if key:
        return named(key, f"{model}/config.json")
    class_name = index.get("_class_name")
    key = _by_diffusers_class(class_name)
    if key:
        return named(key, f"{model}/model_index.json")
    generic = _generic(class_name, f"{model}/model_index.json")
    key = None if generic or config.get("model_type") else by_name(model.rstrip("/").rsplit("/", 1)[-1])
    return named(key, f"the model's name, {model}") if key else generic


def by_file(paths: Iterable[str]) -> Topology | None:
    """What a deploy file is by its name, or by the name of a file it builds on."""
    files = [Path(path) for path in paths]
    for file in files:
        for key, entry in table()["pipelines"].items():
            if file.name == entry.get("deploy") or file.stem == key:
                return named(key, f"the file's name, {file.name}")
    key = by_name(files[0].stem) if files else None
    return named(key, f"the file's name, {files[0].name}") if key else None


def by_class(class_name: object) -> Topology | None:
    """A single diffusion stage whose file says ``model_class_name``."""
    return _generic(class_name, f"model_class_name {class_name}")
