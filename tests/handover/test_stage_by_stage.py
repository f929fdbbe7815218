"""Pipelines whose stages hand over tensors: a Celery worker a stage, equal to vLLM-Omni in one go.

All requests of a pipeline are in flight together here and one after the other in vLLM-Omni. Both sides seed the
generator of stages that draw from a global one, which vLLM-Omni by itself does not (see native_pipeline.py).
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy
import pytest
from PIL import Image

from tests.engines import handover
from tests.engines.handover import Native, References
from tests.engines.handover_cases import PIPELINES, Pipeline
from tests.handover import deployment
from tests.handover.deployment import Answers

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Both:
    """One pipeline, answered both ways; no engine of either runs any more."""

    pipeline: Pipeline
    native: Native
    ours: Answers


@pytest.fixture(scope="module", params=sorted(PIPELINES))
def both(request: pytest.FixtureRequest, references: References) -> Both:
    pipeline = PIPELINES[request.param]
    checkpoint, native = references(pipeline.name)
    return Both(pipeline, native, deployment.answers(pipeline, checkpoint))


def test_tokens_of_every_stage_are_those_of_native_omni(both: Both) -> None:
    for request in both.pipeline.requests:
        for stage_id, what in both.pipeline.compared.items():
            if "tokens" in what:
                mine, theirs = both.ours.stored[request.name][stage_id].data, both.native.stage(request.name, stage_id)
                assert mine["prompt_token_ids"] == theirs["prompt_token_ids"], (request.name, stage_id)
                assert mine["cumulative_token_ids"] == theirs["token_ids"], (request.name, stage_id)
                assert theirs["token_ids"], (request.name, stage_id)


def test_what_the_client_gets_is_that_of_native_omni(both: Both) -> None:
    last = max(both.pipeline.compared)
    for request in both.pipeline.requests:
        mine = both.ours.files[request.name]
        if "audio" in both.pipeline.compared[last]:
            wave = both.native.tensors[f"{request.name}:{last}/audio"]
            assert mine.content == handover.wav(wave, mine.facts["sample_rate"])
            assert numpy.frombuffer(mine.content[44:], "<i2").std() > 0, "silence would prove nothing"
        else:
            with Image.open(io.BytesIO(mine.content)) as picture:
                pixels = numpy.asarray(picture)
            assert pixels.std() > 0, "a single colour would prove nothing"
            theirs = both.native.tensors[f"{request.name}:{last}/image/0"]
            numpy.testing.assert_array_equal(pixels, theirs.reshape(pixels.shape))


def test_requests_have_answers_of_their_own(both: Both) -> None:
    """So that the comparison above can fail."""
    assert len({file.content for file in both.ours.files.values()}) == len(both.pipeline.requests)


def test_an_answer_does_not_depend_on_what_came_before(both: Both) -> None:
    """Each alone, and in the other order."""
    for name, file in both.ours.alone.items():
        assert file.content == both.ours.files[name].content, name


@pytest.mark.parametrize("hand_over", ["empty", "missing"])
def test_without_a_hand_over_the_job_fails_and_names_the_edge(both: Both, hand_over: str) -> None:
    job, last = both.ours.doomed[hand_over], max(both.pipeline.compared)
    assert job.state.value == "failed"
    assert job.error is not None
    assert job.error["stage"] == last
    assert f"stage {last - 1} -> stage {last}: " in job.error["message"]
    assert job.finished_at is not None
    assert job.finished_at < job.deadline


def test_nothing_is_left_in_shared_memory_or_redis(both: Both) -> None:
    assert both.ours.left == []
