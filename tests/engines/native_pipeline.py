"""Runs vLLM-Omni's own ``Omni`` over a pipeline's requests: python native_pipeline.py NAME MODEL DEPLOY OUT.

Every stage's output is recorded as the orchestrator hands it on; OUT gets outputs.json and tensors.npz. Stages that
draw from their process's generator (vocoders add noise from it) are seeded before each request, as omniqueue does, and
codes that a talker draws beside its tokens come from a generator of the request's own: vLLM-Omni by itself leaves the
process's where the request before has left it, so that answers depend on those before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

#: Has the worker methods ``seed_generator`` and ``own_generators``.
_EXTENSION = "omniqueue.engines.omni_seed.SeededWorker"
#: How long a worker may take over one of its methods, in seconds.
_PATIENCE_S = 60


def load_cases() -> Any:
    """The module beside this script, whose folder Python looks in first."""
    return import_module("handover_cases")


def watch_outputs() -> dict[str, dict[int, Any]]:
    """Keep the finished output of every stage of every request: ``Omni`` itself returns only the final ones."""
    from vllm_omni.engine.orchestrator import Orchestrator

    seen: dict[str, dict[int, Any]] = {}
    route = Orchestrator._route_output

    async def keep(self: Any, stage_id: int, replica_id: int, output: Any, *rest: Any) -> None:
        if output.finished:
            seen.setdefault(output.request_id, {})[stage_id] = output
        await route(self, stage_id, replica_id, output, *rest)

    Orchestrator._route_output = keep
    return seen


def seedable(model: str, deploy: str, out: Path) -> tuple[str, list[int]]:
    """The deploy file with a seedable worker for every stage that is not diffusion, and those stages."""
    import yaml
    from vllm_omni.config.config_factory import StageConfigFactory
    from vllm_omni.config.stage_config import DeployConfig

    config = yaml.safe_load(Path(deploy).read_text())
    named = DeployConfig(pipeline=config["pipeline"])
    source = StageConfigFactory.get_pipeline_config(model, trust_remote_code=True, user_deploy_config=named)
    found = [stage.stage_id for stage in source.stages if stage.execution_type.value != "diffusion"]
    for entry in config["stages"]:
        if entry["stage_id"] in found:
            entry["worker_extension_cls"] = _EXTENSION
    path = out / "deploy_native.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path), found


def spoken(request: Any, model: str) -> dict[str, Any]:
    """The request's prompt. Qwen3-TTS's is as many placeholders as vLLM-Omni counts for what is said beside it."""
    prompt = dict(request.prompt)
    said = prompt.get("additional_information")
    if said is None or "prompt" in prompt:
        return prompt
    from transformers import AutoTokenizer
    from vllm_omni.model_executor.models.qwen3_tts.prompt_embeds_builder import Qwen3TTSPromptEmbedsBuilder

    tokens = AutoTokenizer.from_pretrained(model)
    config = json.loads((Path(model) / "config.json").read_text())["talker_config"]
    count = Qwen3TTSPromptEmbedsBuilder.estimate_prompt_len_from_additional_information(
        said,
        task_type=said["task_type"][0],
        tokenize_prompt=lambda text: tokens(text)["input_ids"],
        codec_language_id=config["codec_language_id"],
        spk_is_dialect=config["spk_is_dialect"],
    )
    return {"prompt_token_ids": [1] * count, **prompt}


def params_of(omni: Any, request: Any) -> list[Any]:
    """Every stage's parameters with the request's seed, which vLLM-Omni's own server gives talkers twice."""
    from vllm_omni.worker.sampling_utils import apply_fixed_seed_to_sampling_params

    made = [params.clone() for params in omni.default_sampling_params_list]
    for stage_id, params in enumerate(made):
        if hasattr(params, "top_k"):
            apply_fixed_seed_to_sampling_params(params, request.seed, seed_talker_mtp=True)
        else:
            params.seed = request.seed
        for name, value in request.params.get(stage_id, {}).items():
            setattr(params, name, value)
    return made


def prompt_of(cases: Any, request: Any, model: str, name: str | None) -> dict[str, Any]:
    """The request's prompt with its picture, as vLLM-Omni's own examples make it for a model of this name."""
    from vllm_omni.model_extras import registry

    made = spoken(request, model)
    size = made.get("height"), made.get("width")
    if request.picture is not None:
        from PIL import Image

        picture = Image.fromarray(cases.shown(request))
        return {**made, **registry.build_image_to_image_prompt(name, made["prompt"], None, picture, *size)}
    return {**made, **registry.build_text_to_image_prompt(name, made, *size)} if "height" in made else made


def instruct(model: str, name: str | None, prompt: dict[str, Any], params: list[Any]) -> None:
    """Give a model that writes before it paints its instructions and the tokens that end them, as the examples do."""
    from vllm_omni.model_extras import registry

    builder = registry.get_ar_input_builder(name)
    if builder is None:
        return
    from transformers import AutoTokenizer

    made = builder(
        prompt=prompt["prompt"],
        tokenizer=AutoTokenizer.from_pretrained(model, trust_remote_code=True),
        extra_body={},
        num_images=int("multi_modal_data" in prompt),
        height=prompt["height"],
        width=prompt["width"],
    )
    prompt |= {"prompt_token_ids": made.prompt_token_ids, "use_system_prompt": made.use_system_prompt}
    for stage_id in made.stage_indices:
        params[stage_id].stop_token_ids = made.stop_token_ids


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors of nested mappings and lists, by path; a diffusion stage's sound is an array of numpy's."""
    if hasattr(value, "__array__"):
        yield prefix, value
        return
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, one in inner:
        yield from leaves(one, f"{prefix}/{key}")


def emitted(output: Any) -> dict[str, Any]:
    """What the model emitted beside tokens, wherever this kind of output has it."""
    completion = output.outputs[0] if output.outputs else None
    found = getattr(completion, "multimodal_output", None) or getattr(output, "multimodal_output", None)
    return dict(found or {})


def described(output: Any) -> dict[str, Any]:
    if not output.outputs:
        return {}
    completion = output.outputs[0]
    ids = getattr(completion, "cumulative_token_ids", None) or completion.token_ids or ()
    return {
        "prompt_token_ids": [int(one) for one in output.prompt_token_ids or ()],
        "token_ids": [int(one) for one in ids],
        "text": getattr(completion, "cumulative_text", None) or completion.text or "",
    }


def main(name: str, model: str, deploy: str, out: str) -> None:
    import numpy
    import torch
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.model_extras import registry

    folder = Path(out)
    seen = watch_outputs()
    path, drawing = seedable(model, deploy, folder)
    omni = Omni(model=model, deploy_config=path, parallel_stage_init=True)
    answers: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    if drawing:
        omni.engine.collective_rpc("own_generators", stage_ids=drawing, timeout=_PATIENCE_S)
    cases, kind = load_cases(), registry.get_model_class_name(omni)
    for request in cases.PIPELINES[name].requests:
        seen.clear()
        if drawing:
            seed = (request.seed,)
            omni.engine.collective_rpc("seed_generator", args=seed, stage_ids=drawing, timeout=_PATIENCE_S)
        prompt, params = prompt_of(cases, request, model, kind), params_of(omni, request)
        if "height" in prompt:
            instruct(model, kind, prompt, params)
        list(omni.generate([prompt], params, use_tqdm=False))
        stages = max(seen.values(), key=len)  # companion requests run through the first stage only
        answers[request.name] = {stage_id: described(output) for stage_id, output in stages.items()}
        for stage_id, output in stages.items():
            for path, tensor in leaves(emitted(output)):
                tensors[f"{request.name}:{stage_id}{path}"] = torch.as_tensor(tensor).detach().float().cpu().numpy()
            for index, image in enumerate(getattr(output, "images", None) or []):
                tensors[f"{request.name}:{stage_id}/image/{index}"] = numpy.asarray(image)
    numpy.savez(folder / "tensors.npz", **tensors)
    (folder / "outputs.json").write_text(json.dumps(answers))
    omni.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
