"""omniqueue autoscale with real workers: from none to several and back, and what it does when one dies."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from omniqueue import cli
from tests.process.cluster import Cluster, Process, config, eventually, running

QUICK = ("--target-wait", "2", "--cooldown", "1", "--window", "5")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running(config({"max_num_seqs": 8}, {"delay_s": 0.6, "max_num_seqs": 1}, max_queue=500)) as made:
        made.worker(0)
        yield made


def autoscale(cluster: Cluster, *options: str) -> Process:
    return cluster.spawn("autoscale", [sys.executable, "-m", "omniqueue.cli", "autoscale", *options])


def replicas(cluster: Cluster) -> list[int]:
    return [w["pid"] for w in cluster.store.workers() if w["queue"] == "stage1" and w["phase"] == "ready"]


def test_a_stage_goes_from_none_to_as_many_as_it_may_and_back_to_none(cluster: Cluster) -> None:
    scaler = autoscale(cluster, "--limits", "stage1=0..3", "--devices", "4,5,6", *QUICK)
    jobs = [cluster.submit(f"apple {k}") for k in range(60)]
    eventually(lambda: len(replicas(cluster)) == 3)
    # One that dies is replaced, and its device given to the next.
    mine = {child.pid for child in psutil.Process(scaler.pid).children()}
    os.kill(next(pid for pid in replicas(cluster) if pid in mine), signal.SIGKILL)
    assert {record.state.value for record in cluster.all_ended(jobs, 90.0)} == {"succeeded"}
    assert len({record.stages[1].worker for record in map(cluster.job, jobs)}) >= 3
    eventually(lambda: not replicas(cluster), 40.0)
    text = scaler.text()
    assert "stage1: 0 -> 1 workers" in text
    assert "with status -9" in text
    assert set(re.findall(r"started  \S+ on (\d)", text)) == {"4", "5", "6"}
    assert scaler.alive()
    assert scaler.terminate() == 0


def test_when_it_is_told_to_end_its_workers_drain(cluster: Cluster) -> None:
    scaler = autoscale(cluster, "--limits", "1=1", *QUICK)
    eventually(lambda: len(replicas(cluster)) == 1)
    job_id = cluster.submit("apple")
    cluster.when_stage(job_id, 1, "running")
    assert scaler.terminate() == 0
    assert cluster.ended(job_id).stages[1].attempt == 1
    assert replicas(cluster) == []


def test_a_worker_that_cannot_be_configured_ends_it_with_the_reason(cluster: Cluster, tmp_path: Path) -> None:
    process = cluster.spawn(
        "autoscale",
        [sys.executable, "-m", "omniqueue.cli", "autoscale", "--limits", "1=1", *QUICK],
        OMNIQUEUE_SHM_DIR=str(tmp_path / "none"),
    )
    assert process.wait(30.0) == 1
    assert "is not a folder" in process.text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "--limits"),
        (("--limits", "1"), "STAGE=LOW..HIGH"),
        (("--limits", "1=3..2"), "LOW must be"),
        (("--limits", "1=0..0"), "HIGH from 1"),
        (("--limits", "1=1..2", "--devices", "0,0"), "names one device twice"),
        (("--limits", "1=1..2", "--cooldown", "0"), "--cooldown"),
    ],
)
def test_bad_options_are_status_2(options: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["autoscale", *options])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_a_stage_that_there_is_not_is_status_2(cluster: Cluster) -> None:
    process = autoscale(cluster, "--limits", "7=1..2")
    assert process.wait(30.0) == 2
    assert "there is no stage 7" in process.text()
