"""The pipelines of this deployment, found by model name, by queue or by name."""

from __future__ import annotations

import dataclasses
import functools
import os
from dataclasses import dataclass

from omniqueue import configfile, errors, settings
from omniqueue.pipeline import Pipeline, Stage


@dataclass(frozen=True)
class Catalog:
    """One or several pipelines; with several, queues are named ``<pipeline>.stage<N>``."""

    pipelines: tuple[Pipeline, ...]

    def for_model(self, model: str | None) -> Pipeline:
        """The pipeline that serves a client's ``model``; without one, the first. Raises ModelNotFound."""
        if model is None:
            return self.pipelines[0]
        for pipe in self.pipelines:
            if model in pipe.served_model_names:
                return pipe
        raise errors.ModelNotFound(
            f"There is no model {model[:200]!r} here; there is {', '.join(self.model_names())}.", param="model"
        )

    def named(self, name: str) -> Pipeline:
        """The pipeline of that name. Raises NotFound."""
        for pipe in self.pipelines:
            if pipe.name == name:
                return pipe
        raise errors.NotFound(f"There is no pipeline {name!r} here.")

    def for_queue(self, queue: str) -> tuple[Pipeline, Stage] | None:
        """The stage whose worker consumes ``queue``."""
        for pipe in self.pipelines:
            for stage in pipe.stages:
                if stage.queue == queue:
                    return pipe, stage
        return None

    def model_names(self) -> list[str]:
        """Every name that a client may give as ``model``."""
        return [name for pipe in self.pipelines for name in pipe.served_model_names]

    def queues(self) -> list[str]:
        """Every queue."""
        return [stage.queue for pipe in self.pipelines for stage in pipe.stages]


def load(config: settings.Settings) -> Catalog:
    """The catalog that OMNIQUEUE_STAGE_CONFIGS_PATH names. Raises ConfigError."""
    if not config.stage_configs_path:
        raise errors.ConfigError(
            "OMNIQUEUE_STAGE_CONFIGS_PATH is not set; give it a stage config, such as glm_image.yaml.",
            param="OMNIQUEUE_STAGE_CONFIGS_PATH",
        )
    paths = [path for path in config.stage_configs_path.split(os.pathsep) if path]
    if not paths:
        raise errors.ConfigError(
            f"OMNIQUEUE_STAGE_CONFIGS_PATH={config.stage_configs_path!r} names no file.",
            param="OMNIQUEUE_STAGE_CONFIGS_PATH",
        )
    pipelines = [_load_one(path, config) for path in paths]
    if len(pipelines) > 1:
        pipelines = [_prefixed(pipe) for pipe in pipelines]
    for attribute in ("pipeline", "model"):
        names = (
            [p.name for p in pipelines]
            if attribute == "pipeline"
            else [name for p in pipelines for name in p.served_model_names]
        )
        double = sorted({name for name in names if names.count(name) > 1})
        if double:
            raise errors.ConfigError(f"Two stage configs have the same {attribute} name: {', '.join(double)}.")
    return Catalog(tuple(pipelines))


def _load_one(path: str, config: settings.Settings) -> Pipeline:
    pipe = configfile.load(path, model=config.model)
    if config.served_model_name:
        names = tuple(name.strip() for name in config.served_model_name.split(",") if name.strip())
        pipe = dataclasses.replace(pipe, served_model_names=names)
    return pipe


def _prefixed(pipe: Pipeline) -> Pipeline:
    stages = tuple(dataclasses.replace(s, queue=f"{pipe.name}.{s.queue}") for s in pipe.stages)
    return dataclasses.replace(pipe, stages=stages)


@functools.cache
def shared(config: settings.Settings) -> Catalog:
    """The catalog, read once per process and configuration."""
    return load(config)
