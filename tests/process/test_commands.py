"""What ``celery -A omniqueue worker`` does with each ``-Q``."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.process.cluster import Cluster, config, eventually, running

WORKER = [sys.executable, "-m", "celery", "-A", "omniqueue", "worker", "--loglevel", "WARNING"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "Say which stage to run: -Q QUEUE, where QUEUE is one of stage0, stage1"),
        (["-Q", "stage7"], "No stage has the queue 'stage7'; use -Q with one of stage0, stage1"),
        (["-Q", "stage0,stage1"], "One worker runs one stage: give one queue to -Q, not stage0,stage1"),
    ],
)
def test_a_worker_without_exactly_one_known_queue_exits_with_2_and_says_what_to_do(
    quick: Cluster, options: list[str], says: str
) -> None:
    ended = subprocess.run([*WORKER, *options], env=quick.env, cwd=quick.folder, capture_output=True, timeout=30)
    assert ended.returncode == 2
    assert says in ended.stderr.decode()
    assert "Traceback" not in ended.stderr.decode()


def test_a_worker_without_a_stage_config_exits_with_2_and_names_the_variable(tmp_path: Path) -> None:
    ended = subprocess.run([*WORKER, "-Q", "stage0"], cwd=tmp_path, capture_output=True, timeout=30)
    assert ended.returncode == 2
    assert "OMNIQUEUE_STAGE_CONFIGS_PATH is not set" in ended.stderr.decode()


def test_a_worker_of_another_topology_than_the_routers_exits_with_2_and_says_so(web: Cluster, tmp_path: Path) -> None:
    other = tmp_path / "three.yaml"
    other.write_text(yaml.safe_dump(config({}, {}, {})))
    environ = {**web.env, "OMNIQUEUE_STAGE_CONFIGS_PATH": str(other)}
    eventually(lambda: web.store.declared(web.pipe))
    ended = subprocess.run([*WORKER, "-Q", "stage0"], env=environ, cwd=tmp_path, capture_output=True, timeout=60)
    assert ended.returncode == 2
    assert f"{other}: the router serves another topology of chaos" in ended.stderr.decode()
    assert "Traceback" not in ended.stderr.decode()
    assert {facts["fingerprint"] for facts in web.store.workers()} == {web.pipe.fingerprint}


def test_the_documented_command_is_a_complete_worker_from_any_folder(quick: Cluster, tmp_path: Path) -> None:
    # Only -Q and three variables: pool and concurrency come from the stage config.
    quick.workers(0, 1)
    worker = quick.spawn(
        "stage0", [sys.executable, "-m", "celery", "-A", "omniqueue", "worker", "-Q", "stage0"], tmp_path
    )
    quick.wait_ready(worker)
    assert quick.facts(worker)["concurrency"] == 4
    assert "concurrency: 4 (thread)" in worker.text()
    assert psutil.Process(worker.pid).children() == []
    job = quick.ended(quick.submit("from any folder"))
    assert job.state.value == "succeeded"
    assert f".{worker.pid}." in (job.stages[0].worker or "")


def test_sigterm_while_the_engine_loads_exits_promptly_with_0() -> None:
    with running(config({"load_delay_s": 60})) as cluster:
        worker = cluster.worker(0, ready=False)
        eventually(lambda: cluster.facts(worker).get("phase") == "loading")
        start = time.monotonic()
        assert worker.terminate() == 0, worker.text()
        assert time.monotonic() - start < 15
        assert cluster.store.workers() == []


def test_an_engine_that_does_not_load_in_time_ends_its_process_with_the_phase_in_the_log() -> None:
    with running(config({"load_delay_s": 60}, init_timeout_s=2)) as cluster:
        worker = cluster.worker(0, ready=False)
        assert worker.wait() == 70
        assert "action=load_timeout" in worker.text()
        assert "phase=loading the fake engine" in worker.text()
