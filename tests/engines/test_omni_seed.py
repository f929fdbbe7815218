"""Codes that a model draws beside the sampled tokens come from the request's own generator, whoever else draws."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from omniqueue.engines import omni_seed

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


class Takes:
    def talker_mtp(self, count: int, generator: Any = None) -> Any:
        import torch

        return torch.rand(count, generator=generator)


class TakesNone:
    def talker_mtp(self, count: int, **_: Any) -> Any:
        import torch

        return torch.rand(count)


def worker(model: Any) -> Any:
    made = omni_seed.SeededWorker()
    runner = SimpleNamespace(model=model, has_talker_mtp=True, talker_mtp=model.talker_mtp)
    made.model_runner = runner  # type: ignore[attr-defined]
    return made


def generator(seed: int) -> Any:
    import torch

    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("model", [Takes(), TakesNone()])
def test_a_request_draws_the_same_codes_alone_and_between_others(model: Any) -> None:
    made = worker(model)
    assert made.own_generators()
    draw = made.model_runner.talker_mtp
    alone = generator(7)
    expected = [draw(5, generator=alone).tolist() for _ in range(3)]
    mine, other = generator(7), generator(8)
    found = []
    for _ in range(3):
        draw(3, generator=other)
        found.append(draw(5, generator=mine).tolist())
        TakesNone().talker_mtp(2)
    assert found == expected
    assert expected[0] != expected[1]


def test_what_a_seeded_request_draws_is_what_the_seeded_process_would_have_drawn() -> None:
    made = worker(TakesNone())
    made.own_generators()
    made.seed_generator(7)
    assert made.model_runner.talker_mtp(5, generator=generator(7)).tolist() == TakesNone().talker_mtp(5).tolist()


def test_the_process_draws_on_as_if_no_request_had_drawn() -> None:
    made = worker(TakesNone())
    made.own_generators()
    made.seed_generator(3)
    expected = TakesNone().talker_mtp(4).tolist()
    made.seed_generator(3)
    made.model_runner.talker_mtp(9, generator=generator(1))
    assert TakesNone().talker_mtp(4).tolist() == expected


def test_models_that_draw_no_codes_are_left_alone() -> None:
    made = worker(TakesNone())
    made.model_runner.has_talker_mtp = False
    draw = made.model_runner.talker_mtp
    assert not made.own_generators()
    assert made.model_runner.talker_mtp == draw


def test_answers_of_workers_are_found_in_lists_by_stage_and_replica() -> None:
    assert omni_seed.flat([[[True]], [False, [None]]]) == [True, False, None]
