"""One stage of a vLLM-Omni pipeline as a pipeline of its own, so that it runs alone in this process.

vLLM-Omni's engines take whole pipelines, and ask that stages count from 0 and that one of them is final. Here one stage
is taken out of its pipeline, told that it is both, and given its own entry of the deploy file; what joined it to its
neighbours is left out, because the queues do that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import logging
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from omniqueue import errors, handover
from omniqueue.engines import devices, omni_edges, omni_seed
from omniqueue.engines.omni_edges import Edge
from omniqueue.pipeline import Pipeline, Stage

logger = logging.getLogger(__name__)

#: What vLLM-Omni calls stages that make their output in one pass, such as codec tokens to a wave.
GENERATION = "llm_generation"
#: Top-level deploy keys about the whole pipeline or about how its stages are joined in one program.
_NOT_FOR_ONE_STAGE = frozenset({"base_config", "platforms", "pipeline", "async_chunk", "stages", "edges"})
#: The same of a stage's entry.
_JOINS = frozenset(
    {"stage_id", "async_chunk", "input_connectors", "output_connectors", "num_replicas", "omni_kv_config"}
)
#: What a CPU needs whatever a file written for GPUs says.
_CPU_ALWAYS = {"devices": "0", "enforce_eager": True}
_CPU_ALWAYS_LLM = {"async_scheduling": False, "distributed_executor_backend": "uni"}


def source_pipeline(pipeline: Pipeline, model: str) -> Any:
    """vLLM-Omni's configuration of the whole pipeline: the named one, or what it finds for the model.

    Raises ConfigError for a name that is not registered and for a model that no pipeline serves.
    """
    from vllm_omni.config.config_factory import StageConfigFactory
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES
    from vllm_omni.config.resolver import resolve_omni_config
    from vllm_omni.config.stage_config import DeployConfig

    trust = bool(pipeline.deploy.get("trust_remote_code"))
    name = pipeline.deploy.get("pipeline") or (pipeline.name if pipeline.name in OMNI_PIPELINES else None)
    if name is not None and name not in OMNI_PIPELINES:
        near = difflib.get_close_matches(name, list(OMNI_PIPELINES), n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(OMNI_PIPELINES))}."
        raise errors.ConfigError(f"vLLM-Omni has no pipeline {name!r}; {hint}", param="pipeline")
    found = StageConfigFactory.get_pipeline_config(
        model, trust_remote_code=trust, user_deploy_config=DeployConfig(pipeline=name)
    )
    if found is not None:
        return found
    try:
        return resolve_omni_config(
            model,
            trust_remote_code=trust,
            deploy_config_path=None,
            cli_overrides={},
            stage_overrides=None,
            strategy_config_path=None,
        ).pipeline_config
    except ValueError as exc:
        raise errors.ConfigError(f"vLLM-Omni serves no pipeline for {model}: {exc}", param="model") from exc


def topology(source: Any) -> tuple[dict[str, Any], ...]:
    """The stages of vLLM-Omni's pipeline configuration in the form of :attr:`Pipeline.topology`."""
    return tuple(
        {
            "stage_id": stage.stage_id,
            "name": stage.model_stage,
            "engine": "vllm_omni",
            "execution_type": stage.execution_type.value,
            "input_sources": list(stage.input_sources),
            "final_output": bool(stage.final_output),
            "final_output_type": stage.final_output_type,
        }
        for stage in source.stages
    )


def check_edges(
    source: Any,
    deploys: Mapping[int, Mapping[str, Any]],
    connectors: Mapping[tuple[int, int], Mapping[str, Any]] | None = None,
) -> tuple[Edge, ...]:
    """The pipeline's edges. Raises ConfigError when queues cannot carry one of them: a stage that waits for what goes
    from worker to worker inside one vLLM-Omni program would wait in vain or, worse, run without.

    ``deploys`` are the stages' entries of the deploy file by stage id, ``connectors`` those of edges by connector.
    """
    found = omni_edges.edges(source, deploys)
    for edge in found:
        if not edge.served:
            raise errors.ConfigError(f"{source.model_type}: {edge}: {edge.reason}. {_instead(source, edge)}")
    return tuple(dataclasses.replace(edge, connector=_connector(edge, connectors or {})) for edge in found)


def _connector(edge: Edge, connectors: Mapping[tuple[int, int], Mapping[str, Any]]) -> Mapping[str, Any] | None:
    connector = connectors.get((edge.source, edge.target))
    if connector is not None and not edge.connects:
        raise errors.ConfigError(f"{edge} {handover.NOT_BY_CONNECTOR}; leave route: connector out.", param="edges")
    return connector


def check_pictures(pipeline: Pipeline, stage: Stage, edges: tuple[Edge, ...]) -> None:
    """Raise ConfigError when a stage would compute requests together whose pictures vLLM-Omni 0.30 cannot tell apart.

    What a language model makes of pictures is a list over those of a step; its worker takes from it by the place that
    a request has among all that run, with pictures or without.
    """
    read = any(edge.kind == omni_edges.OUTPUT and edge.source == stage.stage_id for edge in edges)
    if read and pipeline.max_images and stage.max_num_seqs > 1:
        raise errors.ConfigError(
            f"Stage {stage.stage_id}: max_num_seqs is {stage.max_num_seqs}, but vLLM-Omni mixes up the pictures of "
            "requests that this stage computes together; set it to 1, or max_images to 0.",
            param="max_num_seqs",
        )


def _instead(source: Any, edge: Edge) -> str:
    if edge.instead:
        return f"Instead: {edge.instead}."
    others = omni_edges.alternatives(source)
    if others:
        return f"Of the same model, these can be served: {', '.join(f'pipeline: {name}' for name in others)}."
    return "Queues do not carry that; serve this model with vLLM-Omni itself."


def one_stage(
    source: Any, stage_id: int, cache: Mapping[str, Any] | None = None, connected: Sequence[Edge] = ()
) -> Any:
    """The stage as a pipeline configuration of its own, under a new name. Raises ConfigError when there is none.

    ``cache`` is its ``omni_kv_config``, None when it neither sends nor receives key-value caches; ``connected`` are the
    edges by connector, for which its worker packs and sends, or waits, as in the whole pipeline.
    """
    stage = source.get_stage(stage_id)
    if stage is None:
        ids = [one.stage_id for one in source.stages]
        raise errors.ConfigError(f"Pipeline {source.model_type} has no stage {stage_id}; it has {ids}.")
    sends = any(edge.source == stage_id for edge in connected)
    receives = any(edge.target == stage_id for edge in connected)
    alone = dataclasses.replace(
        stage,
        stage_id=0,
        input_sources=(),
        final_output=True,
        final_output_type=stage.final_output_type or "text",
        custom_process_input_func=None,
        sync_process_input_func=None,
        custom_process_next_stage_input_func=stage.custom_process_next_stage_input_func if sends else None,
        async_chunk_process_next_stage_input_func=None,
        requires_full_payload_input=receives,
        prompt_expand_func=None,
        omni_kv_config=dict(cache) if cache else None,
    )
    return dataclasses.replace(
        source,
        model_type=f"omniqueue_{source.model_type}_{stage_id}_{uuid.uuid4().hex[:8]}",
        stages=(alone,),
        hf_architectures=(),
        hf_config_predicate=None,
        diffusers_class_name=None,
        diffusers_class_aliases=(),
        default_deploy_config_name=None,
        stage_cli_aliases={},
    )


def deploy_config(
    pipeline: Pipeline, stage: Stage, name: str, *, cpu: bool, visible_devices: str | None = None
) -> dict[str, Any]:
    """The deploy file of one stage under pipeline ``name``, as a mapping.

    ``visible_devices`` is CUDA_VISIBLE_DEVICES. With ``cpu``, what a file written for GPUs says of devices and
    execution gives way to what a CPU can do, and dtype is bfloat16 unless the file says otherwise.
    """
    top = {key: value for key, value in pipeline.deploy.items() if key not in _NOT_FOR_ONE_STAGE}
    entry = {key: value for key, value in stage.deploy.items() if key not in _JOINS}
    if isinstance(entry.get("engine_extras"), Mapping):
        entry["engine_extras"] = {key: value for key, value in entry["engine_extras"].items() if key not in _JOINS}
    entry = {"max_num_seqs": stage.max_num_seqs, **entry, "stage_id": 0}
    if stage.execution_type != "diffusion":
        entry["worker_extension_cls"] = omni_seed.EXTENSION
    if cpu:
        _for_cpu(top, entry, stage)
    elif (wanted := devices.logical(_devices(stage), visible_devices)) is not None:
        entry["devices"] = wanted
    return {**top, "pipeline": name, "async_chunk": False, "stages": [entry]}


def _devices(stage: Stage) -> str | None:
    """``devices`` of the stage, where older files have it under ``runtime``."""
    wanted = stage.devices or stage.deploy.get("devices") or (stage.deploy.get("runtime") or {}).get("devices")
    return None if wanted is None else str(wanted)


def _for_cpu(top: dict[str, Any], entry: dict[str, Any], stage: Stage) -> None:
    forced = {**_CPU_ALWAYS, **({} if stage.execution_type == "diffusion" else _CPU_ALWAYS_LLM)}
    changed = {key: value for key, value in forced.items() if entry.get(key, value) != value}
    if changed:
        logger.info("action=cpu_overrides stage=%s values=%s", stage.stage_id, changed)
    entry.update(forced)
    if isinstance(entry.get("runtime"), Mapping):
        entry["runtime"] = {key: value for key, value in entry["runtime"].items() if key != "devices"}
    if "dtype" not in entry:
        top.setdefault("dtype", "bfloat16")


@contextlib.contextmanager
def registered(view: Any, config: Mapping[str, Any]) -> Iterator[str]:
    """Make the one-stage pipeline known to vLLM-Omni and its deploy file readable; yields the file's path.

    Neither is needed once the engine stands, and neither stays.
    """
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES, register_pipeline

    register_pipeline(view)
    descriptor, path = tempfile.mkstemp(prefix="omniqueue_", suffix=".yaml")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            yaml.safe_dump(dict(config), file)
        yield path
    finally:
        OMNI_PIPELINES.pop(view.model_type, None)
        os.unlink(path)


def one_stage_omni() -> type[Any]:
    """The class of engines for one stage."""
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    class OneStageOmni(AsyncOmni):  # type: ignore[misc]
        """Keeps request ids as they are: ours are unique, and requests built from tokens must carry the same one."""

        @staticmethod
        def _get_unique_request_id(external_request_id: str) -> str:
            return external_request_id

    return OneStageOmni


def processors(source: Any, stage_id: int) -> tuple[Callable[..., Any] | None, tuple[str, ...]]:
    """The stage's own input processor, and the dotted paths of those that read its output."""
    stage = source.get_stage(stage_id)
    path = omni_edges.consumer_processor(stage)
    readers = [omni_edges.consumer_processor(one) for one in source.stages if stage_id in one.input_sources]
    return (omni_edges.load(path) if path else None), tuple(one for one in readers if one)
