"""/metrics: the format, the names, the numbers, and what it says while Redis is away."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser

from omniqueue import errors, store
from tests.web import support
from tests.web.support import Router
from web import traffic

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(router: Router) -> str:
    response = router.client.get("/metrics")
    assert response.status_code == 200
    assert response.content_type.startswith("text/plain")
    text: str = response.get_data(as_text=True)
    return text


def samples(text: str) -> Samples:
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} is told twice"
            found[key] = sample.value
    return found


def value(told: Samples, name: str, **labels: str) -> float:
    """The only sample of that name that has these labels."""
    (one,) = [v for (n, has), v in told.items() if n == name and labels.items() <= dict(has).items()]
    return one


def complaints(text: str) -> list[str]:
    """What Prometheus's naming conventions say about it; promtool says it where there is one."""
    found = []
    for family in parser.text_string_to_metric_families(text):
        name = family.name
        if not re.fullmatch(r"omniqueue_[a-z][a-z0-9_]*", name):
            found.append(f"{name}: not our prefix in snake case")
        if not family.documentation:
            found.append(f"{name}: no help")
        if re.search(r"_(milliseconds|minutes|ms|kb|mb|kib|mib|percent)(_|$)", name):
            found.append(f"{name}: not a base unit")
        if family.type == "counter" and any(not s.name.endswith(("_total", "_created")) for s in family.samples):
            found.append(f"{name}: a counter whose samples do not end in _total")
        if family.type != "counter" and name.endswith("_total"):
            found.append(f"{name}: _total without being a counter")
        if family.type == "untyped":
            found.append(f"{name}: no type")
        for sample in family.samples:
            if re.search(r"[^a-z_]", "".join(sample.labels)):
                found.append(f"{name}: label names {sorted(sample.labels)}")
    if promtool := shutil.which("promtool"):
        done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=30)
        found += (done.stdout + done.stderr).splitlines()
    return found


def load(router: Router) -> None:
    for _ in range(3):
        assert router.post().status_code == 200
    assert router.post(json={"prompt": ""}).status_code == 400
    support.announce(router.store, router.pipe, 0, shm={"folder": "/dev/shm", "size": 100, "free": 40, "resident": 7})


def test_names_types_and_help_follow_the_conventions(router: Router) -> None:
    load(router)
    text = scrape(router)
    assert complaints(text) == []
    assert "# TYPE omniqueue_jobs_total counter" in text
    assert "# TYPE omniqueue_request_queue_time_seconds histogram" in text


def test_the_check_of_the_conventions_can_fail() -> None:
    bad = "# TYPE requests counter\nrequests 1\n# HELP omniqueue_ms Time.\n# TYPE omniqueue_ms gauge\nomniqueue_ms 1\n"
    told = "\n".join(complaints(bad))
    assert "requests" in told
    assert "not a base unit" in told


def test_the_open_metrics_format_is_given_to_those_who_ask(router: Router) -> None:
    load(router)
    response = router.client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert response.content_type.startswith("application/openmetrics-text")
    families = list(openmetrics_parser.text_string_to_metric_families(response.get_data(as_text=True)))  # type: ignore[no-untyped-call]
    assert {"omniqueue_jobs", "omniqueue_request_inference_time_seconds"} <= {family.name for family in families}


def test_the_numbers_are_those_of_the_load(router: Router) -> None:
    load(router)
    told = samples(scrape(router))
    pipe = router.pipe.name
    assert value(told, "omniqueue_redis_up") == 1
    assert value(told, "omniqueue_jobs_accepted_total", pipeline=pipe) == 3
    assert value(told, "omniqueue_jobs_total", pipeline=pipe, state="succeeded") == 3
    assert value(told, "omniqueue_jobs_total", pipeline=pipe, state="failed") == 0
    assert value(told, "omniqueue_jobs_live", pipeline=pipe) == 0
    assert value(told, "omniqueue_jobs_limit", pipeline=pipe) == router.pipe.max_queue
    for stage in ("0", "1"):
        assert value(told, "omniqueue_attempts_total", stage=stage, outcome="done") == 3
        for kind in ("queue", "inference"):
            name = f"omniqueue_request_{kind}_time_seconds"
            assert value(told, f"{name}_count", stage=stage) == 3
            assert value(told, f"{name}_bucket", stage=stage, le="+Inf") == 3
            assert 0 < value(told, f"{name}_sum", stage=stage) < 30
    assert value(told, "omniqueue_replicas", stage="0", phase="ready") == 1
    assert value(told, "omniqueue_replicas", stage="1", phase="ready") == 0
    assert value(told, "omniqueue_slots", stage="0") == 4
    assert value(told, "omniqueue_shm_free_bytes", host="host", folder="/dev/shm") == 40
    assert value(told, "omniqueue_payload_resident_bytes", host="host") == 7
    generations = {"method": "POST", "route": support.GENERATIONS}
    assert value(told, "omniqueue_http_requests_total", status="200", **generations) == 3
    assert value(told, "omniqueue_http_requests_total", status="400", **generations) == 1
    assert value(told, "omniqueue_http_request_duration_seconds_count", **generations) == 4


def test_what_waits_and_runs_is_told(idle_router: Router) -> None:
    for _ in range(3):
        idle_router.post("/v1/jobs")
    with support.Workers(idle_router, support.holding):
        for _ in range(200):
            told = samples(scrape(idle_router))
            if value(told, "omniqueue_num_requests_running", stage="0") == 3:
                break
    assert value(told, "omniqueue_num_requests_waiting", stage="0") == 0
    assert value(told, "omniqueue_num_requests_running", stage="1") == 0
    assert value(told, "omniqueue_jobs_live") == 3
    idle_router.post("/v1/jobs")
    told = samples(scrape(idle_router))
    assert value(told, "omniqueue_num_requests_waiting", stage="0") == 1
    assert value(told, "omniqueue_oldest_waiting_seconds", stage="0") > 0


def test_failures_are_told_by_reason(idle_router: Router) -> None:
    with support.Workers(idle_router, support.failing("no_room", "No room.")):
        assert idle_router.post().status_code == 507
    told = samples(scrape(idle_router))
    assert value(told, "omniqueue_failures_total", stage="0", reason="no_room") == 1
    assert value(told, "omniqueue_attempts_total", stage="0", outcome="failed") == 1
    assert value(told, "omniqueue_jobs_total", state="failed") == 1


def test_a_scrape_without_redis_says_so_and_nothing_that_was_counted_is_lost(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(router)
    with monkeypatch.context() as away:
        away.setattr(store.Store, "traffic", raising)
        text = scrape(router)
        assert value(samples(text), "omniqueue_redis_up") == 0
        assert "omniqueue_jobs" not in text
        assert complaints(text) == []
    told = samples(scrape(router))
    assert value(told, "omniqueue_http_requests_total", route=support.GENERATIONS, status="200") == 3
    assert value(told, "omniqueue_http_requests_total", route="/metrics", status="200") == 1


def raising(*_: Any) -> None:
    raise errors.BrokerUnavailable()


def test_what_a_client_makes_up_becomes_no_series_of_its_own(router: Router) -> None:
    for path in ("/nowhere/1", "/nowhere/2"):
        assert router.client.get(path).status_code == 404
    assert router.client.open("/health", method="BREW").status_code == 405
    told = samples(scrape(router))
    assert value(told, "omniqueue_http_requests_total", route="other", method="GET", status="404") == 2
    assert value(told, "omniqueue_http_requests_total", method="other", status="405") == 1


def test_with_api_keys_a_scraper_needs_one(valkey: str, tmp_path: Path) -> None:
    with support.running(valkey, tmp_path, support.pipeline(), api_keys=("sesame",)) as router:
        assert router.client.get("/metrics").status_code == 401
        assert router.client.get("/metrics", headers={"Authorization": "Bearer sesame"}).status_code == 200


def test_counts_reach_redis_without_a_scrape_and_at_the_end(valkey: str) -> None:
    records = store.Store(store.connect(valkey, 5.0), f"t{store.new_id()[:8]}")
    counter = traffic.Traffic()
    counter.start(records)
    counter.count("GET", "/a", 200, 0.3)
    counter.stop()
    (route,) = traffic.parse(records.traffic())
    assert (route.method, route.route, route.statuses) == ("GET", "/a", {"200": 1})
    assert (route.durations, route.sum_s) == ({0.5: 1}, 0.3)
    records.client.delete(f"{records.namespace}:traffic")
