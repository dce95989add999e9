"""Spans as a receiver gets them; headers, TLS, a receiver that is not there, and what wrong settings say."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from splitserve.config.tracing import RequestTracingConfig, TracingConfig
from splitserve.errors import ConfigError, InvalidArgumentError, MissingExtraError
from splitserve.security.certificates import write_certificates
from splitserve.tracing.context import FinishedSpan, TraceContext
from splitserve.tracing.exporting import exporting_spans
from splitserve.tracing.otlp import FLUSH_S, MAX_QUEUED_SPANS, SpanExport
from tests.support.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.support.waiting import SLACK_S

PARENT = "00f067aa0ba902b7"
START_S = 1_700_000_000.25


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as made:
        yield made


def span(name: str = "whole", error: str = "", links: tuple[TraceContext, ...] = ()) -> FinishedSpan:
    context = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "1111111111111111", True, "a=b")
    attributes = {"text": "x", "count": 3, "share": 0.5, "yes": True}
    return FinishedSpan(name, context, PARENT, START_S, START_S + 0.125, attributes, "server", links, error)


async def test_spans_arrive_as_they_were(receiver: OtlpReceiver) -> None:
    link = TraceContext.new(sampled=True)
    whole = span(error="WORKER_LOST: d0 is gone", links=(link,))
    part = whole.part("part", START_S, START_S + 0.1, {"n": 1})
    config = TracingConfig(endpoint=receiver.endpoint)
    async with exporting_spans(config, "prefill-worker", "p0") as sink:
        assert sink is not None
        sink([whole, part])
    second, first = receiver.of(whole.context.trace_id)  # the whole comes last
    assert (first.service, first.instance) == ("splitserve-prefill-worker", "p0")
    assert (first.name, first.span_id, first.parent_id, first.kind) == ("whole", "1" * 16, PARENT, 2)
    assert (first.start_ns, first.end_ns) == (int(START_S * 1e9), int((START_S + 0.125) * 1e9))
    assert first.attributes == {**whole.attributes, "error.type": "WORKER_LOST"}
    assert (first.error, first.links) == (whole.error, ((link.trace_id, link.span_id),))
    assert first.tracestate == "a=b"
    assert (second.name, second.parent_id, second.span_id) == ("part", "1" * 16, part.context.span_id)
    assert second.error == ""


async def test_a_trace_that_begins_here_has_no_parent(receiver: OtlpReceiver) -> None:
    context = TraceContext.new(sampled=True)
    async with exporting_spans(TracingConfig(endpoint=receiver.endpoint), "coordinator", "c") as sink:
        assert sink is not None
        sink([FinishedSpan("root", context, "", START_S, START_S + 1)])
    (root,) = receiver.of(context.trace_id)
    assert (root.parent_id, root.span_id) == ("", context.span_id)


async def test_headers_and_resource_come_from_the_variables_of_opentelemetry(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "other")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    async with exporting_spans(TracingConfig(endpoint=receiver.endpoint), "coordinator", "c") as sink:
        assert sink is not None
        sink([span()])
    (only,) = receiver.of(span().context.trace_id)
    assert only.service == "splitserve-coordinator"
    assert receiver.metadata["x-api-key"] == "secret"


@pytest.mark.slow
@pytest.mark.parametrize("listens", [True, False])
async def test_a_receiver_that_is_not_there_costs_a_bounded_time(listens: bool) -> None:
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        if listens:
            port.listen()
        config = TracingConfig(endpoint=f"http://127.0.0.1:{port.getsockname()[1]}")
        async with exporting_spans(config, "coordinator", "c") as sink:
            assert sink is not None
            for _ in range(3 * MAX_QUEUED_SPANS // 1000):
                sink([span()] * 1000)
            began_s = time.monotonic()
        assert time.monotonic() - began_s < FLUSH_S + SLACK_S


async def test_without_an_endpoint_there_is_no_sink() -> None:
    async with exporting_spans(TracingConfig(), "coordinator", "c") as sink:
        assert sink is None


async def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "splitserve.tracing.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MissingExtraError, match=r"tracing.endpoint needs .*splitserve\[tracing\]"):
        async with exporting_spans(TracingConfig(endpoint="http://localhost:4317"), "coordinator", "c"):
            raise AssertionError("not reached")


def test_an_authority_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.authority"):
        SpanExport("https://localhost:4317", tmp_path / "none.pem", "coordinator", "c")


async def test_spans_travel_encrypted(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["localhost", "127.0.0.1"], 1)
    with otlp_receiver(tls=tmp_path) as receiver:
        assert receiver.endpoint.startswith("https://")
        config = TracingConfig(endpoint=receiver.endpoint, authority=tmp_path / "ca.pem")
        async with exporting_spans(config, "coordinator", "c") as sink:
            assert sink is not None
            sink([span()])
        assert len(receiver.of(span().context.trace_id)) == 1


@pytest.mark.parametrize(
    "wrong",
    ["", "localhost:4317", "grpc://localhost:4317", "http://localhost", "http://a:1/path", "http://user@a:1", "http://a:1?x"],
)  # fmt: skip
def test_an_endpoint_is_a_scheme_and_an_address(wrong: str) -> None:
    with pytest.raises((ValidationError, InvalidArgumentError), match=r"HOST:PORT|endpoint must be"):
        RequestTracingConfig(endpoint=wrong)
    assert RequestTracingConfig(endpoint="http://[::1]:4317/").endpoint == "http://[::1]:4317"
