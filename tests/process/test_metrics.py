"""The counters against what real processes did: two router processes, three workers, one of them killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import parser

from tests.process.cluster import Cluster, Process, config, eventually, free_port, running

DOCKER = Path(__file__).resolve().parents[2] / "docker"
GENERATIONS = "/v1/images/generations"
#: What other processes on the machine move, and what each scrape moves itself.
MOVED = ("omniqueue_http", "omniqueue_shm", "omniqueue_payload_resident")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running(config({"payload_bytes": 4096}, {"raise_on": "RAISE", "steps": 4}, max_queue=500)) as made:
        made.port = free_port()
        made.spawn("router", [sys.executable, "-m", "web.server", "--bind", f"127.0.0.1:{made.port}", "--workers", "2"])
        made.workers(1, 2)
        eventually(lambda: answers(made))
        yield made


def answers(cluster: Cluster) -> bool:
    try:
        return cluster.http("GET", "/ready")[0] == 200
    except OSError:
        return False


def scrape(cluster: Cluster) -> Samples:
    status, text = cluster.http("GET", "/metrics")
    assert status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def total(told: Samples, name: str, **labels: str) -> float:
    return sum(v for (n, has), v in told.items() if n == name and labels.items() <= dict(has).items())


def ask(cluster: Cluster, *prompts: str) -> Counter[int]:
    """Pictures of these prompts, eight at a time: how many answers had which status."""
    statuses: Counter[int] = Counter()
    left = list(prompts)

    def client() -> None:
        with contextlib.suppress(IndexError):
            while True:
                body = json.dumps({"prompt": left.pop(), "size": "64x64"}).encode()
                statuses[cluster.http("POST", GENERATIONS, body)[0]] += 1

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not left
    return statuses


def records(cluster: Cluster) -> list[Any]:
    return cluster.store.jobs(cluster.pipe.name, 10_000)


def steady(told: Samples) -> Samples:
    """Without the requests, of which each scrape is one, and without what the clock or other processes move."""
    return {
        key: value
        for key, value in told.items()
        if not key[0].startswith(("omniqueue_http", "omniqueue_shm", "python"))
    }


def test_the_counters_are_exactly_what_the_load_did_also_after_a_kill(cluster: Cluster) -> None:
    statuses = ask(cluster, *[f"apple {k}" for k in range(30)], *["RAISE"] * 3, "")
    assert statuses == {200: 30, 500: 3, 400: 1}
    cancelled = [cluster.submit(f"cancelled {k}") for k in range(4)]
    for job_id in cancelled:
        cluster.store.cancel(job_id)
    cluster.all_ended(cancelled)
    check(cluster, statuses)

    # A worker dies in the middle of a load.
    stage1 = [process for process in cluster.processes if process.name == "stage1"]
    more: list[Counter[int]] = []
    load = threading.Thread(target=lambda: more.append(ask(cluster, *[f"pear {k}" for k in range(60)])))
    load.start()
    eventually(lambda: stopped_with_work(cluster, stage1[0]), every_s=0.01)
    stage1[0].kill()
    load.join(90)
    assert more[0] == {200: 60}
    check(cluster, statuses + more[0])
    assert total(scrape(cluster), "omniqueue_failures_total", reason="worker_lost") > 0


def stopped_with_work(cluster: Cluster, worker: Process) -> bool:
    """Stop a worker in its tracks; True, and it stays so, when the records say that it holds something."""
    worker.signal(signal.SIGSTOP)
    for record in records(cluster):
        stage = record.stages[1]
        if stage.state == "running" and f".{worker.pid}." in str(stage.worker):
            return True
    worker.signal(signal.SIGCONT)
    return False


def check(cluster: Cluster, statuses: Counter[int]) -> None:
    """Every counter against the job records, which say what each job's stages went through."""
    eventually(lambda: total(scrape(cluster), "omniqueue_jobs_live") == 0)
    told, jobs = scrape(cluster), records(cluster)
    assert total(told, "omniqueue_jobs_accepted_total") == len(jobs)
    states = Counter(record.state.value for record in jobs)
    for state in ("succeeded", "failed", "cancelled", "expired"):
        assert total(told, "omniqueue_jobs_total", state=state) == states[state]
    for k in (0, 1):
        stage = {"stage": str(k)}
        done = sum(record.stages[k].state == "done" for record in jobs)
        attempts = sum(record.stages[k].attempt for record in jobs)
        failures = sum(record.stages[k].failures for record in jobs)
        assert total(told, "omniqueue_attempts_total", outcome="done", **stage) == done
        assert total(told, "omniqueue_attempts_total", **stage) == attempts
        assert total(told, "omniqueue_attempts_total", outcome="failed", **stage) == failures
        assert total(told, "omniqueue_failures_total", **stage) == failures
        assert total(told, "omniqueue_request_queue_time_seconds_count", **stage) == attempts
        assert total(told, "omniqueue_request_inference_time_seconds_count", **stage) == done
        run_s = sum(r.stages[k].ended_at - r.stages[k].started_at for r in jobs if r.stages[k].state == "done")
        assert total(told, "omniqueue_request_inference_time_seconds_sum", **stage) == pytest.approx(run_s, abs=0.01)
        assert total(told, "omniqueue_num_requests_waiting", **stage) == 0
        assert total(told, "omniqueue_num_requests_running", **stage) == 0
    written = sum(record.stages[0].reference["nbytes"] for record in jobs if record.stages[0].reference)
    assert total(told, "omniqueue_payload_written_bytes_total") == written > 0
    assert total(told, "omniqueue_images_total") == states["succeeded"]

    def told_requests() -> bool:
        """Within a second the other router process has told its own."""
        now = scrape(cluster)
        route = {"route": GENERATIONS, "method": "POST"}
        counted = {s: total(now, "omniqueue_http_requests_total", status=str(s), **route) for s in (200, 400, 500)}
        return counted == {s: statuses[s] for s in (200, 400, 500)}

    eventually(told_requests, 5.0)

    def alike() -> bool:
        """Whichever process answers, once both have told what they had not told yet."""
        seen = [steady(scrape(cluster)) for _ in range(8)]
        return all(one == seen[0] for one in seen[1:])

    eventually(alike, 10.0)


# -- Prometheus itself -------------------------------------------------------------------------------------------------


def dashboard_queries() -> list[tuple[str, str]]:
    board = json.loads((DOCKER / "grafana/dashboards/omniqueue.json").read_text())
    found = [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel["targets"]]
    assert len(found) > 15
    return [(title, expr.replace("$__rate_interval", "10s").replace("$pipeline", ".*")) for title, expr in found]


def alert_queries() -> list[tuple[str, str]]:
    rules = yaml.safe_load((DOCKER / "alerts.yml").read_text())["groups"][0]["rules"]
    return [(rule["alert"], rule["expr"]) for rule in rules]


@contextlib.contextmanager
def prometheus(cluster: Cluster, binary: str) -> Iterator[int]:
    """Prometheus with the shipped configuration, but for the address, the interval and the key."""
    wanted = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    wanted["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    wanted["rule_files"] = [str(DOCKER / "alerts.yml")]
    (job,) = wanted["scrape_configs"]
    del job["authorization"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{cluster.port}"]}]
    path = cluster.folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(wanted))
    port = free_port()
    process = cluster.spawn(
        "prometheus",
        [
            binary,
            f"--config.file={path}",
            f"--storage.tsdb.path={cluster.folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
    )
    try:
        eventually(lambda: query(port, process, 'up{job="omniqueue"} == 1'))
        yield port
    finally:
        process.terminate()


def query(port: int, process: Process, expr: str) -> list[Any]:
    assert process.alive(), process.text()[-2000:]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/api/v1/query?" + urllib.parse.urlencode({"query": expr}))
        response = connection.getresponse()
        text = response.read()
        if response.status == 503:  # it is still starting
            return []
        answer = json.loads(text)
    except OSError:
        return []
    finally:
        connection.close()
    assert answer["status"] == "success", (expr, answer)
    found: list[Any] = answer["data"]["result"]
    return found


def test_the_queries_of_the_dashboard_return_data_after_a_load(cluster: Cluster) -> None:
    cluster.workers(1, 2)
    binary = shutil.which("prometheus")
    if binary is None:  # the metrics that the queries name are there, at least
        told = {name for name, _ in scrape(cluster)}
        for title, expr in dashboard_queries() + alert_queries():
            assert set(re.findall(r"omniqueue_\w+", expr)) <= told, title
        return
    with prometheus(cluster, binary) as port:
        process = cluster.processes[-1]
        for _ in range(4):
            ask(cluster, *[f"plum {k}" for k in range(10)], "RAISE")
        left = dict(dashboard_queries())

        def all_told() -> bool:
            for title, expr in list(left.items()):
                values = [float(one["value"][1]) for one in query(port, process, expr)]
                if any(value == value for value in values):  # a route that is not asked has no quantile
                    del left[title]
            return not left

        try:
            eventually(all_told, 20.0, 0.5)
        except AssertionError:
            raise AssertionError(f"no data for {list(left)}") from None
        for name, expr in alert_queries():  # valid where it is used, and silent when all is well
            assert query(port, process, expr) == [] or name == "OmniqueueAttemptsFail", name


#: An hour in which everything happens that there is an alert for, for promtool.
ALERTS = """
rule_files: [{rules}]
evaluation_interval: 30s
tests:
  - interval: 30s
    input_series:
      - series: 'up{{job="omniqueue", instance="r:8000"}}'
        values: '1x9 0x60'
      - series: 'omniqueue_redis_up'
        values: '1x9 0x60'
      - series: 'omniqueue_replicas{{pipeline="p", stage="1", stage_name="dit", phase="ready"}}'
        values: '2x9 0x60'
      - series: 'omniqueue_oldest_waiting_seconds{{pipeline="p", stage="1", stage_name="dit"}}'
        values: '0x9 90x60'
      - series: 'omniqueue_num_requests_waiting{{pipeline="p", stage="1", stage_name="dit"}}'
        values: '3x60'
      - series: 'omniqueue_num_requests_running{{pipeline="p", stage="1", stage_name="dit"}}'
        values: '0x60'
      - series: 'omniqueue_attempts_total{{pipeline="p", stage="1", stage_name="dit", outcome="done"}}'
        values: '0+10x10 100x50'
      - series: 'omniqueue_failures_total{{pipeline="p", stage="1", stage_name="dit", reason="engine_error"}}'
        values: '0+5x60'
      - series: 'omniqueue_shm_free_bytes{{host="h", folder="/dev/shm"}}'
        values: '50x9 5x60'
      - series: 'omniqueue_shm_size_bytes{{host="h", folder="/dev/shm"}}'
        values: '100x60'
      - series: 'omniqueue_jobs_live{{pipeline="p"}}'
        values: '1x9 99x60'
      - series: 'omniqueue_jobs_limit{{pipeline="p"}}'
        values: '100x60'
    alert_rule_test:
"""


def test_each_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    names = [name for name, _ in alert_queries()]
    assert len(names) == len(set(names)) >= 8
    page = (DOCKER.parent / "docs/operations.md").read_text()
    assert [name for name in names if name not in page] == []
    promtool = shutil.which("promtool")
    if promtool is None:  # each names a metric of ours, a severity and a sentence; the test above ran the queries
        for rule in yaml.safe_load((DOCKER / "alerts.yml").read_text())["groups"][0]["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"]["summary"].strip().endswith((".", "left."))
        return
    assert subprocess.run([promtool, "check", "rules", str(DOCKER / "alerts.yml")], timeout=30).returncode == 0
    for name in names:
        for at, fires in (("4m", False), ("24m", True)):
            told = subprocess.run(
                [promtool, "test", "rules", str(_rules_test(tmp_path, name, at))],
                capture_output=True, text=True, timeout=30, check=False,
            )  # fmt: skip
            # promtool tells what it got instead of nothing, so a failure of this test is the alert.
            assert (told.returncode != 0) == fires, (name, at, told.stdout, told.stderr)


def _rules_test(folder: Path, name: str, at: str) -> Path:
    path = folder / f"{name}-{at}.yml"
    rules = ALERTS.format(rules=DOCKER / "alerts.yml")
    path.write_text(f"{rules}      - {{eval_time: {at}, alertname: {name}, exp_alerts: []}}\n")
    return path
