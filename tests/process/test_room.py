"""A payload store that is full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.cluster import config, running

SIZE_BYTES = 6 << 20

#: Where no file system can be mounted: the same answers for one folder, from inside the worker.
QUOTA = f"""
import errno, os
_statvfs, _fallocate = os.statvfs, os.posix_fallocate
def _free():
    folder = os.environ["OMNIQUEUE_SHM_DIR"]
    return {SIZE_BYTES} - sum(entry.stat().st_size for entry in os.scandir(folder))
def statvfs(path):
    facts = list(_statvfs(path))
    facts[4] = _free() // facts[1]
    return os.statvfs_result(facts)
def posix_fallocate(descriptor, offset, size):
    if size > _free():
        raise OSError(errno.ENOSPC, "No space left on device")
    _fallocate(descriptor, offset, size)
os.statvfs, os.posix_fallocate = statvfs, posix_fallocate
"""


@pytest.fixture
def small_room(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a worker whose payloads have 6 MiB: a tmpfs of its own, or a quota where that is forbidden."""
    folder = tmp_path / "shm"
    folder.mkdir()
    environ = {"OMNIQUEUE_SHM_DIR": str(folder)}
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "oq-test", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
        yield environ
        subprocess.run(["umount", str(folder)], check=True)
        return
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "sitecustomize.py").write_text(QUOTA)
    yield {**environ, "PYTHONPATH": str(tmp_path / "python")}


def test_a_full_payload_store_fails_that_job_with_no_room_and_nothing_else(small_room: dict[str, str]) -> None:
    with running(config({"payload_bytes": 1 << 20}, {}), environ=small_room) as cluster:
        (worker,), _ = cluster.workers(1, 1)
        big = [cluster.submit(f"big {k}", n=8) for k in range(2)]
        small = [cluster.submit(f"small {k}") for k in range(3)]
        for record in cluster.all_ended(big):
            assert record.state.value == "failed"
            assert record.error is not None
            assert record.error["code"] == "no_room"
            assert "docker: shm_size" in record.error["message"]
            assert record.stages[0].attempt == 1
        assert {record.state.value for record in cluster.all_ended(small)} == {"succeeded"}
        assert worker.alive()
        cluster.assert_nothing_left()
