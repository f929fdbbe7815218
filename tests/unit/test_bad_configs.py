"""Wrong stage configs: each is refused with file, path and what would be right, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from omniqueue import configfile, errors

FAKE = "stages: [{stage_id: 0, engine: fake%s}]\n"
PAIR = "stages:\n- {stage_id: 0, engine: fake%s}\n- {stage_id: 1, engine: fake%s}\n"
GLM = "pipeline: glm_image\nstages:\n- {stage_id: 0%s}\n- {stage_id: 1%s}\n"

#: File, path of the problem, and what the message says about it.
BAD: list[tuple[str, str, str]] = [
    # Unknown keys, with the nearest right one.
    ("stage: []\n", "stage", "there is no such key here; did you mean stages?"),
    (PAIR % ("", ", device: '0'"), "stages[1].device", "did you mean devices?"),
    (PAIR % (", engin: fake", ""), "stages[0].engin", "did you mean engine?"),
    (FAKE % ", final_ouput: true", "stages[0].final_ouput", "did you mean final_output?"),
    (FAKE % ", input_source: [0]", "stages[0].input_source", "did you mean input_sources?"),
    (FAKE % ", max_num_seq: 4", "stages[0].max_num_seq", "did you mean max_num_seqs?"),
    (FAKE % ", engine_args: {delay: 1}", "stages[0].engine_args.delay", "did you mean delay_s?"),
    (FAKE % ", engine_args: {raise: x}", "stages[0].engine_args.raise", "did you mean raise_on?"),
    (GLM % (", gpu_memory_utilisation: 0.5", ""), "stages[0].gpu_memory_utilisation", "gpu_memory_utilization?"),
    (GLM % (", engine_args: {max_num_seq: 4}", ""), "stages[0].engine_args.max_num_seq", "did you mean max_num_seqs?"),
    (GLM % (", runtime: {device: '0'}", ""), "stages[0].runtime.device", "did you mean devices?"),
    (GLM % (", engine_extras: {enforce_egar: true}", ""), "stages[0].engine_extras.enforce_egar", "enforce_eager?"),
    (
        GLM % (", default_sampling_params: {temprature: 1}", ""),
        "stages[0].default_sampling_params.temprature",
        "did you mean temperature?",
    ),
    (
        GLM % ("", ", default_sampling_params: {num_inference_step: 9}"),
        "stages[1].default_sampling_params.num_inference_step",
        "did you mean num_inference_steps?",
    ),
    (GLM % ("", ", parallel_config: {ulyses_degree: 2}"), "stages[1].parallel_config.ulyses_degree", "ulysses_degree?"),
    (FAKE % "" + "size: {multipel: 8}\n", "size.multipel", "did you mean multiple?"),
    (FAKE % "" + "connectors: {shm: {nam: x}}\n", "connectors.shm.nam", "did you mean name?"),
    (FAKE % "" + "edges: [{form: 0, to: 0}]\n", "edges[0].form", "did you mean from?"),
    (FAKE % "" + "duplex_session: {max_session: 1}\n", "duplex_session.max_session", "did you mean max_sessions?"),
    (FAKE % "" + "platforms: {cude: {}}\n", "platforms.cude", "is no platform; did you mean cuda?"),
    (
        FAKE % "" + "platforms: {cuda: {stages: [{stage_id: 0, devces: '0'}]}}\n",
        "platforms.cuda.stages[0].devces",
        "did you mean devices?",
    ),
    (
        FAKE % "" + "platforms: {cuda: {stages: [{stage_id: 0, engine: fake}]}}\n",
        "platforms.cuda.stages[0].engine",
        "there is no such key here",
    ),
    # Types and ranges, with the value.
    (FAKE % ", max_num_seqs: 0", "stages[0].max_num_seqs", "must be a whole number from 1 to 1e+06, not 0"),
    (FAKE % ", max_num_seqs: -1", "stages[0].max_num_seqs", "not -1"),
    (FAKE % ", max_num_seqs: true", "stages[0].max_num_seqs", "not true"),
    (FAKE % ", max_num_seqs: 2.5", "stages[0].max_num_seqs", "not 2.5"),
    (FAKE % ", max_num_seqs: '4'", "stages[0].max_num_seqs", "not '4'"),
    (FAKE % ", max_num_seqs: .nan", "stages[0].max_num_seqs", "must be a finite number"),
    (
        FAKE % ", engine_args: {delay_s: -1}",
        "stages[0].engine_args.delay_s",
        "must be a number from 0 to 86400, not -1",
    ),
    (FAKE % ", engine_args: {steps: 1.5}", "stages[0].engine_args.steps", "must be a whole number from 1"),
    (FAKE % ", engine_args: {steps: true}", "stages[0].engine_args.steps", "not true"),
    (FAKE % ", engine_args: {payload_bytes: -5}", "stages[0].engine_args.payload_bytes", "not -5"),
    (FAKE % ", engine_args: {raise_on: ''}", "stages[0].engine_args.raise_on", "must be a name, not ''"),
    (FAKE % ", engine_args: [1]", "stages[0].engine_args", "must be a mapping, not [1]"),
    (FAKE % ", env: {A: true}", "stages[0].env", "must have text for A, not true; put it in quotes"),
    (FAKE % ", env: {'A=B': x}", "stages[0].env", "no name for an environment variable"),
    (FAKE % ", num_replicas: 0", "stages[0].num_replicas", "from 1 to 1000, not 0"),
    (
        GLM % (", gpu_memory_utilization: 1.5", ""),
        "stages[0].gpu_memory_utilization",
        "more than 0 and at most 1, not 1.5",
    ),
    (GLM % (", enforce_eager: 1", ""), "stages[0].enforce_eager", "must be true or false, not 1"),
    (GLM % (", max_model_len: lots", ""), "stages[0].max_model_len", "not 'lots'"),
    (GLM % (", compilation_config: fast", ""), "stages[0].compilation_config", "must be a mapping, not 'fast'"),
    (FAKE % "" + "request_timeout_s: 0\n", "request_timeout_s", "more than 0"),
    (FAKE % "" + "max_n: ten\n", "max_n", "must be a whole number from 1 to 1000, not 'ten'"),
    (FAKE % "" + "lease_s: .inf\n", "lease_s", "must be a finite number"),
    (FAKE % "" + "served_model_name: []\n", "served_model_name", "must be a name or a list of names"),
    (FAKE % "" + "served_model_name: [a, a]\n", "served_model_name", "names one thing twice"),
    (FAKE % "" + 'model: ""\n', "model", "must be a name, not ''"),
    (FAKE % "" + "session_mode: duplexed\n", "session_mode", "did you mean duplex?"),
    (FAKE % "" + "model_runner: v3\n", "model_runner", "must be one of v1, v2, not 'v3'"),
    (FAKE % "" + "pipeline: my pipe/line\n", "pipeline", "use letters, digits"),
    ("stages: 5\n", "stages", "must be a list, not 5"),
    ("stages: [5]\n", "stages[0]", "must be a mapping, not 5"),
    ("stages: []\n", "pipeline", "is not said, nor is a model; set it to one of vLLM-Omni's names"),
    # Engines and kinds.
    (FAKE.replace("fake", "fak") % "", "stages[0].engine", "not 'fak'; did you mean fake?"),
    (FAKE.replace("fake", "vllm-omni") % "", "stages[0].engine", "did you mean vllm_omni?"),
    (FAKE.replace("fake", "my.engine") % "", "stages[0].engine", "package.module:Class"),
    (FAKE.replace("fake", '"my.engine:"') % "", "stages[0].engine", "package.module:Class"),
    (FAKE.replace("fake", '"/tmp/x.py:C"') % "", "stages[0].engine", "package.module:Class"),
    (FAKE % ", final_output_type: picture", "stages[0].final_output_type", "must be one of text, image, audio, video"),
    (FAKE % ", final_output_type: imge", "stages[0].final_output_type", "did you mean image?"),
    (FAKE % ", execution_type: llm", "stages[0].execution_type", "did you mean llm_ar?"),
    (
        "stages: [{stage_id: 0, engine: vllm, execution_type: diffusion}]\n",
        "stages[0].execution_type",
        "must be llm_ar with engine vllm",
    ),
    (GLM % (", ulysses_degree: 1", ""), "stages[0].ulysses_degree", "is for diffusion stages, and stage 0 is none"),
    (GLM % ("", ", block_size: 16"), "stages[1].block_size", "is for language-model stages, and stage 1 is none"),
    (GLM % (", engine_args: {devices: '0'}", ""), "stages[0].engine_args.devices", "belongs beside engine_args"),
    # Stage ids and the graph.
    ("stages: [{engine: fake}]\n", "stages[0]", "has no stage_id"),
    ("stages: [{stage_id: x, engine: fake}]\n", "stages[0].stage_id", "must be a whole number"),
    ("stages: [{stage_id: 1, engine: fake}]\n", "stages[0].stage_id", "there is no stage 0"),
    (
        "stages: [{stage_id: 0, engine: fake}, {stage_id: 2, engine: fake}]\n",
        "stages[1].stage_id",
        "numbered from 0 without gaps; there is no stage 1",
    ),
    (
        "stages: [{stage_id: 0, engine: fake}, {stage_id: 0, engine: fake}]\n",
        "stages[1].stage_id",
        "stage 0 is there twice, first at stages[0]",
    ),
    (PAIR % ("", ", input_sources: [1]"), "stages[1].input_sources", "makes stage 1 read itself"),
    (PAIR % (", input_sources: [1]", ""), "stages[0].input_sources", "names stage 1, which comes after stage 0"),
    (PAIR % ("", ", input_sources: [7]"), "stages[1].input_sources", "names stage 7, and there is none"),
    (PAIR % ("", ", input_sources: [0, 0]"), "stages[1].input_sources", "names one stage twice"),
    (PAIR % ("", ", input_sources: 0"), "stages[1].input_sources", "must be a list of stage ids such as [0], not 0"),
    (PAIR % ("", ", input_sources: [0], engine_input_source: []"), "stages[1].engine_input_source", "keep one"),
    (PAIR % ("", ", input_sources: []"), "stages[0]", "is read by no stage and is no final_output"),
    (PAIR % ("", ", final_output: false"), "stages[1].final_output", "no stage has final_output"),
    (
        PAIR % (", final_output_type: text", ""),
        "stages[0].final_output_type",
        "says nothing without final_output: true",
    ),
    (GLM % ("", "") + "- {stage_id: 2}\n", "stages[2].stage_id", "is 2; glm_image has stages 0 (ar), 1 (dit)"),
    (GLM % (", name: thinker", ""), "stages[0].name", "is 'thinker', but vLLM-Omni's glm_image has 'ar' here"),
    (GLM % ("", ", input_sources: []"), "stages[1].input_sources", "is [], but vLLM-Omni's glm_image has [0] here"),
    (GLM % (", final_output: true", ""), "stages[0].final_output", "but vLLM-Omni's glm_image has false here"),
    ("pipeline: pi0\n", "stages[0].final_output_type", "is action, which has no endpoint here"),
    # Batches, devices and memory.
    (
        GLM % (", max_num_seqs: 32, max_num_batched_tokens: 16", ""),
        "stages[0].max_num_batched_tokens",
        "is 16, less than the 32 of max_num_seqs",
    ),
    (
        GLM % (", max_num_batched_tokens: 8", ""),
        "stages[0].max_num_batched_tokens",
        "less than the 16 of max_num_seqs by default",
    ),
    (GLM % (", devices: 0;1", ""), "stages[0].devices", "must be device ids such as"),
    (GLM % (", devices: '0,,1'", ""), "stages[0].devices", "not '0,,1'"),
    (GLM % (", devices: -1", ""), "stages[0].devices", "not -1"),
    (GLM % (", devices: true", ""), "stages[0].devices", "not true"),
    (GLM % (", devices: [0, 1]", ""), "stages[0].devices", 'must be text such as "0,1", not a list; write "0,1"'),
    (GLM % (", devices: '0,0'", ""), "stages[0].devices", "names one device twice"),
    (
        GLM % (", tensor_parallel_size: 4, devices: '0'", ""),
        "stages[0].devices",
        "names 1 device, but the stage's parallel sizes multiply to 4; name 4, or change the sizes",
    ),
    (
        GLM % (", devices: '0,1'", ""),
        "stages[0].devices",
        "names 2 devices, but the stage's parallel sizes multiply to 1",
    ),
    (
        GLM % ("", ", ulysses_degree: 2, cfg_parallel_size: 2, devices: '0,1'"),
        "stages[1].devices",
        "multiply to 4; name 4",
    ),
    (
        GLM % ("", ", num_replicas: 2, devices: '0,1,2'"),
        "stages[1].devices",
        "multiply to 1 and num_replicas is 2; name 1 or 2",
    ),
    (GLM % ("", ", num_replicas: 2, devices: '5'"), "stages[1].devices", "is a template for 2 replicas"),
    (
        GLM % ("", ", parallel_config: {ulysses_degree: 2, sequence_parallel_size: 4}"),
        "stages[1].parallel_config.sequence_parallel_size",
        "is 4, but ulysses_degree times ring_degree (or allgather_degree) is 2",
    ),
    (
        GLM % (", gpu_memory_utilization: 0.6, devices: '0'", ", gpu_memory_utilization: 0.5, devices: '0'"),
        "stages[1].gpu_memory_utilization",
        "brings device 0 to 1.10 of its memory",
    ),
    # Modes that one process per stage cannot have.
    (GLM % ("", "") + "async_chunk: true\n", "async_chunk", "set async_chunk: false"),
    (GLM % (", async_chunk: true", ""), "stages[0].async_chunk", "set async_chunk: false"),
    (GLM % ("", "") + "session_mode: duplex\n", "session_mode", "set it to turn"),
    ("pipeline: voxtral_tts\n", "pipeline", "can only send pieces while it runs"),
    # Wiring.
    (
        GLM % (", output_connectors: {to_stage_1: shn}", "") + "connectors: {shm: {name: SharedMemoryConnector}}\n",
        "stages[0].output_connectors.to_stage_1",
        "did you mean shm?",
    ),
    (
        GLM % (", output_connectors: {stage_1: x}", ""),
        "stages[0].output_connectors.stage_1",
        "must be named to_stage_<id>",
    ),
    (GLM % ("", "") + "edges: [{from: 0, to: 9}]\n", "edges[0].to", "must be a stage id below 2, not 9"),
    (
        GLM % ("", "") + "platforms: {cpu: {stages: [{stage_id: 4}]}}\n",
        "platforms.cpu.stages[0].stage_id",
        "there is no stage 4 under stages to change",
    ),
    # Sizes.
    (FAKE % "" + "size: {default: big}\n", "size.default", "is big"),
    (FAKE % "" + "video: {frame_step: 4, default_frames: 6}\n", "video.default_frames", "a multiple of 4"),
    (FAKE % "" + "video: {max_frames: 8, default_frames: 9}\n", "video.default_frames", "from 1 to 8 frames"),
    (FAKE % "" + "video: {frames: 8}\n", "video.frames", "did you mean"),
    (FAKE % "" + "video: {fps: 0}\n", "video.fps", "must be a number from 1 to 240"),
    (FAKE % "" + "voices: [nova, nova]\n", "voices", "names one thing twice"),
    (FAKE % "" + "max_audio_s: 0\n", "max_audio_s", "must be a number more than 0"),
    (FAKE % "" + "size: {multiple: 32, default: 100x64}\n", "size.default", "must be multiples of 32"),
    (FAKE % "" + "size: {max_side: 512}\n", "size.default", "is 1024x1024, which the other limits do not allow"),
    (
        FAKE % "" + "size: {min_side: 512, max_side: 256, default: 512x512}\n",
        "size.min_side",
        "more than max_side, 256",
    ),
    (FAKE % "" + "size: {default: 1024x1024, max_area: 1000}\n", "size.default", "1,048,576 pixels"),
    (GLM % ("", "") + "size: {multiple: 16}\n", "size.multiple", "is 16, but glm_image needs multiples of 32"),
    # Which pipeline.
    ("pipeline: glm_imag\n", "pipeline", "which vLLM-Omni does not have; did you mean glm_image?"),
    ("pipeline: nonsense\nstages: [{stage_id: 0}]\n", "pipeline", "stage_configs/topologies.yaml lists the names"),
    ("model: some/thing\nstages: [{stage_id: 0}]\n", "pipeline", "cannot be told from the model some/thing"),
    ("base_config: none.yaml\n", "base_config", "neither beside this file nor among the shipped stage configs"),
    ("base_config: config.yaml\n", "base_config", "goes round in a circle"),
    # The older format.
    ("stage_args: [{stage_id: 0, stage_typ: llm}]\n", "stage_args[0].stage_typ", "did you mean stage_type?"),
    ("stage_args: [{stage_id: 0, runtime: {devics: '0'}}]\n", "stage_args[0].runtime.devics", "did you mean devices?"),
    ("stage_args: {}\n", "stage_args", "must be a list, not {}"),
    ("stage_args: []\nstages: []\n", "stages", "cannot be used together with stage_args"),
    ("stage_args: [{stage_id: 0}]\nruntime: {enable: true}\n", "runtime.enable", "did you mean enabled?"),
]


@pytest.mark.parametrize(("text", "path", "phrase"), BAD, ids=[f"{i}-{path}" for i, (_, path, _) in enumerate(BAD)])
def test_a_wrong_file_is_refused_with_path_and_remedy(tmp_path: Path, text: str, path: str, phrase: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(errors.ConfigError) as caught:
        configfile.load(file)
    lines = [line for line in str(caught.value).splitlines() if f": {path}: " in line]
    assert lines, str(caught.value)
    assert any(phrase in line for line in lines), str(caught.value)
    assert all(line.startswith(f"{tmp_path}/config.yaml") for line in str(caught.value).splitlines())


def test_the_error_names_the_line_and_carries_the_path(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("stages:\n  - stage_id: 0\n    engine: fake\n    device: 0\n", encoding="utf-8")
    with pytest.raises(errors.ConfigError) as caught:
        configfile.load(file)
    assert str(caught.value) == f"{file}:4: stages[0].device: there is no such key here; did you mean devices?"
    assert caught.value.param == "stages[0].device"


def test_all_problems_of_a_file_are_told_together(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("max_n: 0\nmodell: x\n" + FAKE % ", device: 0, max_num_seqs: 0", encoding="utf-8")
    with pytest.raises(errors.ConfigError) as caught:
        configfile.load(file)
    paths = [line.split(": ")[1] for line in str(caught.value).splitlines()]
    assert paths == ["max_n", "modell", "stages[0].device", "stages[0].max_num_seqs"]


def test_an_unknown_platform_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIQUEUE_PLATFORM", "cudda")
    with pytest.raises(errors.ConfigError, match=r"OMNIQUEUE_PLATFORM: must be one of .* did you mean cuda\?"):
        configfile.load("fake_image.yaml")
