"""What every stage of a vLLM-Omni pipeline hands to the next, read from the pipeline's own description.

An edge is served by reference when all that travels on it can be taken out of one engine's answer, stored, and given to
the next engine with its request. Nothing here knows a pipeline by its name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

#: Token ids, text and the request's own prompt and pictures.
TOKENS = "tokens"
#: Tensors beside the tokens, which the consumer's input processor reads from the producer's output.
OUTPUT = "output"
#: What the producer's hook packs at the end of a request, from everything that the model emitted for it.
PAYLOAD = "payload"
#: The producer only has a hook that sends pieces while it runs, and the consumer has no other way in.
CHUNKS = "chunks"
#: The producer's key-value cache of a request, and of those beside it, which a diffusion model continues.
CACHE = "cache"
#: Key-value pages go from worker to worker through a connector of vLLM's own.
PAGES = "pages"
#: Requests beside the request (guidance without a prompt), whose outputs the consumer joins.
COMPANIONS = "companions"
#: The producer's prompt is made with the parameters of every stage.
PARAMETERS = "parameters"

#: Why each is served, or is not.
REASONS = {
    TOKENS: "token ids, text and the request itself are all that the later stage reads",
    OUTPUT: "the later stage's input processor also looks for tensors in the earlier stage's output; they are stored "
    "with it",
    PAYLOAD: "the earlier stage's own hook packs what the later one needs when a request ends, and that is stored",
    CHUNKS: "the earlier stage can only send pieces while it runs (async_chunk), from worker to worker",
    CACHE: "the key-value cache that the earlier stage hands over is stored with its output",
    PAGES: "kv_transfer_config has vLLM's own connector move key-value pages from worker to worker",
    COMPANIONS: "the earlier stage runs a companion request beside each request, for guidance ({hook})",
    PARAMETERS: "the earlier stage's prompt is made from all stages' parameters ({hook}), and it has only its own",
}
#: What can be taken out of one engine's answer and given to the next.
SERVED = (TOKENS, OUTPUT, PAYLOAD, CACHE)
#: Names under which input processors find an earlier stage's tensors.
_OUTPUT_NAMES = frozenset({"multimodal_output", "multimodal_outputs"})
#: What a deploy file can say in place of ``kv_transfer_config``.
_INSTEAD = "leave kv_transfer_config out of both stages, with or without omni_kv_config, whose caches queues carry"


@dataclass(frozen=True)
class Edge:
    """One stage's output as another's input. ``hook`` packs the payload (a dotted path; for PAYLOAD only)."""

    source: int
    target: int
    kind: str
    reason: str
    hook: str | None = None
    #: Whether the consumer's input processor reads the output's tensors, whatever else travels.
    reads_output: bool = False
    #: A change to the stage config that would make the edge servable, or None.
    instead: str | None = None
    #: What makes companion requests of a guided request (a dotted path); they do not travel on this edge.
    companions: str | None = None
    #: Whether vLLM-Omni's own workers can hand the payload to each other through a connector.
    connects: bool = False
    #: That connector (``name``, ``extra``), where the stage config says so; None for an edge by reference.
    connector: Mapping[str, Any] | None = None

    @property
    def served(self) -> bool:
        """Whether queues can carry it."""
        return self.kind in SERVED

    def __str__(self) -> str:
        return f"stage {self.source} -> stage {self.target}"


def edges(source: Any, deploys: Mapping[int, Mapping[str, Any]] | None = None) -> tuple[Edge, ...]:
    """All edges of a pipeline, a vLLM-Omni ``PipelineConfig``, in the order of their consumers.

    ``deploys`` are the stages' entries of a deploy file by stage id: a cache hand-over can be switched on there.
    """
    return tuple(
        _edge(source.get_stage(one), stage, deploys or {}) for stage in source.stages for one in stage.input_sources
    )


def alternatives(source: Any) -> tuple[str, ...]:
    """Names of registered pipelines of the same model whose every edge is served, those of the same output first."""
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES

    home = _home(source)
    found = {
        name: one
        for name, one in OMNI_PIPELINES.items()
        if one is not source and not callable(one) and home and _home(one) == home
    }
    wanted = source.stages[-1].final_output_type
    servable = [name for name, one in found.items() if all(edge.served for edge in edges(one))]
    return tuple(sorted(servable, key=lambda name: found[name].stages[-1].final_output_type != wanted))


def _home(source: Any) -> str | None:
    """The module that declares a pipeline, which is the same for all pipelines of one model."""
    declaring = (
        name
        for name, module in list(sys.modules.items())
        if name.startswith("vllm_omni.model_executor.") and any(one is source for one in vars(module).values())
    )
    return next(declaring, None)


def consumer_processor(stage: Any) -> str | None:
    """The dotted path of the function that makes the stage's input of earlier outputs, with async_chunk off.

    None also where that function takes the arguments of vLLM-Omni before 0.20, with which 0.30 cannot call it either.
    """
    path: str | None = stage.sync_process_input_func or stage.custom_process_input_func
    outdated = path is not None and "engine_input_source" in inspect.signature(load(path)).parameters
    return None if outdated else path


def load(path: str) -> Callable[..., Any]:
    """The function behind a dotted path of a pipeline's description."""
    module, _, name = path.rpartition(".")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


def _edge(source: Any, target: Any, deploys: Mapping[int, Mapping[str, Any]]) -> Edge:
    path = consumer_processor(target)
    reads_output = path is not None and _mentions(load(path), _OUTPUT_NAMES)
    kind = _kind(source, target, deploys, path, reads_output)
    return Edge(
        source=source.stage_id,
        target=target.stage_id,
        kind=kind,
        reason=REASONS[kind].format(hook=_hook_name(source)),
        hook=source.custom_process_next_stage_input_func if kind == PAYLOAD else None,
        reads_output=reads_output,
        instead=_INSTEAD if kind == PAGES else None,
        companions=source.prompt_expand_func if kind != CACHE else None,
        # A worker looks for what the stage before it has sent, and only if its scheduler knows that it has to wait.
        connects=kind == PAYLOAD
        and bool(target.requires_full_payload_input)
        and target.stage_id == source.stage_id + 1,
    )


def makes_companions(path: str, prompt: Any, extra_args: Mapping[str, Any] | None) -> bool:
    """Whether a pipeline's function makes companion requests of a request with these extra sampling arguments."""
    try:
        return bool(load(path)(prompt, SimpleNamespace(extra_args=dict(extra_args or {}))))
    except (ValueError, KeyError, TypeError, AttributeError):  # guided, and without all that guidance needs
        return True


def _always_guided(stage: Any, deploy: Mapping[str, Any]) -> bool:
    """Whether a plain request of a stage with these defaults has a companion."""
    said = (deploy.get("default_sampling_params") or {}).get("extra_args")
    plain = {"prompt": "", "modalities": ["image"]}
    return bool(stage.prompt_expand_func) and makes_companions(stage.prompt_expand_func, plain, said)


def _hook_name(stage: Any) -> str:
    return (stage.prompt_expand_func or stage.prompt_transform_func or "").rpartition(".")[2]


def _kind(
    source: Any, target: Any, deploys: Mapping[int, Mapping[str, Any]], path: str | None, reads_output: bool
) -> str:
    sent, received = (deploys.get(stage.stage_id, {}) for stage in (source, target))
    if _said(sent, "kv_transfer_config") or _said(received, "kv_transfer_config"):
        return PAGES
    # A stage that hands over caches runs its companion requests for their caches alone.
    if cache_config(source, sent).get("need_send_cache") or cache_config(target, received).get("need_recv_cache"):
        return CACHE
    diffusion = target.execution_type.value == "diffusion"
    packed = source.custom_process_next_stage_input_func and not diffusion
    if source.async_chunk_process_next_stage_input_func and path is None and not packed and not diffusion:
        return CHUNKS
    if _always_guided(source, deploys.get(source.stage_id, {})):
        return COMPANIONS
    if source.prompt_transform_func:
        return PARAMETERS
    if packed:
        return PAYLOAD
    return OUTPUT if reads_output else TOKENS


def cache_config(stage: Any, deploy: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of the stage's cache: in its pipeline's description, and over it in the deploy file."""
    return {**(stage.omni_kv_config or {}), **(_said(deploy, "omni_kv_config") or {})}


def _said(deploy: Mapping[str, Any], key: str) -> Any:
    """A stage's entry may have an engine's keys one level down."""
    return deploy.get(key) or (deploy.get("engine_extras") or {}).get(key)


def _mentions(function: Callable[..., Any], names: frozenset[str]) -> bool:
    """Whether a function, or one of its own package that it calls, reads an attribute of one of these names."""
    return any(not names.isdisjoint(code.co_names) or not names.isdisjoint(_texts(code)) for code in _codes(function))


def _texts(code: CodeType) -> list[str]:
    return [const for const in code.co_consts if isinstance(const, str)]


def _codes(function: Callable[..., Any], seen: set[int] | None = None) -> Iterator[CodeType]:
    """The code of a function, of those inside it, and of those of the same package that it names."""
    seen = set() if seen is None else seen
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    package = function.__module__.rpartition(".")[0]
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [const for const in code.co_consts if isinstance(const, CodeType)]
        for name in code.co_names:
            called = function.__globals__.get(name)
            if isinstance(called, FunctionType) and called.__module__.startswith(package):
                yield from _codes(called, seen)
