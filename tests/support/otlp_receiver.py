"""An OTLP receiver in the test's process: what a collector would get, decoded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2

from tests.support.waiting import PATIENCE_S


@dataclass(frozen=True)
class ReceivedSpan:
    """One span. Times in nanoseconds since 1970, ids in hexadecimal digits."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    kind: int
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    """Trace and span ids."""
    error: str
    tracestate: str

    @property
    def ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


Enough = Callable[[list[ReceivedSpan]], bool]


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps all spans that arrive, and the metadata of the latest call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spans: list[ReceivedSpan] = []
        self.metadata: dict[str, str | bytes] = {}
        self.endpoint = ""

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._changed:
            self.metadata = dict(context.invocation_metadata())
            self._spans += _decoded(request)
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, trace_id: str) -> list[ReceivedSpan]:
        """The spans of a trace that have come."""
        with self._changed:
            return [span for span in self._spans if span.trace_id == trace_id]

    async def trace(self, trace_id: str, enough: Enough) -> list[ReceivedSpan]:
        """The spans of a trace once there are enough of them; batches come a second apart."""
        return await asyncio.to_thread(self._wait, trace_id, enough)

    def _wait(self, trace_id: str, enough: Enough) -> list[ReceivedSpan]:
        with self._changed:
            come = self._changed.wait_for(
                lambda: enough([span for span in self._spans if span.trace_id == trace_id]), PATIENCE_S
            )
            found = [span for span in self._spans if span.trace_id == trace_id]
        assert come, f"of trace {trace_id} there came {[(span.service, span.name) for span in found]}"
        return found


@contextmanager
def otlp_receiver(tls: Path | None = None) -> Iterator[OtlpReceiver]:
    """A receiver on a free port of loopback, with the coordinator's certificate in the folder `tls`. On threads: it
    serves tests of any event loop."""
    receiver = OtlpReceiver()
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    if tls is None:
        receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    else:
        pair = ((tls / "coordinator-key.pem").read_bytes(), (tls / "coordinator.pem").read_bytes())
        credentials = grpc.ssl_server_credentials([pair])
        receiver.endpoint = f"https://127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0).wait(PATIENCE_S)


def from_all(*services: str) -> Enough:
    """Whether each of these services has sent the span of its part of the trace."""
    wanted = {f"splitserve-{service}" for service in services}
    return lambda spans: wanted <= {span.service for span in spans if span.kind == SERVER}


SERVER = 2
"""SPAN_KIND_SERVER."""


def _decoded(request: trace_service_pb2.ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for group in request.resource_spans:
        resource = _values(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    service=resource["service.name"],
                    instance=resource["service.instance.id"],
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    kind=span.kind,
                    attributes=_values(span.attributes),
                    links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                    error=span.status.message,
                    tracestate=span.trace_state,
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)
