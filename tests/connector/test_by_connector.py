"""Payloads that vLLM-Omni's workers hand to each other themselves: its own tokens and waves, and what that gives up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import pytest

from omniqueue import errors
from omniqueue.engines.base import StageOutput
from omniqueue.payloads import PayloadStore
from tests.engines import checkpoints, handover
from tests.engines.handover import Native, References
from tests.engines.handover_cases import PIPELINES, Request
from tests.engines.stage_process import Answer, StageProcess

pytestmark = pytest.mark.engine

PIPELINE = PIPELINES["qwen2_5_omni"]
THINKER, TALKER, VOCODER = range(3)
#: As a worker names its requests, so that what is left of them can be found.
NAMES = PayloadStore("cab1eeee")
_CONFIG = """
base_config: {base}
edges: [{{from: 0, to: 1, route: connector}}, {{from: 1, to: 2, route: connector}}]
"""


@dataclass(frozen=True)
class Both:
    """Every request answered both ways, the three engines still there."""

    native: Native
    made: dict[str, dict[int, StageOutput]]
    processes: list[StageProcess]


def ask(process: StageProcess, request: Request, made: dict[int, StageOutput], attempt: int = 1) -> Answer:
    stage = process.stage
    key = f"{NAMES.name(request.name, stage.stage_id, attempt)}-0"
    return process.generate(request.job, {one: made[one] for one in stage.input_sources}, key=key)


@pytest.fixture(scope="module")
def both(references: References, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    checkpoint, native = references(PIPELINE.name)
    folder = tmp_path_factory.mktemp("connector")
    config = folder / "connector.yaml"
    config.write_text(_CONFIG.format(base=checkpoints.config(PIPELINE.name)))
    # In vain it is waited for a few seconds here, and for half a minute elsewhere.
    patience = {"VLLM_OMNI_INPUT_WAIT_TIMEOUT_S": "5"}
    with handover.stages(PIPELINE.name, checkpoint, folder, config, **patience) as processes:
        made: dict[str, dict[int, StageOutput]] = {request.name: {} for request in PIPELINE.requests}
        for process in processes:
            asked = {request.name: ask(process, request, made[request.name]) for request in PIPELINE.requests}
            for name, answer in asked.items():
                made[name][process.stage.stage_id] = answer.result()
        yield Both(native, made, processes)


def test_tokens_and_sound_are_those_of_native_omni_with_all_requests_in_flight(both: Both) -> None:
    for request in PIPELINE.requests:
        made = both.made[request.name]
        for stage_id in (THINKER, TALKER):
            assert made[stage_id].data["cumulative_token_ids"] == both.native.stage(request.name, stage_id)["token_ids"]
        wave = handover.array(made[VOCODER].tensors["audio"])
        assert wave.std() > 0
        numpy.testing.assert_array_equal(wave, both.native.tensors[f"{request.name}:{VOCODER}/audio"].reshape(-1))


def test_the_queue_carries_no_tensor_and_nothing_lies_in_shared_memory_afterwards(both: Both) -> None:
    for made in both.made.values():
        assert made[THINKER].tensors == made[TALKER].tensors == {}
        assert "payload" not in made[THINKER].data
    assert NAMES.names() == []


def test_what_was_read_is_not_there_for_a_second_attempt_which_fails_and_names_the_edge(both: Both) -> None:
    request = PIPELINE.requests[0]
    for source, process in zip((THINKER, TALKER), both.processes[1:], strict=True):
        with pytest.raises(errors.EngineError, match=rf"stage {source} -> stage {source + 1}: .*did not come through"):
            ask(process, request, both.made[request.name], attempt=2).result()
    made: dict[int, StageOutput] = {}
    for process in both.processes:  # from the start it can be had again
        made[process.stage.stage_id] = ask(process, request, made, attempt=3).result()
    first = both.made[request.name][VOCODER]
    assert bytes(made[VOCODER].tensors["audio"].buffer) == bytes(first.tensors["audio"].buffer)


def test_what_nobody_reads_is_swept_when_its_job_is_over(both: Both) -> None:
    request = PIPELINE.requests[1]
    ask(both.processes[THINKER], request, {}, attempt=4).result()
    sent = f"{NAMES.name(request.name, THINKER, 4)}-0_{THINKER}_0"
    deadline = time.monotonic() + 30
    while sent not in NAMES.names() and time.monotonic() < deadline:  # it is sent a step after the request's end
        time.sleep(0.05)
    assert NAMES.sweep(lambda jobs: jobs, min_age_s=0) == []  # its job runs
    assert sorted(NAMES.sweep(lambda jobs: set(), min_age_s=0)) == [sent, f"shm_{sent}_lockfile.lock"]
    assert NAMES.names() == []
