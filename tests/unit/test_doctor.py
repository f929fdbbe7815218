"""Broken set-ups, one by one: each is named in a sentence with its remedy, by doctor or validate."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omniqueue import (
    catalog,
    celery_app,
    cli,
    doctor,
    doctor_host,
    doctor_redis,
    doctor_workers,
    embedded,
    errors,
    payloads,
    redis_facts,
    room,
    settings,
    store,
)
from omniqueue.engines import environment
from omniqueue.finding import Finding
from tests.unit import support
from tests.web.support import announce

FAKE = "fake_image.yaml"
ROOT = Path(__file__).resolve().parents[2]
TMPFS_BYTES = 1 << 20


@dataclasses.dataclass
class Bench:
    """A deployment on which everything is well, until a test breaks something."""

    monkeypatch: pytest.MonkeyPatch
    server: embedded.EmbeddedValkey
    folder: Path
    shm: Path

    def set(self, **environ: str) -> None:
        for name, value in environ.items():
            self.monkeypatch.setenv(f"OMNIQUEUE_{name}", value)

    @property
    def records(self) -> store.Store:
        return store.Store(store.connect(self.server.url, 5.0))

    def payloads(self) -> payloads.PayloadStore:
        config = settings.load()
        return payloads.PayloadStore(config.payload_namespace(), config.shm_dir, config.host)

    def workers(self, *stages: int, **changes: Any) -> None:
        pipe = catalog.load(settings.load()).pipelines[0]
        shared = self.payloads()
        for stage_id in stages:
            named = {"worker": f"{pipe.stage(stage_id).queue}@{changes.get('host', shared.host)}.{stage_id}"}
            facts = {"host": shared.host, "shm": room.facts(shared), "told_at": time.time(), **named, **changes}
            announce(self.records, pipe, stage_id, **facts)
        self.records.declare(pipe)

    def configure(self, *arguments: str) -> None:
        client = self.records.client
        client.config_set(*arguments)

    def stage_config(self, text: str) -> None:
        path = self.folder / "mine.yaml"
        path.write_text(text)
        self.set(STAGE_CONFIGS_PATH=str(path))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[embedded.EmbeddedValkey]:
    made = embedded.EmbeddedValkey(tmp_path_factory.mktemp("v"))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def bench(
    server: embedded.EmbeddedValkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shm: payloads.PayloadStore
) -> Iterator[Bench]:
    for name in [name for name in os.environ if name.startswith("OMNIQUEUE_")]:
        monkeypatch.delenv(name)
    made = Bench(monkeypatch, server, tmp_path, shm.directory)
    made.set(
        REDIS_URL=server.url,
        STAGE_CONFIGS_PATH=FAKE,
        SHM_DIR=str(shm.directory),
        MEDIA_FS_URL=f"file://{tmp_path}/media",
    )
    yield made
    celery_app.app.conf.worker_prefetch_multiplier = 1
    client = made.records.client
    client.flushall()
    for name, value in (("maxmemory", "0"), ("maxmemory-policy", "noeviction"), ("appendonly", "yes")):
        client.config_set(name, value)


def small_folder(bench: Bench, name: str) -> Path:
    """A file system of 1 MB, or a folder whose file system says that it is one where none can be mounted."""
    folder = bench.folder / name
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "oq-test", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        real = os.statvfs

        def statvfs(path: Any) -> os.statvfs_result:
            facts = list(real(path))
            if Path(path).is_relative_to(folder):
                facts[2] = facts[3] = facts[4] = TMPFS_BYTES // facts[1]
            return os.statvfs_result(facts)

        bench.monkeypatch.setattr(os, "statvfs", statvfs)
    return folder


def unmount(folder: Path) -> None:
    subprocess.run(["umount", str(folder)], capture_output=True, check=False)


def test_nothing_is_wrong_with_what_is_well(bench: Bench) -> None:
    bench.workers(0, 1)
    findings = list(doctor.examine())
    assert {finding.level for finding in findings} == {"ok"}, doctor.as_text(findings)
    looked_at = {finding.what for finding in findings}
    assert looked_at == {
        "config", "access", "redis", "login", "disk", "eviction", "clock", "celery", "shm", "media", "versions",
        "devices", "leftovers", "workers", "sharing", "router",
    }  # fmt: skip
    assert doctor.as_text(findings).endswith("All is well.")


# -- the table ---------------------------------------------------------------------------------------------------------


def redis_away(bench: Bench) -> None:
    bench.set(REDIS_URL=f"unix://{bench.folder}/none.sock")


def eviction_on(bench: Bench) -> None:
    bench.workers(0, 1)
    bench.configure("maxmemory", "100mb")
    bench.configure("maxmemory-policy", "allkeys-lru")


def persistence_off(bench: Bench) -> None:
    bench.configure("appendonly", "no")


def small_shm(bench: Bench) -> None:
    bench.set(SHM_DIR=str(small_folder(bench, "shm")))


def no_shm(bench: Bench) -> None:
    bench.set(SHM_DIR=str(bench.folder / "nowhere"))


def separate_shm(bench: Bench) -> None:
    bench.workers(0)
    other = bench.folder / "other"
    other.mkdir()
    bench.workers(1, shm=room.facts(payloads.PayloadStore("x", str(other))))


def another_host_name(bench: Bench) -> None:
    bench.workers(0, host="a")
    bench.workers(1, host="b")


def wrong_vllm(bench: Bench) -> None:
    bench.set(STAGE_CONFIGS_PATH="glm_image_tiny.yaml")
    bench.monkeypatch.setattr(environment, "version_of", lambda *names: "0.9.1" if "vllm" in names else "0.30.0")


def missing_stage(bench: Bench) -> None:
    bench.workers(0)


def refused_worker(bench: Bench) -> None:
    bench.workers(0)
    bench.workers(1, phase="refused", detail="No model is set")


def wrong_topology(bench: Bench) -> None:
    bench.workers(0)
    bench.workers(1, fingerprint="0123456789ab")


def duplicate_device(bench: Bench) -> None:
    bench.stage_config('pipeline: mine\nstages:\n  - {stage_id: 0, engine: fake, devices: "0,0"}\n')


def too_few_gpus(bench: Bench) -> None:
    bench.set(STAGE_CONFIGS_PATH="glm_image.yaml", PLATFORM="cuda")
    bench.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,8")


def bad_yaml(bench: Bench) -> None:
    bench.stage_config("pipeline: [mine\n")


def unknown_key(bench: Bench) -> None:
    bench.stage_config("pipeline: mine\nstages:\n  - {stage_id: 0, engine: fake, max_num_seq: 2}\n")


def bad_variable(bench: Bench) -> None:
    bench.set(DRAIN_GRACE_S="soon")


def dead_workers_leftovers(bench: Bench) -> None:
    shared = bench.payloads()
    shared.put(shared.name("0" * 32, 0, 1), [])
    bench.monkeypatch.setattr(doctor_host, "_LEFT_S", 0.0)


def full_media_disk(bench: Bench) -> None:
    folder = small_folder(bench, "media")
    with contextlib.suppress(OSError):
        (folder / "full").write_bytes(bytes(2 * TMPFS_BYTES))
    bench.set(MEDIA_FS_URL=f"file://{folder}")
    if not os.path.ismount(folder):
        bench.monkeypatch.setattr("omniqueue.media.MediaStore.write", support.raising(no_room()))


def no_room() -> Exception:
    return errors.NoRoom("Could not store x: No space left on device.")


def media_nowhere(bench: Bench) -> None:
    (bench.folder / "file").write_text("")
    bench.set(MEDIA_FS_URL=f"file://{bench.folder}/file/media")


def worker_clock(bench: Bench) -> None:
    bench.workers(0)
    bench.workers(1, told_at=time.time() - 3600)


def own_clock(bench: Bench) -> None:
    real = time.time
    bench.monkeypatch.setattr("omniqueue.redis_facts.time.time", lambda: real() + 90)


def open_redis(bench: Bench) -> None:
    bench.set(REDIS_URL="redis://192.0.2.1:6379/0", REDIS_TIMEOUT_S="0.2")
    facts = redis_facts.read(bench.server.url, 5.0)
    bench.monkeypatch.setattr(redis_facts, "read", lambda *_: facts)


def old_redis(bench: Bench) -> None:
    facts = redis_facts.read(bench.server.url, 5.0)
    old = dataclasses.replace(facts, product="Redis", version="6.2.14")
    bench.monkeypatch.setattr(redis_facts, "read", lambda *_: old)


def disk_of_redis_full(bench: Bench) -> None:
    facts = redis_facts.read(bench.server.url, 5.0)
    bench.monkeypatch.setattr(redis_facts, "read", lambda *_: dataclasses.replace(facts, write_failed=True))


def nearly_full_redis(bench: Bench) -> None:
    bench.configure("maxmemory", str(int(redis_facts.read(bench.server.url, 5.0).used_memory * 1.02)))


def celery_changed(bench: Bench) -> None:
    celery_app.app.conf.worker_prefetch_multiplier = 4


def broker_away(bench: Bench) -> None:
    bench.set(BROKER_URL="amqp://127.0.0.1:1//")


def unreadable_keys(bench: Bench) -> None:
    bench.set(API_KEYS_FILE=str(bench.folder / "none"))


CASES: dict[Callable[[Bench], None], tuple[str, str, tuple[str, ...]]] = {
    redis_away: ("redis", "error", ("does not answer", "OMNIQUEUE_REDIS_URL")),
    old_redis: ("redis", "error", ("6.2.14", "BLMPOP", "Use Redis 7")),
    eviction_on: ("eviction", "error", ("allkeys-lru", "Set maxmemory-policy noeviction")),
    nearly_full_redis: ("eviction", "warning", ("98% of its maxmemory", "Raise maxmemory")),
    persistence_off: ("disk", "warning", ("forgets every job", "Set appendonly yes")),
    disk_of_redis_full: ("disk", "error", ("could not write", "Make room")),
    open_redis: ("login", "warning", ("without a password", "requirepass")),
    small_shm: ("shm", "error", (" 1 MiB", "shm_size")),
    no_shm: ("shm", "error", ("is not a folder", "OMNIQUEUE_SHM_DIR")),
    separate_shm: ("sharing", "error", ("do not share", "one tmpfs")),
    another_host_name: ("sharing", "error", ("call their host a and b", "OMNIQUEUE_HOST")),
    wrong_vllm: ("versions", "error", ("vllm 0.9.1", "Install 0.30.x")),
    missing_stage: ("workers", "error", ("stage 1 (dit) has no worker", "celery -A omniqueue worker -Q stage1")),
    refused_worker: ("workers", "error", ("is refused (No model is set)", "log")),
    wrong_topology: ("workers", "error", ("another topology (0123456789ab", "stage config that the router has")),
    duplicate_device: ("config", "error", ("names one device twice", "validate")),
    too_few_gpus: ("devices", "error", ("device 0 and 1", "CUDA_VISIBLE_DEVICES=7,8", "Change devices")),
    bad_yaml: ("config", "error", ("mine.yaml:", "validate")),
    unknown_key: ("config", "error", ("stages[0].max_num_seq", "max_num_seqs")),
    bad_variable: ("settings", "error", ("OMNIQUEUE_DRAIN_GRACE_S='soon'", "Correct it")),
    unreadable_keys: ("access", "error", ("OMNIQUEUE_API_KEYS_FILE", "readable file")),
    dead_workers_leftovers: ("leftovers", "warning", ("1 payload of jobs that are over", "Start a worker")),
    full_media_disk: ("media", "error", ("No space left", "Make room")),
    media_nowhere: ("media", "error", ("Could not store", "OMNIQUEUE_MEDIA_FS_URL")),
    worker_clock: ("clock", "warning", ("about 3600 s behind", "NTP")),
    own_clock: ("clock", "warning", ("differs from this host's by 90 s", "NTP")),
    celery_changed: ("celery", "error", ("worker_prefetch_multiplier is 4, not 1", "as they ship")),
    broker_away: ("broker", "error", ("does not answer", "OMNIQUEUE_BROKER_URL")),
}


@pytest.mark.parametrize("broken", CASES, ids=lambda case: case.__name__)
def test_a_broken_setup_is_named_in_one_sentence_with_its_remedy(
    broken: Callable[[Bench], None], bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    what, level, words = CASES[broken]
    try:
        broken(bench)
        assert cli.main(["doctor", "--json"]) == int(level == "error")
    finally:
        for name in ("shm", "media"):
            unmount(bench.folder / name)
    findings = [Finding(**entry) for entry in json.loads(capsys.readouterr().out)]
    (told,) = [finding for finding in findings if finding.what == what and finding.level != "ok"]
    assert told.level == level
    assert told.text.strip()
    assert told.remedy.strip()
    assert all(word in str(told) for word in words), str(told)
    # Nothing else is called broken because of it.
    others = [str(f) for f in findings if f.level == "error" and f.what != what]
    assert others == []


def test_no_key_on_a_public_address_is_a_warning(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--host", "0.0.0.0"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " access " in line]
    assert line.startswith("warning")
    assert "OMNIQUEUE_API_KEYS" in line
    bench.set(API_KEYS="sesame")
    assert cli.main(["doctor", "--host", "0.0.0.0"]) == 0
    out = capsys.readouterr().out
    assert "asks for an API key" in out
    assert "sesame" not in out


def test_a_wrong_password_is_told_from_an_absent_server(bench: Bench) -> None:
    client = bench.records.client
    client.config_set("requirepass", "sesame")
    try:
        (told,) = doctor_redis.examine(settings.load())
    finally:
        opened = store.connect(bench.server.url.replace("unix://", "unix://:sesame@"), 5.0)
        opened.config_set("requirepass", "")
    assert told.level == "error"
    assert "another login" in told.text
    assert "sesame" not in str(told)


def test_before_anything_is_started_the_absence_of_workers_is_no_error(bench: Bench) -> None:
    pipe = catalog.load(settings.load()).pipelines[0]
    assert {finding.level for finding in doctor_workers.stages((pipe,), [])} == {"warning"}


def test_the_doctor_imports_no_model_library(bench: Bench) -> None:
    program = (
        "import sys\nfrom omniqueue import cli\nstatus = cli.main(['doctor', 'glm_image_tiny.yaml'])\n"
        "print([n for n in ('torch', 'vllm', 'vllm_omni', 'transformers') if n in sys.modules], status)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=60)
    assert done.stdout.splitlines()[-1] == "[] 0", done.stdout + done.stderr
