"""The page at `/`: its files, the access to its data, and the data.

The page itself is public, since it holds no data. The snapshot is made at most once a second, or four times a second
while workers come and go, and all viewers share it. No figure is counted here: workers come from the registry, figures
from the statistics behind the metrics, requests from their records, reasons from the autoscaler's plans.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from coordinator.admission.controller import AdmissionCounts
from coordinator.entrypoints.http.exchange import READS, ApiPath, Headers, HttpExchange, json_bytes
from coordinator.entrypoints.inference_api import InferenceApi, require_admin
from coordinator.entrypoints.page.cluster_view import (
    FLOW_WINDOW_S,
    MAX_MODELS,
    flows_view,
    models_view,
    scaling_view,
    workers_view,
)
from coordinator.entrypoints.page.figure_series import STEP_S, FigureSeries
from coordinator.request.inference_request import ANYONE, Caller
from coordinator.telemetry.explanation import Explainer
from coordinator.telemetry.record_keeper import RecordKeeper
from coordinator.telemetry.request_stats import ModelStats, RequestStats
from coordinator.telemetry.scaling_service import ScalingService
from coordinator.workers.registry import Registry
from splitserve import __version__
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import ConfigError, NotFoundError, PermissionDeniedError, UnauthenticatedError
from splitserve.rpc.credentials import is_loopback, read_token_file
from splitserve.rpc.documents import document
from splitserve.v1 import records_pb2


class PageAccess:
    """Who may see the page's data: with tenants, holders of an API key; else, holders of the secret in
    `page_token_file`. With neither, the data are open on loopback and closed on every other interface.

    Raises ConfigError for a secret that cannot be read, and for a secret beside tenants.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        path = config.page_token_file
        if path is not None and config.tenants is not None:
            message = "page_token_file: with tenants the page takes an admin's API key; leave it out"
            raise ConfigError(message, field="page_token_file")
        self._has_tenants = config.tenants is not None
        self._token = read_token_file(path, "page_token_file") if path is not None else None
        self._is_local = is_loopback(config.host)
        self.asks_for = "api_key" if self._has_tenants else "token" if path is not None else None
        """The credential that the page has to ask for; None: none."""

    def caller(self, exchange: HttpExchange) -> Caller:
        """Who asks. Raises UnauthenticatedError, or PermissionDeniedError (PAGE_CLOSED)."""
        if self._has_tenants:
            return exchange.caller()
        if self._token is not None:
            credential = exchange.credential
            if credential is None:
                raise UnauthenticatedError("the page needs its token", reason="NO_PAGE_TOKEN")
            if not hmac.compare_digest(credential.encode(), self._token.encode()):
                raise UnauthenticatedError("this is not the page's token", reason="WRONG_PAGE_TOKEN")
            return ANYONE
        if not self._is_local:
            message = (
                "this coordinator listens on more than loopback without a credential for its page: set "
                "page_token_file or tenants"
            )
            raise PermissionDeniedError(message, reason="PAGE_CLOSED")
        if not _names_this_machine(exchange.header(b"host") or ""):
            # Another site's page may have its own name resolved to 127.0.0.1.
            message = "without a credential the page is served to localhost only, whatever name leads here"
            raise PermissionDeniedError(message, reason="PAGE_CLOSED")
        return ANYONE


def _names_this_machine(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and is_loopback(name)


INDEX = "index.html"
TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
"""Content types by suffix; files of other kinds are not served."""
SECURITY_HEADERS: Headers = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
"""Headers of every response of the page, its data included."""


class StaticFile(NamedTuple):
    """A file of the page."""

    content: bytes
    content_type: bytes


@cache
def static_files() -> dict[str, StaticFile]:
    """The page's files by name."""
    return {
        entry.name: StaticFile(entry.read_bytes(), kind)
        for entry in files(__package__).joinpath("static").iterdir()
        if (kind := TYPES.get(entry.name.rpartition(".")[2])) is not None
    }


def static_file(name: str) -> StaticFile:
    """The file of that name. Raises NotFoundError."""
    file = static_files().get(name)
    if file is None:
        raise NotFoundError("there is no such file of the page", reason="NOT_FOUND")
    return file


SNAPSHOT_S = 1.0
CHANGED_S = 0.25
"""Least age of a snapshot that is replaced because the workers or their states have changed."""
LISTED = 12
"""Requests in each list."""

NO_STATS = ModelStats()
"""Statistics of a model without requests."""

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
    def paths(self) -> list[ApiPath]:
        """The paths, which no other page may read."""
        served = {
            "/": self.index,
            "/page/static/{name}": self.file,
            "/page/access": self.access,
            "/page/snapshot": self.snapshot,
            "/page/history": self.history,
            "/page/request/{request_id}": self.request,
        }
        return [ApiPath(READS, path, serve, is_shared=False) for path, serve in served.items()]

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
        """GET /page/access: which credential the data need, and whether this caller has it. Always 200: browsers report
        every other status as an error."""
        message = ""
        try:
            self._admit(exchange)
        except (UnauthenticatedError, PermissionDeniedError) as error:
            message = error.message
        shown = {"asks_for": self._access.asks_for, "admitted": not message, "message": message}
        await exchange.respond(200, json_bytes(shown))

    async def snapshot(self, exchange: HttpExchange) -> None:
        """GET /page/snapshot: the cluster now, for admins."""
        self._admit(exchange)
        now, version = time.monotonic(), self._registry.version
        if now - self._made_s >= (SNAPSHOT_S if version == self._made_of else CHANGED_S):
            self._made_s, self._made_of = now, version
            self._snapshot = json_bytes(self._view(now))
        await exchange.respond(200, self._snapshot)

    async def history(self, exchange: HttpExchange) -> None:
        """GET /page/history: the figures of the last minutes, for admins."""
        self._admit(exchange)
        if not self._history:
            self._history = json_bytes(self._series.document())
        await exchange.respond(200, self._history)

    async def request(self, exchange: HttpExchange) -> None:
        """GET /page/request/{request_id}: one record, as `splitserve explain --json` shows it."""
        exchange.response_headers += DATA_HEADERS
        lookup = records_pb2.GetRequestRecordRequest(request_id=exchange.path_params["request_id"])
        response = self._explainer.record(lookup, self._access.caller(exchange))
        await exchange.respond(200, json_bytes(document(response.record)))

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
            "servable": [model.name for model in self._api.routes.nameable(ANYONE)][:MAX_MODELS],
            "scaling": scaling_view(self._scaling.timeline, self._registry.plan, now_s),
            "requests": {
                "recent": self._listed(),
                "slow": self._listed(slow=True),
                "failed": self._listed(failed=True),
            },
            "latest": self._series.latest(),
        }

    def _models(self) -> dict[str, ModelStats]:
        """The statistics of all models that have had a worker, also of those without requests."""
        return dict.fromkeys(sorted(self._registry.known_models()), NO_STATS) | self._stats.models()

    def _listed(self, *, slow: bool = False, failed: bool = False) -> list[dict[str, Any]]:
        lookup = records_pb2.ListRequestRecordsRequest(slow=slow, failed=failed, limit=LISTED)
        return [document(summary) for summary in self._explainer.records(lookup, ANYONE).requests]


DATA_HEADERS = [*SECURITY_HEADERS, (b"cache-control", b"no-store")]


async def _respond_file(exchange: HttpExchange, name: str) -> None:
    exchange.response_headers += [*SECURITY_HEADERS, (b"cache-control", b"no-cache")]
    await exchange.respond(200, *static_file(name))
