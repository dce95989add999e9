"""The Prometheus endpoint of a process. Values are read at each scrape; nothing is stored here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from types import MappingProxyType
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from splitserve.addresses import join_address
from splitserve.errors import FailedPreconditionError
from splitserve.histograms import LATENCY_BOUNDS_S, DurationCounts
from splitserve.logs import log_event
from splitserve.metrics_server import MetricsServer, Pages
from splitserve.runtime.reload import ReloadedFiles
from splitserve.security.tls import ServerTls

EVERY = 4
"""One in EVERY histogram bounds is exported: buckets 75% apart suffice for dashboards and keep scrapes small."""
SHOWN = tuple(range(EVERY - 1, len(LATENCY_BOUNDS_S), EVERY))
Key = TypeVar("Key", bound=str | tuple[str, ...])
"""The value of a label, or one for each of several labels."""
Read = Callable[[], list[Metric]]


class Metrics(Collector):
    """Collects what `read` returns at each scrape. Scrapes run on their own thread."""

    def __init__(self, read: Read) -> None:
        self._read = read

    @override
    def collect(self) -> Iterator[Metric]:
        yield from self._read()


@contextmanager
def serving_metrics(
    read: Read,
    host: str,
    port: int | None,
    tls: ServerTls | None = None,
    pages: Pages = MappingProxyType({}),
    token: str | None = None,
) -> Iterator[None]:
    """Serves `/metrics` while the context is open; does nothing when `port` is None. 0 takes a free port.

    With `tls` it serves HTTPS and requires a client certificate of the authority. `pages` are served as JSON by their
    paths, with `token` only to those who bring it. Raises FailedPreconditionError (BIND_FAILED) naming `metrics_port`.
    """
    if port is None:
        yield
        return
    registry = CollectorRegistry()
    registry.register(Metrics(read))
    context = tls.ssl_context(mutual=True) if tls is not None else None
    try:
        server = MetricsServer(host, port, registry, context, pages, token)
    except OSError as error:
        message = f"metrics_port: cannot listen on {join_address(host, port)}: {error.strerror}"
        raise FailedPreconditionError(message, reason="BIND_FAILED", field="metrics_port") from None
    log_event("metrics.ready", host=host, port=server.server_port)
    try:
        yield
    finally:
        server.close()


def gauge(name: str, text: str, value: float) -> Metric:
    """A gauge without labels."""
    return GaugeMetricFamily(name, text, value=value)


def gauges(name: str, text: str, label: str | Sequence[str], samples: Mapping[Key, float]) -> Metric:
    """A gauge with one or more labels of low cardinality."""
    family = GaugeMetricFamily(name, text, labels=[label] if isinstance(label, str) else label)
    for key, value in samples.items():
        family.add_metric([key] if isinstance(key, str) else key, value)
    return family


def counter(name: str, text: str, value: float) -> Metric:
    """A counter without labels; `_total` is added to its name."""
    return CounterMetricFamily(name, text, value=value)


def counters(name: str, text: str, label: str | Sequence[str], samples: Mapping[Key, float]) -> Metric:
    """A counter with one or more labels of low cardinality."""
    family = CounterMetricFamily(name, text, labels=[label] if isinstance(label, str) else label)
    for key, value in samples.items():
        family.add_metric([key] if isinstance(key, str) else key, value)
    return family


def bucket_label(bound: float) -> str:
    """The label `le` of a histogram's bound, with six digits, as OpenMetrics writes numbers: "1.0" for 1."""
    return str(float(f"{bound:.6g}"))


def add_durations(family: HistogramMetricFamily, labels: list[str], durations: DurationCounts) -> None:
    """Adds one histogram, with the exported bounds only."""
    reached = list(accumulate(durations.counts.copy()))
    bounds = (bucket_label(LATENCY_BOUNDS_S[index]) for index in SHOWN)
    buckets = [(bound, float(reached[index])) for bound, index in zip(bounds, SHOWN, strict=True)]
    family.add_metric(labels, [*buckets, ("+Inf", float(reached[-1]))], sum_value=durations.sum_s)


def reload_metrics(files: Sequence[ReloadedFiles[Any]]) -> list[Metric]:
    """Counts of reloads, and which files are refused at present; no metrics if no files reload."""
    if not files:
        return []
    reloads = CounterMetricFamily(
        "splitserve_file_reloads", "Changed files that were read again", labels=["file", "outcome"]
    )
    for reloaded in files:
        for outcome, count in reloaded.outcomes.items():
            reloads.add_metric([reloaded.name, outcome], count)
    refused = {reloaded.name: float(reloaded.rejected) for reloaded in files}
    text = "Whether a file as it is now was refused, so that an older one is in force"
    return [reloads, gauges("splitserve_file_rejected", text, "file", refused)]
