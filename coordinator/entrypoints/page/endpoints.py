"""The page at `/`: its files, and the data that it asks for.

The snapshot is made at most once a second, or four times while workers come and go, and shared by all who look.
Nothing here is counted on its own: workers come from the registry, figures from the statistics behind the metrics,
requests from their records, reasons from the autoscaler's plans.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from coordinator.admission.controller import AdmissionCounts
from coordinator.entrypoints.http.exchange import HttpExchange, Serve
from coordinator.entrypoints.inference_api import InferenceApi, require_admin
from coordinator.entrypoints.openai.fields import compact_json
from coordinator.entrypoints.page.cluster_view import (
    FLOW_WINDOW_S,
    MAX_MODELS,
    flows_view,
    models_view,
    scaling_view,
    workers_view,
)
from coordinator.entrypoints.page.figure_series import STEP_S, FigureSeries
from coordinator.entrypoints.page.page_access import PageAccess
from coordinator.entrypoints.page.static_files import INDEX, SECURITY_HEADERS, static_file
from coordinator.metrics.scaling_service import ScalingService
from coordinator.metrics.stats import ModelStats, RequestStats
from coordinator.records.explanation import Explainer
from coordinator.records.record_keeper import RecordKeeper
from coordinator.request.caller import ANYONE
from coordinator.workers.registry import Registry
from splitserve import __version__
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import PermissionDeniedError, UnauthenticatedError
from splitserve.rpc.documents import document
from splitserve.v1 import records_pb2

SNAPSHOT_S = 1.0
CHANGED_S = 0.25
"""Least age of a snapshot that is replaced because the set of workers, or what they can do, has changed."""
LISTED = 12
"""Requests in each list."""

UNASKED = ModelStats()
"""Of a model that no request has come for."""

Queues = Callable[[], Mapping[str, AdmissionCounts]]


class PageEndpoints:
    """The page's paths. `sample` runs beside them."""

    def __init__(
        self,
        api: InferenceApi,
        access: PageAccess,
        registry: Registry,
        stats: RequestStats,
        queues: Queues,
        keeper: RecordKeeper,
        explainer: Explainer,
        scaling: ScalingService,
    ) -> None:
        self._api, self._access, self._registry, self._stats = api, access, registry, stats
        self._queues, self._keeper, self._explainer, self._scaling = queues, keeper, explainer, scaling
        self._series = FigureSeries()
        self._snapshot = self._history = b""
        self._made_s, self._made_of = -SNAPSHOT_S, -1

    @property
    def paths(self) -> list[tuple[str, Serve]]:
        """What is served under GET."""
        return [
            ("/", self.index),
            ("/page/static/{name}", self.file),
            ("/page/access", self.access),
            ("/page/snapshot", self.snapshot),
            ("/page/history", self.history),
            ("/page/request/{request_id}", self.request),
        ]

    async def sample(self) -> None:
        """Takes the figures every STEP_S seconds, until cancelled."""
        while True:
            self._series.sample(self._models(), self._queues(), self._registry.snapshot(), time.time())
            self._history = b""
            await asyncio.sleep(STEP_S)

    async def index(self, exchange: HttpExchange) -> None:
        """GET /: the page itself, which holds no data."""
        await _respond_file(exchange, INDEX)

    async def file(self, exchange: HttpExchange) -> None:
        """GET /page/static/{name}: a file of the page."""
        await _respond_file(exchange, exchange.path_params["name"])

    async def access(self, exchange: HttpExchange) -> None:
        """GET /page/access: which credential the data need, and whether this caller has it. Always 200, for browsers
        report every other status as an error."""
        message = ""
        try:
            self._admit(exchange)
        except (UnauthenticatedError, PermissionDeniedError) as error:
            message = error.message
        shown = {"asks_for": self._access.asks_for, "admitted": not message, "message": message}
        await exchange.respond(200, compact_json(shown).encode())

    async def snapshot(self, exchange: HttpExchange) -> None:
        """GET /page/snapshot: the cluster now, for admins."""
        self._admit(exchange)
        now, version = time.monotonic(), self._registry.version
        if now - self._made_s >= (SNAPSHOT_S if version == self._made_of else CHANGED_S):
            self._made_s, self._made_of = now, version
            self._snapshot = compact_json(self._view(now)).encode()
        await exchange.respond(200, self._snapshot)

    async def history(self, exchange: HttpExchange) -> None:
        """GET /page/history: the figures of the last minutes, for admins."""
        self._admit(exchange)
        if not self._history:
            self._history = compact_json(self._series.document()).encode()
        await exchange.respond(200, self._history)

    async def request(self, exchange: HttpExchange) -> None:
        """GET /page/request/{request_id}: one record, as `splitserve explain --json` shows it."""
        exchange.response_headers += DATA_HEADERS
        asked = records_pb2.GetRequestRecordRequest(request_id=exchange.path_params["request_id"])
        found = self._explainer.record(asked, self._access.caller(exchange))
        await exchange.respond(200, compact_json(document(found.record)).encode())

    def _admit(self, exchange: HttpExchange) -> None:
        exchange.response_headers += DATA_HEADERS
        require_admin(self._access.caller(exchange))

    def _view(self, now_s: float) -> dict[str, Any]:
        snapshot, queues = self._registry.snapshot(), self._queues()
        return {
            "version": __version__,
            "at": round(time.time(), 3),
            "uptime_s": round(self._api.uptime_s, 1),
            "draining": self._api.draining,
            "running_requests": self._api.running,
            "workers": workers_view(snapshot, self._scaling.states, now_s),
            "flows": flows_view(self._keeper.kv_flows(FLOW_WINDOW_S)),
            "models": models_view(self._models(), queues),
            "servable": self._api.model_names(ANYONE)[:MAX_MODELS],
            "scaling": scaling_view(self._scaling.timeline, self._registry.plan, now_s),
            "requests": {
                "recent": self._listed(),
                "slow": self._listed(slow=True),
                "failed": self._listed(failed=True),
            },
            "latest": self._series.latest(),
        }

    def _models(self) -> dict[str, ModelStats]:
        """The statistics of all models that had a worker, whether or not a request has come."""
        return dict.fromkeys(sorted(self._registry.known_models()), UNASKED) | self._stats.models()

    def _listed(self, *, slow: bool = False, failed: bool = False) -> list[dict[str, Any]]:
        asked = records_pb2.ListRequestRecordsRequest(slow=slow, failed=failed, limit=LISTED)
        return [document(one) for one in self._explainer.records(asked, ANYONE).requests]


def page_endpoints(
    config: CoordinatorConfig,
    api: InferenceApi,
    registry: Registry,
    stats: RequestStats,
    queues: Queues,
    keeper: RecordKeeper,
    explainer: Explainer,
    scaling: ScalingService,
) -> PageEndpoints | None:
    """The page at `/`; None where it is off. Raises ConfigError for a credential that cannot be used."""
    if config.page == "off" or config.http_port is None:
        return None
    return PageEndpoints(api, PageAccess(config), registry, stats, queues, keeper, explainer, scaling)


DATA_HEADERS = [*SECURITY_HEADERS, (b"cache-control", b"no-store")]


async def _respond_file(exchange: HttpExchange, name: str) -> None:
    exchange.response_headers += SECURITY_HEADERS
    found = static_file(name)
    exchange.response_headers += [(b"cache-control", b"no-cache"), (b"etag", found.etag.encode())]
    if exchange.header(b"if-none-match") == found.etag:
        await exchange.respond(304, b"", found.content_type)
    else:
        await exchange.respond(200, found.content, found.content_type)
