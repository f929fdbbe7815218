"""Workers of one stage share out the devices of its pool among themselves."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omniqueue import errors, settings
from tests.unit import support
from workers import device_pool, stage_worker


def other(folder: Path, width: int = 1) -> tuple[subprocess.Popen[str], str]:
    """Another worker, and what it took."""
    program = (
        "import sys, time; from pathlib import Path; from workers import device_pool\n"
        f"print(device_pool.take(('0', '1', '2'), {width}, 'stage1', Path(sys.argv[1])), flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_each_worker_gets_devices_that_no_other_has_until_it_is_gone(tmp_path: Path) -> None:
    first, taken = other(tmp_path)
    second, more = other(tmp_path)
    try:
        assert (taken, more) == ("0", "1")
        with pytest.raises(errors.ConfigError, match=r"needs 2 of the devices 0, 1, 2 .* 1 of them is free"):
            device_pool.take(("0", "1", "2"), 2, "stage1", tmp_path)
        assert device_pool.take(("0",), 1, "stage0", tmp_path) == "0"  # another stage may share a device
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert device_pool.take(("0", "1", "2"), 2, "stage1", tmp_path) == "0,2"
    finally:
        for process in (first, second):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for lock in device_pool._locks:
            lock.close()
        device_pool._locks.clear()


def test_the_pool_is_read_from_the_environment() -> None:
    assert settings.load({"OMNIQUEUE_DEVICE_POOL": "1, 2"}).device_pool == ("1", "2")
    for bad in ("1,1", "one", "1,"):
        with pytest.raises(errors.ConfigError, match="OMNIQUEUE_DEVICE_POOL"):
            settings.load({"OMNIQUEUE_DEVICE_POOL": bad})


@pytest.mark.parametrize(
    ("changes", "visible", "expected"),
    [
        ({"devices": "1"}, None, "gpu1"),
        ({"devices": "0,1"}, None, "gpu0+1"),
        ({"devices": "0"}, "2", "gpu2"),
        ({"devices": None}, None, "gpus"),
        ({"devices": "1", "engine": "fake"}, None, "cpu"),
    ],
)
def test_a_worker_is_named_after_its_device(
    changes: dict[str, Any], visible: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    pipe = support.pipeline(1, platform="cuda")
    stage = support.with_stage(pipe, 0, **{"engine": "vllm_omni", **changes}).stage(0)
    assert stage_worker.device(pipe, stage) == expected
