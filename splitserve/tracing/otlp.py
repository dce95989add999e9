"""Sends spans to an OTLP receiver with OpenTelemetry's SDK. Imported only where an endpoint is set.

Spans wait in a bounded queue, and a thread of the SDK sends them in batches: a receiver that is slow, dead or silent
loses spans, but delays no request. The coordinator has decided which requests are traced: the SDK exports all spans.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import grpc
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from splitserve import __version__
from splitserve.logs import log_exception
from splitserve.runtime.bounded_file import read_named_file
from splitserve.tracing.context import FinishedSpan, TraceContext

MAX_QUEUED_SPANS = 8192
"""When the queue is full, a new span replaces the oldest. A span takes about 2 KB."""
MAX_BATCH_SPANS = 512
BATCH_DELAY_S = 1.0
EXPORT_TIMEOUT_S = 5.0
"""Time limit for one batch, its retries included."""
FLUSH_S = 2.0
"""How long the end of the process waits for the spans that are queued."""
KINDS = {
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
    "internal": trace.SpanKind.INTERNAL,
}
_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)


class _GivenIds(IdGenerator):
    """Gives the SDK the ids of the span that is exported, instead of new ones."""

    def __init__(self) -> None:
        self.trace_id = self.span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class SpanExport:
    """Exports spans of one process until `close`. Thread-safe."""

    def __init__(self, endpoint: str, authority: Path | None, service: str, instance: str) -> None:
        """Raises ConfigError (tracing.authority)."""
        encrypted = endpoint.startswith("https:")
        # The SDK reads headers, such as a vendor's key, from OTEL_EXPORTER_OTLP_HEADERS.
        self._exporter = OTLPSpanExporter(
            endpoint=endpoint,
            insecure=not encrypted,
            credentials=_credentials(authority) if encrypted else None,
            timeout=EXPORT_TIMEOUT_S,
        )
        facts = {"service.instance.id": instance, "service.version": __version__}
        resource = Resource.create({"service.name": f"splitserve-{service}", **facts})
        self._ids = _GivenIds()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False, id_generator=self._ids
        )
        queue = BatchSpanProcessor(
            self._exporter,
            max_queue_size=MAX_QUEUED_SPANS,
            schedule_delay_millis=BATCH_DELAY_S * 1e3,
            max_export_batch_size=MAX_BATCH_SPANS,
            export_timeout_millis=EXPORT_TIMEOUT_S * 1e3,
        )
        self._provider.add_span_processor(queue)
        self._tracer = self._provider.get_tracer("splitserve", __version__)
        self._lock = threading.Lock()

    def export(self, spans: Sequence[FinishedSpan]) -> None:
        """Queues spans; see SpanSink."""
        try:
            with self._lock:
                for span in reversed(spans):  # parents last: a receiver that has a span has its children
                    self._export(span)
        except Exception as error:  # the caller's thread serves requests
            log_exception("tracing.failed", error)

    def close(self) -> None:
        """Sends the queued spans. Blocks until they are sent, at most FLUSH_S."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(FLUSH_S)
        if closing.is_alive():
            self._exporter.shutdown()

    def _export(self, span: FinishedSpan) -> None:
        own = span.context
        parent = trace.NonRecordingSpan(_span_context(own, span.parent_id)) if span.parent_id else None
        self._ids.trace_id, self._ids.span_id = int(own.trace_id, 16), int(own.span_id, 16)
        exported = self._tracer.start_span(
            span.name,
            trace.set_span_in_context(parent or trace.INVALID_SPAN),
            kind=KINDS[span.kind],
            attributes=span.attributes,
            links=[trace.Link(_span_context(link, link.span_id)) for link in span.links],
            start_time=int(span.start_s * 1e9),
        )
        if span.error:
            exported.set_attribute("error.type", span.error.partition(":")[0])
            exported.set_status(trace.StatusCode.ERROR, span.error)
        exported.end(int(span.end_s * 1e9))


def _span_context(context: TraceContext, span_id: str) -> trace.SpanContext:
    state = trace.TraceState.from_header([context.tracestate]) if context.tracestate else None
    return trace.SpanContext(
        int(context.trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=_SAMPLED, trace_state=state
    )


def _credentials(authority: Path | None) -> grpc.ChannelCredentials:
    if authority is None:
        return grpc.ssl_channel_credentials()
    return grpc.ssl_channel_credentials(read_named_file(authority, "tracing.authority"))
