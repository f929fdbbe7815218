"""/metrics for Prometheus: read from Redis at each scrape, so that every router process gives the same answer.

Where vLLM has a metric of that meaning the name is vLLM's, under our prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import flask
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import omniqueue
from omniqueue import errors
from omniqueue.overview import Histogram, Overview, StageOverview
from web import openapi, traffic
from web.services import Services, current

blueprint = flask.Blueprint("metrics", __name__)

Worker = Mapping[str, Any]

_PIPELINE = ("pipeline",)
_STAGE = ("pipeline", "stage", "stage_name")
_ENDED = ("succeeded", "failed", "cancelled", "expired")
_PHASES = ("ready", "loading", "draining", "refused")


@blueprint.get("/metrics")
def metrics() -> flask.Response:
    """The exposition format that the scraper asks for."""
    registry = CollectorRegistry()
    registry.register(Scrape(current()))
    encode, content_type = choose_encoder(flask.request.headers.get("Accept", ""))
    return flask.Response(encode(registry), content_type=content_type)


class Scrape(Collector):
    """One scrape: everything is asked for once, and Redis's absence is a metric too."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        services = self._services
        yield InfoMetricFamily("omniqueue_build", "Version.", value={"version": omniqueue.__version__})
        up = GaugeMetricFamily("omniqueue_redis_up", "1 while Redis answers the router; the rest is missing at 0.")
        try:
            requests = services.traffic.tell(services.store)
            overviews = [services.store.overview(pipe) for pipe in services.catalog.pipelines]
            workers = services.store.workers()
        except errors.BrokerUnavailable:
            up.add_metric((), 0)
            yield up
            return
        up.add_metric((), 1)
        yield up
        yield from _jobs(overviews)
        stages = [(_labels(overview, stage), stage) for overview in overviews for stage in overview.stages]
        yield from _queues(stages)
        yield from _replicas(stages, workers)
        yield from _attempts(stages)
        yield from _used(stages)
        yield from _memory(workers)
        yield from _requests(traffic.parse(requests))


Labelled = Sequence[tuple[tuple[str, ...], StageOverview]]


def _labels(overview: Overview, stage: StageOverview) -> tuple[str, ...]:
    return overview.pipeline.name, str(stage.stage.stage_id), stage.stage.name


def _jobs(overviews: Iterable[Overview]) -> Iterator[Metric]:
    accepted = CounterMetricFamily("omniqueue_jobs_accepted", "Jobs accepted.", labels=_PIPELINE)
    ended = CounterMetricFamily("omniqueue_jobs", "Jobs ended, by state.", labels=("pipeline", "state"))
    live = GaugeMetricFamily("omniqueue_jobs_live", "Jobs accepted and not ended.", labels=_PIPELINE)
    most = GaugeMetricFamily("omniqueue_jobs_limit", "Live jobs at which new ones are refused.", labels=_PIPELINE)
    for overview in overviews:
        name = overview.pipeline.name
        accepted.add_metric((name,), overview.counts.get("accepted", 0))
        live.add_metric((name,), overview.live)
        most.add_metric((name,), overview.pipeline.max_queue)
        for state in _ENDED:
            ended.add_metric((name, state), overview.counts.get(state, 0))
    yield from (accepted, ended, live, most)


def _queues(stages: Labelled) -> Iterator[Metric]:
    waiting = GaugeMetricFamily("omniqueue_num_requests_waiting", "Jobs in a stage's queue.", labels=_STAGE)
    oldest = GaugeMetricFamily(
        "omniqueue_oldest_waiting_seconds", "How long the oldest job in a stage's queue has waited.", labels=_STAGE
    )
    running = GaugeMetricFamily("omniqueue_num_requests_running", "Jobs that a stage's workers hold.", labels=_STAGE)
    for labels, stage in stages:
        waiting.add_metric(labels, stage.waiting)
        oldest.add_metric(labels, stage.oldest_wait_s)
        running.add_metric(labels, stage.running)
    yield from (waiting, oldest, running)


def _replicas(stages: Labelled, workers: Sequence[Worker]) -> Iterator[Metric]:
    replicas = GaugeMetricFamily("omniqueue_replicas", "A stage's workers, by phase.", labels=(*_STAGE, "phase"))
    slots = GaugeMetricFamily("omniqueue_slots", "Jobs that a stage's ready workers take at once.", labels=_STAGE)
    for labels, stage in stages:
        mine = [worker for worker in workers if worker["queue"] == stage.stage.queue]
        phases = Counter(str(worker["phase"]) for worker in mine)
        for phase in sorted({*_PHASES, *phases}):
            replicas.add_metric((*labels, phase), phases[phase])
        slots.add_metric(labels, sum(int(worker["concurrency"]) for worker in mine if worker["phase"] == "ready"))
    yield from (replicas, slots)


def _attempts(stages: Labelled) -> Iterator[Metric]:
    wait = HistogramMetricFamily(
        "omniqueue_request_queue_time_seconds",
        "How long attempts had waited, told at their end.",
        labels=_STAGE,
    )
    run = HistogramMetricFamily(
        "omniqueue_request_inference_time_seconds", "From claim to result, of attempts that are done.", labels=_STAGE
    )
    attempts = CounterMetricFamily(
        "omniqueue_attempts", "Attempts at a stage, by how they ended.", labels=(*_STAGE, "outcome")
    )
    failures = CounterMetricFamily("omniqueue_failures", "Attempts that failed.", labels=(*_STAGE, "reason"))
    for labels, stage in stages:
        _add(wait, labels, stage.wait)
        _add(run, labels, stage.run)
        attempts.add_metric((*labels, "failed"), sum(stage.failures.values()))
        for outcome in ("done", "cancelled", "expired", "handed_back"):
            attempts.add_metric((*labels, outcome), stage.ends.get(outcome, 0))
        for reason, count in sorted(stage.failures.items()):
            failures.add_metric((*labels, reason), count)
    yield from (wait, run, attempts, failures)


def _add(family: HistogramMetricFamily, labels: Sequence[str], told: Histogram) -> None:
    buckets = [(_le(float(bound)), count) for bound, count in told.buckets]
    family.add_metric(labels, buckets=buckets, sum_value=told.sum)


def _le(bound: float) -> str:
    """A bucket's label; the last one is +Inf."""
    return "+Inf" if bound == float("inf") else str(float(bound))


#: Counters of what attempts used, by the name that workers give it (see workers/usage.py).
_USED = {
    "generation_tokens": ("omniqueue_generation_tokens", "Tokens that a stage's engine generated."),
    "prompt_tokens": ("omniqueue_prompt_tokens", "Tokens that a stage's engine read as prompts."),
    "images": ("omniqueue_images", "Pictures that a stage made."),
    "payload_bytes": ("omniqueue_payload_written_bytes", "Bytes that a stage handed on through the payload store."),
}


def _used(stages: Labelled) -> Iterator[Metric]:
    for name, (metric, text) in _USED.items():
        family = CounterMetricFamily(metric, text, labels=_STAGE)
        for labels, stage in stages:
            family.add_metric(labels, stage.used.get(name, 0))
        yield family


def _memory(workers: Sequence[Worker]) -> Iterator[Metric]:
    """The payload folders, as the workers on each host last saw them."""
    labels = ("host", "folder")
    folders = {(worker["host"], worker["shm"]["folder"]): worker["shm"] for worker in workers if worker.get("shm")}
    for name, key, text in (
        ("omniqueue_payload_resident_bytes", "resident", "Bytes that payloads hold."),
        ("omniqueue_shm_size_bytes", "size", "Size of the file system that holds payloads."),
        ("omniqueue_shm_free_bytes", "free", "Bytes free in the file system that holds payloads."),
    ):
        family = GaugeMetricFamily(name, text, labels=labels)
        for where, facts in sorted(folders.items()):
            family.add_metric(where, facts[key])
        yield family


def _requests(routes: Iterable[traffic.RouteTraffic]) -> Iterator[Metric]:
    requests = CounterMetricFamily("omniqueue_http_requests", "HTTP answers.", labels=("method", "route", "status"))
    durations = HistogramMetricFamily(
        "omniqueue_http_request_duration_seconds", "Until the first byte of the answer.", labels=("method", "route")
    )
    for route in routes:
        for status, count in route.statuses.items():
            requests.add_metric((route.method, route.route, status), count)
        so_far, buckets = 0, []
        for bound in traffic.BOUNDS:
            so_far += route.durations.get(float(f"{bound:g}"), 0)
            buckets.append((_le(bound), so_far))
        durations.add_metric((route.method, route.route), buckets=buckets, sum_value=route.sum_s)
    yield from (requests, durations)


operations = (
    openapi.Operation(
        method="GET",
        path="/metrics",
        summary="Counters and gauges for Prometheus",
        responses={200: openapi.Content(("text/plain", "application/openmetrics-text"), "Prometheus's text format.")},
    ),
)
