"""A Prometheus endpoint for one process. Values are read when they are asked for; nothing is kept here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from splitserve.addresses import join_address
from splitserve.errors import FailedPreconditionError
from splitserve.logs import log_event
from splitserve.tls import TlsFiles

Samples = Mapping[str, float]
"""Label value to number."""
Read = Callable[[], list[Metric]]


class Metrics(Collector):
    """What `read` gives at each scrape, which runs on a thread of its own."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        yield from self._read()


@contextmanager
def serving_metrics(read: Read, host: str, port: int | None, tls: TlsFiles | None = None) -> Iterator[None]:
    """Serves `/metrics` while the context is open; does nothing when `port` is None. 0 takes a free port.

    With `tls` it speaks HTTPS, and who asks must show a certificate of the authority.
    Raises FailedPreconditionError (BIND_FAILED) naming `metrics_port`.
    """
    if port is None:
        yield
        return
    registry = CollectorRegistry()
    registry.register(Metrics(read))
    secure: dict[str, Any] = {}
    if tls is not None:
        secure = {
            "certfile": str(tls.certificate),
            "keyfile": str(tls.key),
            "client_cafile": str(tls.authority),
            "client_auth_required": True,
        }
    try:
        server, thread = start_http_server(port, addr=host, registry=registry, **secure)
    except OSError as error:
        message = f"metrics_port: cannot listen on {join_address(host, port)}: {error.strerror}"
        raise FailedPreconditionError(message, reason="BIND_FAILED", field="metrics_port") from None
    log_event("metrics.ready", host=host, port=server.server_port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def gauge(name: str, text: str, value: float) -> Metric:
    """A gauge without labels."""
    return GaugeMetricFamily(name, text, value=value)


def gauges(name: str, text: str, label: str, samples: Samples) -> Metric:
    """A gauge with one label, whose values must be few and fixed."""
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in samples.items():
        family.add_metric([key], value)
    return family


def counter(name: str, text: str, value: float) -> Metric:
    """A counter without labels; `_total` is added to its name."""
    return CounterMetricFamily(name, text, value=value)


def counters(name: str, text: str, label: str, samples: Samples) -> Metric:
    """A counter with one label, whose values must be few and fixed."""
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in samples.items():
        family.add_metric([key], value)
    return family
