"""The deploy file of one stage, from files written for whole pipelines and for GPUs."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from omniqueue import errors
from omniqueue.engines import omni_seed, omni_stage
from omniqueue.pipeline import Pipeline, Stage

#: What vLLM-Omni ships for GLM-Image, its second stage on its second GPU.
GPU_FILE: dict[str, Any] = {"max_num_seqs": 1, "enforce_eager": False, "gpu_memory_utilization": 0.6, "devices": "1"}


def pipeline(*, top: dict[str, Any] | None = None, execution_type: str = "llm_ar", **deploy: Any) -> Pipeline:
    stage = Stage(1, "dit", "stage1", execution_type=execution_type, max_num_seqs=4, deploy={"stage_id": 1, **deploy})
    return Pipeline("glm_image", (stage,), deploy=top or {})


def made(pipe: Pipeline, **where: Any) -> dict[str, Any]:
    return omni_stage.deploy_config(pipe, pipe.stages[0], "alone", **where)


def test_the_stage_is_renumbered_and_its_pipeline_renamed() -> None:
    config = made(pipeline(top={"pipeline": "glm_image", "async_chunk": True, "trust_remote_code": True}), cpu=False)
    assert config == {
        "pipeline": "alone",
        "async_chunk": False,
        "trust_remote_code": True,
        "stages": [{"stage_id": 0, "max_num_seqs": 4, "worker_extension_cls": omni_seed.EXTENSION}],
    }


def test_what_joins_stages_inside_one_program_is_left_out() -> None:
    pipe = pipeline(
        top={"edges": [{"from": 0, "to": 1}], "platforms": {"npu": {}}, "base_config": "b.yaml", "dtype": "float16"},
        input_connectors={"from_stage_0": "shm"},
        num_replicas=3,
        async_chunk=True,
        max_model_len=64,
    )
    config = made(pipe, cpu=False)
    assert set(config) == {"pipeline", "async_chunk", "stages", "dtype"}
    [entry] = config["stages"]
    assert entry.keys() == {"stage_id", "max_num_seqs", "max_model_len", "worker_extension_cls"}


def test_a_file_for_gpus_runs_on_a_cpu() -> None:
    config = made(pipeline(**GPU_FILE), cpu=True)
    assert config["dtype"] == "bfloat16"
    assert config["stages"] == [
        {
            "stage_id": 0,
            "max_num_seqs": 1,
            "gpu_memory_utilization": 0.6,
            "devices": "0",
            "enforce_eager": True,
            "async_scheduling": False,
            "distributed_executor_backend": "uni",
            "worker_extension_cls": omni_seed.EXTENSION,
        }
    ]


def test_a_diffusion_stage_on_a_cpu_gets_no_language_model_keys() -> None:
    entry = made(pipeline(execution_type="diffusion", **GPU_FILE), cpu=True)["stages"][0]
    assert "async_scheduling" not in entry
    assert "distributed_executor_backend" not in entry


@pytest.mark.parametrize("where", ["top", "stage"])
def test_a_dtype_that_is_given_stays(where: str) -> None:
    pipe = pipeline(top={"dtype": "float32"}) if where == "top" else pipeline(dtype="float32")
    config = made(pipe, cpu=True)
    assert config.get("dtype", config["stages"][0].get("dtype")) == "float32"
    assert "bfloat16" not in str(config)


@pytest.mark.parametrize(
    ("execution_type", "seeded"), [("llm_ar", True), ("llm_generation", True), ("diffusion", False)]
)
def test_stages_that_may_draw_from_their_process_can_be_seeded(execution_type: str, seeded: bool) -> None:
    entry = made(pipeline(execution_type=execution_type), cpu=False)["stages"][0]
    assert ("worker_extension_cls" in entry) == seeded


def test_devices_on_a_narrowed_process_become_logical() -> None:
    assert made(pipeline(**GPU_FILE), cpu=False, visible_devices="1")["stages"][0]["devices"] == "0"


def test_devices_under_runtime_are_understood() -> None:
    config = made(pipeline(runtime={"devices": "3", "env": {}}), cpu=False, visible_devices="2,3")
    assert config["stages"][0]["devices"] == "1"
    config = made(pipeline(runtime={"devices": "3", "env": {}}), cpu=True)
    assert config["stages"][0]["devices"] == "0"
    assert config["stages"][0]["runtime"] == {"env": {}}


def test_the_pipeline_itself_is_not_changed() -> None:
    pipe = pipeline(**GPU_FILE)
    made(pipe, cpu=True)
    assert pipe.stages[0].deploy == {"stage_id": 1, **GPU_FILE}
    assert pipe.deploy == {}


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
class TestAgainstTheRegistry:
    """With vLLM-Omni's own pipelines, which import torch and vllm."""

    def source(self, name: str) -> Any:
        from omniqueue.engines import environment

        environment.prepare("")
        from vllm_omni.config.pipeline_registry import OMNI_PIPELINES

        return OMNI_PIPELINES[name]

    def test_the_topology_is_the_one_that_ships_with_omniqueue(self) -> None:
        from omniqueue import topology

        stages = [dict(stage) for stage in topology.named("glm_image").stages]
        for stage in omni_stage.topology(self.source("glm_image")):
            assert stage.pop("engine") == "vllm_omni"
            assert stage == stages[stage["stage_id"]]

    @pytest.mark.parametrize("stage_id", [0, 1])
    def test_a_stage_alone_is_first_and_final(self, stage_id: int) -> None:
        view = omni_stage.one_stage(self.source("glm_image"), stage_id)
        [stage] = view.stages
        assert (stage.stage_id, stage.input_sources, stage.final_output) == (0, (), True)
        assert stage.custom_process_input_func is None
        assert stage.final_output_type == ("text", "image")[stage_id]
        assert view.model_type != "glm_image"

    @pytest.mark.parametrize(
        ("name", "reason", "instead"),
        [
            ("minimax_h3_disaggregated", "stage 0 -> stage 1: .*all stages' parameters", "vLLM-Omni itself"),
            ("voxtral_tts", "stage 0 -> stage 1: .*async_chunk", "vLLM-Omni itself"),
        ],
    )
    def test_hand_overs_that_queues_do_not_carry_are_refused(self, name: str, reason: str, instead: str) -> None:
        with pytest.raises(errors.ConfigError, match=f"{name}: {reason}.*{instead}"):
            omni_stage.check_edges(self.source(name), {})

    def test_pages_that_vllm_would_move_itself_can_be_left_out_of_the_deploy_file(self) -> None:
        source = self.source("hunyuan_image_3_moe")
        with pytest.raises(errors.ConfigError, match="leave kv_transfer_config"):
            omni_stage.check_edges(source, {1: {"kv_transfer_config": {"kv_role": "kv_consumer"}}})
        assert len(omni_stage.check_edges(source, {0: {}, 1: {}})) == 1

    def test_a_stage_alone_has_this_process_as_the_other_end_of_its_cache(self) -> None:
        plain, cached = (
            omni_stage.one_stage(self.source("bagel"), 0, cache).stages[0]
            for cache in (None, {"need_send_cache": True})
        )
        assert plain.omni_kv_config is None
        assert cached.omni_kv_config == {"need_send_cache": True}
        assert cached.prompt_expand_func is None

    def test_pictures_are_not_computed_together_where_they_would_be_mixed_up(self) -> None:
        edges = omni_stage.check_edges(self.source("glm_image"), {})
        for stage_id, images, together, refused in [
            (0, 1, 2, True),
            (0, 1, 1, False),
            (0, 0, 8, False),
            (1, 1, 2, False),
        ]:
            stage = Stage(stage_id, "any", "any", max_num_seqs=together)
            wrong = pytest.raises(errors.ConfigError, match="set it to 1") if refused else contextlib.nullcontext()
            with wrong:
                omni_stage.check_pictures(Pipeline("x", (stage,), max_images=images), stage, edges)

    def test_a_stage_that_is_not_there_is_named(self) -> None:
        with pytest.raises(errors.ConfigError, match="no stage 7"):
            omni_stage.one_stage(self.source("glm_image"), 7)

    def test_a_stage_alone_waits_for_nobody_and_sends_nothing(self) -> None:
        [stage] = omni_stage.one_stage(self.source("qwen2_5_omni"), 1).stages
        assert not stage.requires_full_payload_input
        assert stage.custom_process_next_stage_input_func is None

    def test_of_edges_by_connector_one_end_sends_and_the_other_waits(self) -> None:
        source = self.source("qwen2_5_omni")
        connected = omni_stage.check_edges(source, {}, {(0, 1): {"name": "SharedMemoryConnector", "extra": {}}})[:1]
        told = [omni_stage.one_stage(source, stage_id, None, connected).stages[0] for stage_id in range(3)]
        assert [one.requires_full_payload_input for one in told] == [False, True, False]
        assert [one.custom_process_next_stage_input_func is not None for one in told] == [True, False, False]

    def test_an_edge_without_a_payload_is_not_taken_by_connector(self) -> None:
        with pytest.raises(errors.ConfigError, match=r"stage 0 -> stage 1 has nothing .*leave route: connector out"):
            omni_stage.check_edges(self.source("glm_image"), {}, {(0, 1): {"name": "SharedMemoryConnector"}})

    def test_an_unknown_pipeline_is_refused_with_the_nearest_name(self) -> None:
        self.source("glm_image")
        with pytest.raises(errors.ConfigError, match="did you mean glm_image"):
            omni_stage.source_pipeline(Pipeline("x", (), deploy={"pipeline": "glm_imgae"}), "/nowhere")
