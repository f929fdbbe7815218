"""Traces of real processes, sent to a collector: one a job, the request at its root, a span per attempt below it."""

from __future__ import annotations

import gzip
import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.process.cluster import Cluster, config, eventually, running

GENERATIONS = "/v1/images/generations"
#: A caller's own trace.
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Span:
    """One that arrived; times in seconds."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    start: float
    end: float
    failed: bool
    facts: dict[str, Any]


@dataclass
class Collector:
    """An OTLP collector over HTTP, which keeps what it is sent."""

    spans: list[Span] = field(default_factory=list)
    url: str = ""

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    facts = {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}
                    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                    times = (span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9)
                    self.spans.append(Span(service, span.name, *ids, *times, span.status.code == 2, facts))

    def of_job(self, job_id: str) -> list[Span]:
        traces = {span.trace for span in self.spans if span.facts.get("omniqueue.job.id") == job_id}
        assert len(traces) <= 1, "a job has one trace"
        return [span for span in self.spans if span.trace in traces]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    kept = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            kept.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    kept.url = f"http://127.0.0.1:{server.server_port}"
    yield kept
    server.shutdown()
    server.server_close()
    thread.join(10)


@pytest.fixture(scope="module")
def cluster(collector: Collector) -> Iterator[Cluster]:
    environ = {
        "OMNIQUEUE_TRACES": "otlp",
        "OMNIQUEUE_LOG_FORMAT": "json",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    stages = config({"delay_s": 0.05}, {"delay_s": 0.1, "raise_on": "RAISE", "exit_on": "EXIT"})
    with running(stages, environ=environ) as made:
        made.router()
        made.workers(1, 1)
        yield made


def ask(cluster: Cluster, prompt: str, path: str = GENERATIONS, **headers: str) -> tuple[int, str]:
    """Status and job id."""
    body = json.dumps({"prompt": prompt, "size": "16x16"}).encode()
    status, told, _ = cluster.exchange("POST", path, body, 60.0, **headers)
    return status, told["X-Omniqueue-Job-Id"]


def named(spans: list[Span], name: str, under: Span | None = None) -> list[Span]:
    return [span for span in spans if span.name == name and (under is None or span.parent == under.id)]


def whole(collector: Collector, job_id: str, count: int) -> list[Span]:
    """The job's spans, once that many have come."""
    found: list[Span] = eventually(lambda: len(s := collector.of_job(job_id)) >= count and s, 10.0)
    assert len(found) == count, [span.name for span in found]
    return found


def test_a_job_of_two_stages_is_one_trace_with_the_request_at_its_root(cluster: Cluster, collector: Collector) -> None:
    status, job_id = ask(cluster, "a secret garden")
    assert status == 200
    spans = whole(collector, job_id, 7)
    (root,) = [span for span in spans if not span.parent]
    assert (root.name, root.service) == (f"POST {GENERATIONS}", "omniqueue-router")
    assert root.facts["http.response.status_code"] == 200
    record = cluster.job(job_id)
    for k, stage in enumerate(cluster.pipe.stages):
        (attempt,) = named(spans, f"{stage.queue} {stage.name}", root)
        assert attempt.service == f"omniqueue-{stage.queue}"
        assert (attempt.facts["omniqueue.attempt"], attempt.facts["omniqueue.stage.id"]) == (1, k)
        assert attempt.facts["omniqueue.outcome"] == ("next", "succeeded")[k]
        (wait,), (run,) = named(spans, "wait", attempt), named(spans, "run", attempt)
        assert attempt.start == pytest.approx(wait.start, abs=1e-3)
        assert wait.end == pytest.approx(run.start, abs=1e-3)
        assert attempt.end >= run.end
        told = record.stages[k]
        assert told.started_at is not None
        assert told.queued_at is not None
        assert told.ended_at is not None
        assert wait.end - wait.start == pytest.approx(told.started_at - told.queued_at, abs=0.01)
        assert run.end - run.start == pytest.approx(told.ended_at - told.started_at, abs=0.2)
    assert "secret" not in repr(spans)


def test_a_callers_trace_goes_on(cluster: Cluster, collector: Collector) -> None:
    _, job_id = ask(cluster, "apple", traceparent=f"00-{TRACE}-{SPAN}-01")
    spans = whole(collector, job_id, 7)
    assert {span.trace for span in spans} == {TRACE}
    (request,) = named(spans, f"POST {GENERATIONS}")
    assert request.parent == SPAN


def test_an_async_job_belongs_to_the_request_that_made_it(cluster: Cluster, collector: Collector) -> None:
    status, job_id = ask(cluster, "apple", "/v1/jobs")
    assert status == 202
    (root,) = [span for span in whole(collector, job_id, 7) if not span.parent]
    assert root.name == "POST /v1/jobs"


def test_a_failure_is_marked_by_its_code_and_not_by_what_the_client_sent(
    cluster: Cluster, collector: Collector
) -> None:
    status, job_id = ask(cluster, "RAISE a secret")
    assert status == 500
    spans = whole(collector, job_id, 7)
    failed = {span.name for span in spans if span.failed}
    assert failed == {"run", f"stage1 {cluster.pipe.stages[1].name}"}
    assert {span.facts.get("error.type") for span in spans if span.failed} == {"engine_error"}
    assert "secret" not in repr(spans)


def test_a_stage_that_is_enqueued_again_stays_in_its_jobs_trace(cluster: Cluster, collector: Collector) -> None:
    """Its worker is killed, so the reaper enqueues it: nothing of the first message is left.

    What the killed attempt had told before, such as its wait, may have come.
    """
    first = [process for process in cluster.processes if process.name == "stage1"][-1]
    job_id = ask(cluster, "apple", "/v1/jobs")[1]
    cluster.when_stage(job_id, 1, "running")
    first.kill()
    cluster.workers(1, 1)
    record = cluster.ended(job_id)
    assert (record.state.value, record.stages[1].attempt) == ("succeeded", 2)
    (again,) = eventually(lambda: [one for one in collector.of_job(job_id) if one.name.startswith("stage1")], 10.0)
    assert again.facts["omniqueue.attempt"] == 2


def test_probes_and_scrapes_have_no_span(cluster: Cluster, collector: Collector) -> None:
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        cluster.http("GET", path)
    eventually(lambda: [span for span in collector.spans if span.name == "GET /v1/models"], 10.0)
    assert {span.name for span in collector.spans if span.name.startswith("GET")} == {"GET /v1/models"}


def test_the_workers_lines_are_json_with_job_stage_and_attempt(cluster: Cluster) -> None:
    _, job_id = ask(cluster, "pear")
    worker = [process for process in cluster.processes if process.name == "stage0"][-1]

    def lines() -> list[dict[str, Any]]:
        told = [json.loads(line) for line in worker.text().splitlines() if line.startswith("{")]
        return [line for line in told if line.get("job") == job_id and line.get("action") == "stage_ended"]

    (line,) = eventually(lines, 5.0)
    assert (line["stage"], line["attempt"], line["outcome"], line["level"]) == (0, 1, "next", "INFO")
    assert [line for line in worker.text().splitlines() if "action=" in line and line[0] != "{"] == []
