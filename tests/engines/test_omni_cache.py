"""Key-value caches pass through our process between two workers' own managers, unchanged and leaving nothing."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omniqueue import errors
from omniqueue.engines import environment, omni_cache
from omniqueue.engines.base import StageOutput
from omniqueue.engines.omni_edges import CACHE, Edge

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

EDGE = Edge(0, 1, CACHE, "for the test")


def end(stage_id: int) -> omni_cache.CacheEnd:
    """Our end for one of the edge's two stages."""
    environment.prepare("")
    stage = SimpleNamespace(stage_id=stage_id, omni_kv_config=None, prompt_expand_func=None)
    made = omni_cache.CacheEnd(EDGE, stage, {})
    made.attach()
    return made


def worker(*, sends: bool) -> Any:
    """A worker's manager, made as vLLM-Omni makes it from a stage's configuration."""
    environment.prepare("")
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import OmniKVTransferManager

    wanted = {"kv_transfer_criteria": {"type": "prefill_finished"}}
    settings = omni_cache.config(wanted, sends=sends, shards=1)
    return OmniKVTransferManager.from_od_config(SimpleNamespace(omni_kv_config=settings))


def cache(seed: int) -> Any:
    import torch

    random = torch.Generator().manual_seed(seed)
    layers = [torch.randn(5, 2, 4, generator=random).to(torch.bfloat16) for _ in range(4)]
    return {"key_cache": layers[:2], "value_cache": layers[2:]}


def put(manager: Any, request_id: str, blocks: Any, **metadata: Any) -> None:
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import KVCacheTransferData

    manager._transfer_kv_cache(KVCacheTransferData(request_id, blocks, [3], {"seq_len": 5, **metadata}), request_id)


def segments() -> list[str]:
    return [path.name for path in Path("/dev/shm").iterdir() if "kv_cache" in path.name]


def test_both_workers_see_their_own_connector_and_the_cache_is_the_same() -> None:
    import torch

    sender, receiver = worker(sends=True), worker(sends=False)
    first = uuid.uuid4().hex
    put(sender, first, cache(1), ropes=[7], image_shape=[64, 96])
    put(sender, f"{first}__cfg_text", cache(2), ropes=[1])
    taking = end(0)
    own = asyncio.run(taking.take(first))
    stored = omni_cache.stored([own, asyncio.run(taking.take(f"{first}__cfg_text", "cfg_text"))])
    assert not [name for name in segments() if first in name]
    second = uuid.uuid4().hex
    for _ in range(2):  # a stage may run again
        with end(1).given(second, stored) as ids:
            assert list(ids) == ["cfg_text"]
            data, _size = receiver.receive_kv_cache_for_request(second)
            other, _size = receiver.receive_kv_cache_for_request(ids["cfg_text"])
        assert data["metadata"] == {"seq_len": 5, "ropes": [7], "image_shape": [64, 96]}
        assert other["metadata"]["ropes"] == [1]
        for got, wanted in ((data, cache(1)), (other, cache(2))):
            for name, layers in wanted.items():
                assert all(map(torch.equal, got["layer_blocks"][name], layers))
        assert not [name for name in segments() if second in name]


def test_what_nobody_read_is_taken_away() -> None:
    sender, taking = worker(sends=True), end(0)
    first, second = uuid.uuid4().hex, uuid.uuid4().hex
    put(sender, first, cache(1))
    stored = omni_cache.stored([asyncio.run(taking.take(first))])
    with end(1).given(second, stored):
        assert [name for name in segments() if second in name]
    assert not [name for name in segments() if second in name]
    put(sender, second, cache(1))
    taking.drop(second)
    assert not [name for name in segments() if second in name]


def test_what_is_put_after_a_request_was_given_up_goes_with_the_next() -> None:
    sender, taking = worker(sends=True), end(0)
    late, other = uuid.uuid4().hex, uuid.uuid4().hex
    taking.drop(late)
    put(sender, late, cache(1))
    taking.drop(other)
    assert not [name for name in segments() if late in name]


def test_an_output_without_a_cache_names_the_edge() -> None:
    nothing = StageOutput({"token_ids": [1]}, {})
    with (
        pytest.raises(errors.EngineError, match=r"stage 0 -> stage 1: .*no key-value cache"),
        end(1).given("x", nothing),
    ):
        pass


def test_a_worker_that_hands_over_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(omni_cache, "_PATIENCE_S", 0.1)
    with pytest.raises(errors.EngineError, match=r"stage 0 -> stage 1: .*no key-value cache"):
        asyncio.run(end(0).take(uuid.uuid4().hex))
