"""Which of vLLM-Omni's pipelines can be served stage by stage, what their stages hand over, and why not the others.

For ``omniqueue models`` and docs/models.md. All of it is read from the pipelines' own descriptions.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from omniqueue import checks, configfile, errors, handover, topology
from omniqueue.engines import omni_edges
from omniqueue.topology import Topology
from omniqueue.yamlfile import nearest

#: Pipelines that real workers serve in a test, from a small checkpoint, and that it finds equal to vLLM-Omni running
#: all stages in one go; a test compares these names with the tests that there are.
EQUAL_TO_NATIVE = (
    "auk",
    "bagel",
    "cosyvoice3",
    "glm_image",
    "higgs_multimodal_qwen3",
    "hunyuan_image_3_moe",
    "joyai_vl_interaction",
    "mimo_audio",
    "qwen2_5_omni",
    "qwen3_omni_moe",
    "qwen3_tts",
)
#: What stands in the way of such a test, of pipelines for which one was looked into.
NOT_COMPARED = {
    "covo_audio": "the sizes of its second stage are fixed in vLLM-Omni (366 million parameters, 20 TFLOP a request), "
    "which asks for a CUDA device's properties as it is built",
    "glm_tts": "its second stage has a table of 100,000 tokens fixed in vLLM-Omni, and every request needs a recorded "
    "voice and two more models that read it",
    "ming_tts": "vLLM-Omni takes no other than the published sizes (an embedding of 136 million parameters)",
    "step_audio_2": "its second stage needs packages (s3tokenizer, hyperpyyaml, onnxruntime) and models of theirs",
}
#: Of pipelines whose guidance is optional and takes companion requests.
_UNGUIDED = "a request with a guidance that runs companion requests is refused: they do not travel"


@dataclass(frozen=True)
class Model:
    """One pipeline of vLLM-Omni's registry."""

    known: Topology
    #: vLLM-Omni's own deploy file for it.
    deploy: str | None
    #: Stage configs for it that come with omniqueue.
    configs: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its key in the registry."""
        return str(self.known.key)

    @property
    def refusals(self) -> list[str]:
        """Why it cannot be served, a sentence each; empty when it can."""
        found = [reason for edge in self.known.edges if (reason := handover.refusal(edge))]
        types = [stage["final_output_type"] for stage in self.known.stages if stage["final_output"]]
        return found + [
            f"its output, {kind}, has no endpoint here" for kind in types if kind not in checks.OUTPUT_TYPES
        ]

    @property
    def equal(self) -> bool:
        """Whether a test finds it equal to vLLM-Omni in one go."""
        return self.name in EQUAL_TO_NATIVE

    @property
    def obstacle(self) -> str | None:
        """Why no test compares it with vLLM-Omni, where that is known."""
        return NOT_COMPARED.get(self.name)

    @property
    def remarks(self) -> list[str]:
        """What is refused of a pipeline that is served, and where vLLM-Omni's own file asks for another hand-over."""
        guided = [_UNGUIDED for edge in self.known.edges if "unguided" in edge]
        rows = [{**edge, **edge["deploy_file"]} for edge in self.known.edges if "deploy_file" in edge]
        return guided + [
            f"vLLM-Omni's {self.deploy} asks for {row['carries']}: {edge_json(row)['reason']}" for row in rows
        ]

    def as_json(self) -> dict[str, Any]:
        """Everything, for ``--json``."""
        return {
            "pipeline": self.name,
            "served": not self.refusals,
            "refusals": self.refusals,
            "alternatives": list(self.known.alternatives),
            "equal_to_native": self.equal,
            "stages": [dict(stage) for stage in self.known.stages],
            "edges": [edge_json(edge) for edge in self.known.edges],
            "deploy_file": self.deploy,
            "remarks": self.remarks,
            "stage_configs": list(self.configs),
        }


def edge_json(edge: Mapping[str, Any]) -> dict[str, Any]:
    """What travels on an edge, by which route (None: by none), by which others where a file says so, and why."""
    refused = "refused" in edge
    route, why = (None, handover.because(edge)) if refused else ("reference", omni_edges.REASONS[edge["carries"]])
    told = {"from": edge["from"], "to": edge["to"], "carries": edge["carries"], "route": route, "reason": why}
    return {**told, "optional_routes": [handover.CONNECTOR] if edge.get("connects") else []}


def installed() -> str | None:
    """The version of vLLM-Omni in this environment."""
    if importlib.util.find_spec("vllm_omni") is None:
        return None
    return metadata.version("vllm-omni")


def read(say: Callable[[str], None]) -> tuple[str, list[Model]]:
    """The version of vLLM-Omni that is told of, and its pipelines.

    The shipped table is used where it is of the installed version or none is installed; another version's registry is
    imported, which takes a while. ``say`` is told which. Raises ConfigError when it cannot be imported.
    """
    shipped = topology.table()
    version = installed()
    if version is None:
        say(f"vllm_omni is not installed here; this is what omniqueue knows of vllm_omni {shipped['vllm_omni']}")
    if version in (None, shipped["vllm_omni"]):
        return shipped["vllm_omni"], models(shipped["pipelines"])
    say(f"omniqueue knows vllm_omni {shipped['vllm_omni']}; reading the registry of {version}, which takes a while")
    try:
        from omniqueue.engines import registry

        return version, models(registry.pipelines())
    except Exception as exc:  # whatever a version that nobody has tried does at import
        raise errors.ConfigError(f"The registry of vllm_omni {version} cannot be read: {exc}") from exc


def models(pipelines: Mapping[str, Mapping[str, Any]]) -> list[Model]:
    """The pipelines of a registry table, by name."""
    configs = _configs()
    return [
        Model(topology.parse(key, entry), entry.get("deploy"), tuple(configs[key]))
        for key, entry in sorted(pipelines.items(), key=lambda item: item[0].lower())
    ]


@functools.cache
def _configs() -> Mapping[str, list[str]]:
    """The stage configs that ship, by pipeline."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for file in sorted(topology.shipped().glob("*.yaml")):
        if file.stem != "topologies":
            pipe = configfile.load(file)
            if any(stage.engine == "vllm_omni" for stage in pipe.stages):
                found[pipe.name].append(file.name)
    return found


def find(known: list[Model], name: str) -> Model:
    """The pipeline of that name. Raises ConfigError."""
    for model in known:
        if model.name == name:
            return model
    names = [model.name for model in known]
    raise errors.ConfigError(f"vLLM-Omni has no pipeline {name!r}; {nearest(name, names, '`omniqueue models`')}")
