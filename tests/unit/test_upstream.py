"""vLLM-Omni's own files and registry against ours; these tests need it installed."""

from __future__ import annotations

import difflib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from omniqueue import configfile, errors, schema, topology
from tests.unit.test_shipped_configs import FORMS

pytestmark = pytest.mark.engine

CHUNKS = "set async_chunk: false"
DUPLEX = "session_mode: duplex sessions need all stages in one process"
CHUNKS_ONLY = "the earlier stage can only send pieces while it runs"
PAGES = "kv_transfer_config: has vLLM's own connector move key-value pages"
COMPANIONS = "a companion request beside each request"
PARAMETERS = "from all stages' parameters"
NO_ENDPOINT = "has no endpoint here"
UNNAMED = "pipeline: is not said, nor is a model"
MEMORY = "stages[2].gpu_memory_utilization: brings device 5 to 1.70 of its memory"

#: Deploy files that are refused, by reason; every other one loads as it is.
REFUSED = {
    CHUNKS: """
        audex_s2s audex_s2s_30b audex_tts audex_tts_30b cosyvoice3 glm_tts higgs_multimodal_qwen3
        higgs_multimodal_qwen3_high_throughput higgs_multimodal_qwen3_low_latency mimo_audio mimo_audio_5090d ming_tts
        ming_tts_moe minicpmo_4_5_turn minimax_music3 minimax_music3_2gpu moss_tts moss_tts_local moss_tts_local_2npu
        moss_tts_local_3npu moss_tts_local_h200 moss_tts_realtime nemotron_labs_voicechat_streaming qwen3_omni_moe
        qwen3_omni_moe_mori_intranode qwen3_tts qwen3_tts_high_concurrency qwen3_tts_high_concurrency_mrv2
        qwen3_tts_high_concurrency_mrv2_b4 qwen3_tts_high_concurrency_mrv2_single_gpu qwen3_tts_mrv2
        step_audio_2_async_chunk
    """,
    CHUNKS_ONLY: """
        audio8_tts breeze_tts breeze_tts_2 breeze_tts_2_throughput breeze_tts_throughput fish_qwen3_omni
        fish_qwen3_omni_2gpu fish_qwen3_omni_high_concurrency_dual_gpu fish_qwen3_omni_high_concurrency_single_gpu
        voxtral_tts
    """,
    DUPLEX: """
        aura_omni minicpmo_4_5 minicpmo_4_5_2gpu minicpmo_4_5_3gpu minicpmo_4_5_3gpu_stage1_replicas
        minicpmo_4_5_4gpu_stage1_replicas minicpmo_4_5_8x4090 minicpmo_4_5_8x4090_stage1_replicas
        nemotron_labs_voicechat_duplex personaplex qwen3_omni_duplex
    """,
    NO_ENDPOINT: "Gr00tN1d7 cosmos3_policy_droid pi0 pi05",
    UNNAMED: "moss_sound_effect moss_tts_80gb moss_ttsd moss_voice_generator",
    "forced_aligner: there is no such key here": "qwen3_tts_forced_aligner",
    PAGES: "hunyuan-image-3-mooncakeconnector",
    PARAMETERS: """
        minimax_h3_disaggregated minimax_h3_disaggregated_nixl minimax_h3_disaggregated_turbo
        minimax_h3_disaggregated_turbo_nixl
    """,
}

#: What still stands in the way once the file is told not to stream chunks and to take turns.
STILL_REFUSED = {
    **{reason: REFUSED[reason] for reason in (NO_ENDPOINT, UNNAMED, PAGES, PARAMETERS)},
    CHUNKS_ONLY: f"{REFUSED[CHUNKS_ONLY]} moss_tts moss_tts_local moss_tts_local_2npu moss_tts_local_3npu "
    "moss_tts_local_h200 moss_tts_realtime",
    COMPANIONS: "minimax_music3 minimax_music3_2gpu",
    MEMORY: "minicpmo_4_5_8x4090_stage1_replicas",
    "forced_aligner: there is no such key here": "qwen3_tts_forced_aligner",
}

#: A stage that vLLM-Omni would refuse too, on the one platform whose overlay says it.
ON_NPU = {"sequence_parallel_size: is for diffusion stages, and stage 0 is none": "glm_image"}


def folder() -> Path:
    spec = importlib.util.find_spec("vllm_omni")
    assert spec is not None, "vllm_omni is not installed"
    assert spec.origin is not None
    return Path(spec.origin).parent / "deploy"


def refusal(file: Path) -> str | None:
    try:
        configfile.load(file)
    except errors.ConfigError as error:
        return error.message
    return None


def by_file(reasons: Mapping[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in reasons.items() for name in names.split()}


def wrong(refusals: Mapping[str, str | None], expected: Mapping[str, str]) -> dict[str, str | None]:
    """The files whose outcome is not the expected one."""
    return {
        name: message
        for name, message in refusals.items()
        if (expected.get(name) is None) != (message is None) or (message and expected[name] not in message)
    }


@pytest.mark.parametrize("platform", schema.PLATFORMS)
def test_every_deploy_file_of_vllm_omni_loads_or_is_refused_for_a_listed_reason(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNIQUEUE_PLATFORM", platform)
    refusals = {file.stem: refusal(file) for file in sorted(folder().glob("*.yaml"))}
    assert len(refusals) > 100
    assert wrong(refusals, by_file({**REFUSED, **(ON_NPU if platform == "npu" else {})})) == {}


def test_the_remedies_that_the_messages_give_are_the_right_ones(tmp_path: Path) -> None:
    refusals = {}
    for file in sorted(folder().glob("*.yaml")):
        mine = tmp_path / file.name
        mine.write_text(f"base_config: {file}\nasync_chunk: false\nsession_mode: turn\n", encoding="utf-8")
        refusals[file.stem] = refusal(mine)
    assert wrong(refusals, by_file(STILL_REFUSED)) == {}


def _ours(file: Path) -> list[dict[str, Any]] | None:
    try:
        pipeline = configfile.load(file)
    except errors.ConfigError:
        return None
    return [{**stage.deploy, **stage.deploy.get("engine_extras", {})} for stage in pipeline.stages]


def _comparable(entry: Mapping[str, Any], with_width: bool) -> dict[str, Any]:
    """The entry without what is ours and what vLLM-Omni does not tell from its default."""
    dropped = {"engine_extras", "num_replicas", "silence_ban_frames", "async_chunk", *schema.STAGE_OWN}
    dropped |= set() if with_width else {"max_num_seqs"}
    return {key: value for key, value in entry.items() if key not in dropped}


def test_base_config_and_platforms_mean_to_us_what_they_mean_to_vllm_omni(monkeypatch: pytest.MonkeyPatch) -> None:
    program = [sys.executable, str(Path(__file__).with_name("upstream_stages.py"))]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=True)
    compared = 0
    for name, theirs in json.loads(done.stdout).items():
        file, platform = name.split()
        monkeypatch.setenv("OMNIQUEUE_PLATFORM", platform)
        ours = _ours(folder() / file)
        for entry in theirs if ours else ():
            assert ours is not None
            mine = ours[entry["stage_id"]]
            with_width = "max_num_seqs" in entry
            assert _comparable(mine, with_width) == _comparable(entry, with_width), f"{name} stage {entry['stage_id']}"
            compared += 1
    assert compared > 300


def test_the_shipped_table_is_what_the_installed_vllm_omni_says() -> None:
    program = [sys.executable, "-m", "omniqueue.engines.registry"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=True)
    said = (topology.shipped() / "topologies.yaml").read_text(encoding="utf-8")
    changes = difflib.unified_diff(
        said.splitlines(), done.stdout.splitlines(), "shipped", "installed", lineterm="", n=1
    )
    assert list(changes) == []


def test_another_version_is_read_from_its_registry() -> None:
    program = (
        "from omniqueue import cli, topology; topology.table()['vllm_omni'] = '0.1'; cli.main(['models', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert "omniqueue knows vllm_omni 0.1; reading the registry of" in done.stderr
    told = json.loads(done.stdout[done.stdout.index('{\n  "vllm_omni"') :])
    assert [one["pipeline"] for one in told["pipelines"]] == sorted(topology.keys(), key=str.lower)
    assert told["vllm_omni"] == topology.table()["vllm_omni"]


def test_shipped_configs_sample_as_the_files_of_vllm_omni_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIQUEUE_PLATFORM", "cuda")
    for pipeline, (name, *_) in FORMS.items():
        theirs = yaml.safe_load(
            (folder() / topology.table()["pipelines"][pipeline]["deploy"]).read_text(encoding="utf-8")
        )
        for entry, stage in zip(theirs["stages"], configfile.load(f"{name}.yaml").stages, strict=True):
            assert stage.default_sampling_params == entry["default_sampling_params"], f"{name} stage {stage.stage_id}"
