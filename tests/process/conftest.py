"""Deployments that several tests share, since one takes seconds to start: each test has to leave it clean."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.process.cluster import Cluster, config, publish_to, running

MISBEHAVIOUR = {"exit_on": "EXIT", "raise_on": "RAISE", "hang_on": "HANG"}


@pytest.fixture(scope="session")
def quick_cluster() -> Iterator[Cluster]:
    stages = config({}, MISBEHAVIOUR, hang_timeout_s=3)
    with running(stages) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def slow_cluster() -> Iterator[Cluster]:
    stage = {"delay_s": 0.05, "steps": 20}
    with running(config(stage, stage, max_queue=40), environ={"OMNIQUEUE_DRAIN_GRACE_S": "20"}) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def web_cluster() -> Iterator[Cluster]:
    with running(config({}, MISBEHAVIOUR, max_queue=32, request_timeout_s=20)) as cluster:
        cluster.router()
        yield cluster


@pytest.fixture
def web(web_cluster: Cluster) -> Iterator[Cluster]:
    """Like ``quick``, with a router; at most 32 jobs in hand."""
    yield from _whole(web_cluster)


@pytest.fixture
def quick(quick_cluster: Cluster) -> Iterator[Cluster]:
    """Two stages of one step of 20 ms, four at once, one worker each; stage 1 can be made to misbehave."""
    yield from _whole(quick_cluster)


@pytest.fixture
def slow(slow_cluster: Cluster) -> Iterator[Cluster]:
    """Two stages of twenty steps of 50 ms, four at once, one worker each; at most 40 jobs in hand."""
    yield from _whole(slow_cluster)


def _whole(cluster: Cluster) -> Iterator[Cluster]:
    publish_to(cluster.settings)
    cluster.workers(1, 1)
    yield cluster
    cluster.workers(1, 1)
    cluster.assert_nothing_left()
