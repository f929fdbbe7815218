"""OpenTelemetry, where OMNIQUEUE_TRACES asks for it: one trace a job, from its request through every stage.

The context lies in the job record: a stage that is enqueued again, by whomever, stays in its job's trace. While it is
off nothing is imported and nothing is asked.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from omniqueue import __version__, errors

if TYPE_CHECKING:
    from omniqueue.pipeline import Stage
    from omniqueue.store import Claim

#: How an attempt or a request ended; more facts about it.
Tell = Callable[..., None]

_HEADER = "traceparent"
_tracer: Any = None
_provider: Any = None


def configure(service: str, where: str | None) -> None:
    """Begin to trace in this process: to ``otlp``, as OTEL_* variables say, or ``file:PATH``, a line of JSON a span.

    Call after a fork. Raises ConfigError when OpenTelemetry is not installed.
    """
    global _tracer, _provider
    if where is None or _tracer is not None:
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as exc:
        raise errors.ConfigError(
            f"OMNIQUEUE_TRACES is set, and OpenTelemetry is not installed ({exc}): pip install 'omniqueue[otel]'."
        ) from exc
    resource = Resource.create({"service.name": service, "service.version": __version__})
    _provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    _provider.add_span_processor(BatchSpanProcessor(_exporter(where)))
    _tracer = _provider.get_tracer("omniqueue", __version__)


def _exporter(where: str) -> Any:
    kind, _, path = where.partition(":")
    if kind == "file":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the process traces
        return ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def active() -> bool:
    """Whether this process traces."""
    return _tracer is not None


def shutdown() -> None:
    """Send what is left; spans that come later are dropped."""
    global _tracer, _provider
    if _provider is not None:
        _provider.shutdown()
    _tracer = _provider = None


def _context(header: str | None) -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({_HEADER: header} if header else {})


def header_of(span: Any) -> str:
    """A span as others name their parent: the W3C traceparent header; "" for no span."""
    if span is None:
        return ""
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
    return carrier.get(_HEADER, "")


def begin_request(name: str, header: str | None, attributes: Mapping[str, Any]) -> Any:
    """The span of an HTTP request, below its sender's if it names one; None while off. The caller ends it."""
    if _tracer is None:
        return None
    from opentelemetry.trace import SpanKind

    return _tracer.start_span(name, context=_context(header), kind=SpanKind.SERVER, attributes=dict(attributes))


@contextlib.contextmanager
def attempt(origin: tuple[str, float] | None, stage: Stage, claim: Claim) -> Iterator[Tell]:
    """A span for an attempt at a stage, with its wait and its run below it; the block tells how it ended.

    ``origin`` is what the store tells of the job's trace; without one there is no span.
    """
    if origin is None:
        yield lambda outcome, **_: None
        return
    from opentelemetry.trace import SpanKind, set_span_in_context

    header, waited_s = origin
    started = time.time_ns()
    queued = started - int(waited_s * 1e9)
    facts = {
        "omniqueue.job.id": claim.job_id,
        "omniqueue.stage.id": claim.stage_id,
        "omniqueue.stage.name": stage.name,
        "omniqueue.attempt": claim.attempt,
        "messaging.destination.name": stage.queue,
    }
    whole = _tracer.start_span(
        f"{stage.queue} {stage.name}",
        context=_context(header),
        kind=SpanKind.CONSUMER,
        attributes=facts,
        start_time=queued,
    )
    below = set_span_in_context(whole)
    _tracer.start_span("wait", context=below, start_time=queued).end(started)
    run = _tracer.start_span("run", context=below, start_time=started)
    try:
        yield lambda outcome, error=None: _ended(run, whole, outcome, error)
    finally:
        run.end()
        whole.end()


def _ended(run: Any, whole: Any, outcome: str, error: errors.OmniqueueError | None) -> None:
    whole.set_attribute("omniqueue.outcome", outcome)
    if error is not None:
        from opentelemetry.trace import Status, StatusCode

        for span in (run, whole):
            # Not the message: it may quote what the client sent.
            span.set_attribute("error.type", error.code or "server_error")
            span.set_status(Status(StatusCode.ERROR))
