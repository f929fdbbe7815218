"""``omniqueue models``: every pipeline of the shipped table has a verdict, and it is told in words, JSON and a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from omniqueue import checks, cli, errors, models, models_text, topology
from omniqueue.engines import omni_edges
from omniqueue.models import Model
from tests.engines.handover_cases import PIPELINES

ROOT = Path(__file__).parents[2]
CHECKPOINTS = ROOT / "tests" / "engines" / "checkpoints"


@pytest.fixture(scope="module")
def known() -> list[Model]:
    return models.models(topology.table()["pipelines"])


def one(known: list[Model], name: str) -> Model:
    return models.find(known, name)


def test_every_pipeline_is_there_and_every_input_has_an_edge_of_a_known_kind(known: list[Model]) -> None:
    assert {model.name for model in known} == set(topology.keys())
    for model in known:
        inputs = [(source, s["stage_id"]) for s in model.known.stages for source in s["input_sources"]]
        assert [(edge["from"], edge["to"]) for edge in model.known.edges] == inputs, model.name
        for edge in model.known.edges:
            assert edge["carries"] in omni_edges.REASONS, model.name
            assert ("refused" in edge) == (edge["carries"] not in omni_edges.SERVED), model.name
            assert not edge.get("connects") or edge["carries"] == omni_edges.PAYLOAD, model.name


def test_what_is_not_served_has_a_reason_and_what_is_served_has_none(known: list[Model]) -> None:
    for model in known:
        carried = all(edge["carries"] in omni_edges.SERVED for edge in model.known.edges)
        shown = all(s["final_output_type"] in checks.OUTPUT_TYPES for s in model.known.stages if s["final_output"])
        assert (model.refusals == []) == (carried and shown), model.name


def test_alternatives_can_be_served(known: list[Model]) -> None:
    offered = {name for model in known for name in model.known.alternatives}
    assert all(one(known, name).refusals == [] for name in offered)


def test_a_refusal_names_the_edge_the_reason_and_what_there_is_instead(known: list[Model]) -> None:
    voxtral = one(known, "voxtral_tts")
    assert voxtral.refusals == [f"stage 0 -> stage 1: {omni_edges.REASONS[omni_edges.CHUNKS]}"]
    text = models_text.details(voxtral)
    assert text.startswith("voxtral_tts: cannot be served")
    assert "vLLM-Omni itself serves it" in text
    assert "its output, action, has no endpoint here." in models_text.details(one(known, "pi0"))


def test_a_deploy_file_that_asks_for_more_than_its_pipeline_is_remarked(known: list[Model]) -> None:
    hunyuan = one(known, "hunyuan_image_3_moe")
    assert hunyuan.refusals == []
    [remark] = hunyuan.remarks
    assert remark.startswith("vLLM-Omni's hunyuan_image_3_moe.yaml asks for cache: ")
    assert remark in models_text.details(hunyuan)


def test_guidance_that_is_optional_is_said_to_be_refused(known: list[Model]) -> None:
    audex = one(known, "audex_tts")
    assert audex.refusals == []
    assert "a request with a guidance that runs companion requests is refused" in models_text.details(audex)


def test_stage_configs_that_ship_are_named(known: list[Model]) -> None:
    assert one(known, "qwen2_5_omni").configs == ("qwen2_5_omni.yaml", "qwen2_5_omni_one_gpu.yaml")
    assert one(known, "auk").configs == ()


def test_pipelines_said_to_be_equal_to_native_are_tested_and_can_be_served(known: list[Model]) -> None:
    files = [CHECKPOINTS / f"{name}.yaml" for name in PIPELINES]
    tested = {yaml.safe_load(file.read_text(encoding="utf-8"))["pipeline"] for file in files}
    assert set(models.EQUAL_TO_NATIVE) == tested | {"glm_image"}  # the latter in test_equal_to_native.py
    assert all(one(known, name).refusals == [] for name in models.EQUAL_TO_NATIVE)


def test_what_stands_in_the_way_of_a_comparison_is_said_of_pipelines_that_have_none(known: list[Model]) -> None:
    assert not set(models.NOT_COMPARED) & set(models.EQUAL_TO_NATIVE)
    for name, obstacle in models.NOT_COMPARED.items():
        assert one(known, name).refusals == []
        assert obstacle in models_text.details(one(known, name))


def test_the_page_is_up_to_date(known: list[Model]) -> None:
    page = models_text.as_markdown(topology.table()["vllm_omni"], known)
    said = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert said == page, "write it anew: omniqueue models --markdown > docs/models.md"


def test_the_route_of_an_edge_is_told_with_the_one_that_a_file_can_ask_for(known: list[Model]) -> None:
    told = [
        (edge["carries"], edge["route"], edge["optional_routes"]) for edge in one(known, "aura_omni").as_json()["edges"]
    ]
    assert told == [("output", "reference", [])] * 2 + [("payload", "reference", ["connector"])]
    assert (
        "`personaplex` (0 to 1)" in models_text.as_markdown("1", known).partition("All payloads can go that way, ")[2]
    )


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> str:
    """The version of the shipped table, which is the installed one, so that nothing is imported."""
    version = str(topology.table()["vllm_omni"])
    monkeypatch.setattr(models, "installed", lambda: version)
    return version


def test_the_command_lists_all_and_says_why_not(shipped: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    rows = told.out.split("\n\n")[0].splitlines()
    assert len(rows) == 1 + len(topology.keys())
    assert f"vllm_omni {shipped} has {len(topology.keys())} pipelines" in told.out
    assert "\nvoxtral_tts: stage 0 -> stage 1: " in told.out


def test_the_command_tells_one_in_full_and_offers_the_nearest_name(
    shipped: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["models", "qwen2_5_omni"]) == 0
    assert "stage 1 -> stage 2  payload, by reference or connector: " in capsys.readouterr().out
    assert cli.main(["models", "qwen2_omni"]) == 2
    assert "did you mean qwen2_5_omni?" in capsys.readouterr().err


def test_the_command_speaks_json(shipped: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--json", "minimax_music3"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["vllm_omni"] == shipped
    [music] = told["pipelines"]
    assert (music["served"], music["alternatives"]) == (False, [])
    [edge] = music["edges"]
    assert (edge["carries"], edge["route"], edge["optional_routes"]) == ("companions", None, [])


def test_without_vllm_omni_the_shipped_table_is_told_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "installed", lambda: None)
    assert cli.main(["models"]) == 0
    told = capsys.readouterr()
    assert "vllm_omni is not installed here" in told.err
    assert len(told.err.splitlines()) == 1
    assert "glm_image" in told.out


def test_a_registry_that_cannot_be_read_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from omniqueue.engines import registry

    def broken() -> None:
        raise ImportError("no module named torch")

    monkeypatch.setattr(models, "installed", lambda: "99.0")
    monkeypatch.setattr(registry, "pipelines", broken)
    assert cli.main(["models"]) == 2
    told = capsys.readouterr().err
    assert "reading the registry of 99.0" in told
    assert "cannot be read: no module named torch" in told


def test_an_unknown_name_is_a_config_error(known: list[Model]) -> None:
    with pytest.raises(errors.ConfigError, match="`omniqueue models` lists the names"):
        models.find(known, "nothing like it")
