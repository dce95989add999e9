"""Turns the export of spans on and off. OpenTelemetry is imported only where an endpoint is set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from splitserve.config.tracing import TracingConfig
from splitserve.errors import MissingExtraError
from splitserve.logs import log_event
from splitserve.tracing.context import SpanSink


@asynccontextmanager
async def exporting_spans(
    config: TracingConfig, service: str, instance: str
) -> AsyncIterator[SpanSink | None]:
    """A sink for this process's spans while the context is open; None where no endpoint is set.

    `service` is "coordinator" or the kind of worker, for example "prefill-worker"; `instance` is its id. Leaving the
    context takes a bounded time, whatever the receiver does. Raises ConfigError (tracing.authority) and
    MissingExtraError.
    """
    if config.endpoint is None:
        yield None
        return
    try:
        from splitserve.tracing.otlp import SpanExport
    except ImportError as error:
        raise MissingExtraError("tracing.endpoint", "tracing", error) from None
    export = SpanExport(config.endpoint, config.authority, service, instance)
    log_event("tracing.on", endpoint=config.endpoint)
    try:
        yield export.export
    finally:
        await asyncio.shield(asyncio.to_thread(export.close))
