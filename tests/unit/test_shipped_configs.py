"""The stage configs for published checkpoints: each in two forms, each validated as a user would."""

from __future__ import annotations

import json

import pytest

from omniqueue import cli, configfile, topology

#: A GPU or more a stage, and several stages a GPU; BAGEL as one stage has one form.
FORMS = {
    "qwen2_5_omni": ("qwen2_5_omni", "qwen2_5_omni_one_gpu"),
    "qwen3_omni_moe": ("qwen3_omni_moe", "qwen3_omni_moe_two_gpus"),
    "qwen3_tts": ("qwen3_tts", "qwen3_tts_one_gpu"),
    "cosyvoice3": ("cosyvoice3", "cosyvoice3_one_gpu"),
    "mimo_audio": ("mimo_audio", "mimo_audio_one_gpu"),
    "joyai_vl_interaction": ("joyai_vl_interaction", "joyai_vl_interaction_one_gpu"),
    "covo_audio": ("covo_audio", "covo_audio_one_gpu"),
    "hunyuan_image_3_moe": ("hunyuan_image3", "hunyuan_image3_shared_gpus"),
    "glm_image": ("glm_image", "glm_image_one_gpu"),
    "bagel": ("bagel", "bagel_one_gpu"),
    "bagel_single_stage": ("bagel_single_stage",),
}


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIQUEUE_PLATFORM", "cuda")


@pytest.mark.parametrize(("pipeline", "name"), [(key, name) for key, names in FORMS.items() for name in names])
def test_each_is_valid_and_serves_a_published_checkpoint(
    pipeline: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["validate", f"{name}.yaml", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["pipeline"] == pipeline
    assert plan["model"].count("/") == 1, "a hub id"
    assert [stage["name"] for stage in plan["stages"]] == [s["name"] for s in topology.named(pipeline).stages]


@pytest.mark.parametrize("names", FORMS.values(), ids=list(FORMS))
def test_the_first_form_has_devices_of_its_own_for_every_stage_and_the_second_shares_some(
    names: tuple[str, ...],
) -> None:
    for name, shares in zip(names, (False, True), strict=False):
        stages = configfile.load(f"{name}.yaml").stages
        devices = [device for stage in stages for device in str(stage.devices).split(",")]
        assert (len(set(devices)) < len(devices)) == shares, name


@pytest.mark.parametrize("names", FORMS.values(), ids=list(FORMS))
def test_both_forms_differ_only_in_where_they_run(names: tuple[str, ...]) -> None:
    placed = {"devices", "gpu_memory_utilization", "tensor_parallel_size", "parallel_config"}
    first, *others = (configfile.load(f"{name}.yaml") for name in names)
    for other in others:
        assert (other.model, other.topology) == (first.model, first.topology)
        for one, two in zip(first.stages, other.stages, strict=True):
            same = [{key: value for key, value in s.deploy.items() if key not in placed} for s in (one, two)]
            assert same[0] == same[1]
