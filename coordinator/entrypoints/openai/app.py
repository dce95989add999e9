"""The paths of the OpenAI-compatible API, and its GET endpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.routing import Route, Router
from starlette.types import Receive, Scope
from starlette.types import Send as AsgiSend

from coordinator.entrypoints.http.errors import HttpError
from coordinator.entrypoints.http.exchange import Endpoint, HttpExchange, Serve
from coordinator.entrypoints.inference_api import InferenceApi, require_admin
from coordinator.entrypoints.openai.fields import compact_json
from coordinator.entrypoints.openai.serving import OpenAIServing
from splitserve import __version__
from splitserve.errors import NotFoundError, UnavailableError
from splitserve.metrics import Metrics, Read
from splitserve.v1 import inference_pb2

Method = Literal["GET", "POST"]


class Path:
    """The ASGI application of one path: serves one method, responds 405 to others."""

    def __init__(self, method: Method, serve: Serve, endpoint: Callable[[Serve], Endpoint]) -> None:
        self._methods = ("GET", "HEAD") if method == "GET" else ("POST",)
        self._endpoint = endpoint(serve)
        self._other = endpoint(self._refuse)

    async def __call__(self, scope: Scope, receive: Receive, send: AsgiSend) -> None:
        """ASGI."""
        endpoint = self._endpoint if scope["method"] in self._methods else self._other
        await endpoint(scope, receive, send)

    async def _refuse(self, exchange: HttpExchange) -> None:
        allowed = ", ".join(self._methods)
        headers = [(b"allow", allowed.encode())]
        raise HttpError(405, f"this path takes {allowed} only", "METHOD_NOT_ALLOWED", headers)


def make_app(api: InferenceApi, read_metrics: Read, further: Sequence[tuple[str, Serve]] = ()) -> Router:
    """The ASGI application of the API. `read_metrics` gives the metrics that `/metrics` shows; `further` paths are
    served under GET."""

    def endpoint(serve: Serve) -> Endpoint:
        return Endpoint(serve, api.authenticator, api.limits)

    completions, info = OpenAIServing(api), InfoEndpoints(api, read_metrics)
    paths: list[tuple[str, Method, Serve]] = [
        ("/v1/chat/completions", "POST", completions.chat),
        ("/v1/completions", "POST", completions.completion),
        ("/v1/models", "GET", info.models),
        ("/v1/models/{model:path}", "GET", info.model),
        ("/health", "GET", info.health),
        ("/ready", "GET", info.ready),
        ("/metrics", "GET", info.metrics),
        ("/version", "GET", info.version),
        *((path, "GET", serve) for path, serve in further),
    ]
    routes = [Route(path, Path(method, serve, endpoint)) for path, method, serve in paths]
    # A bare Router: Starlette's application class would wrap every `send` twice, and Endpoint handles errors already.
    return Router(routes, redirect_slashes=False, default=endpoint(_unknown))


async def _unknown(exchange: HttpExchange) -> None:
    raise HttpError(404, "there is nothing at this path", "NOT_FOUND")


class InfoEndpoints:
    """The GET endpoints. `read_metrics` gives the same metrics as the metrics port."""

    def __init__(self, api: InferenceApi, read_metrics: Read) -> None:
        self._api = api
        self._started = int(time.time())
        self._metrics = CollectorRegistry()
        self._metrics.register(Metrics(read_metrics))

    async def models(self, exchange: HttpExchange) -> None:
        """GET /v1/models."""
        found = await self._api.models(exchange.caller())
        await _respond_json(exchange, {"object": "list", "data": [self._shown(model) for model in found]})

    async def model(self, exchange: HttpExchange) -> None:
        """GET /v1/models/{model}."""
        name = exchange.path_params["model"]
        for model in await self._api.models(exchange.caller()):
            if model.name == name:
                await _respond_json(exchange, self._shown(model))
                return
        message = f"model {name[:128]!r} is not served here"
        raise NotFoundError(message, reason="MODEL_NOT_FOUND", field="model")

    async def health(self, exchange: HttpExchange) -> None:
        """GET /health: the process is alive."""
        await _respond_json(exchange, {"status": "ok"})

    async def ready(self, exchange: HttpExchange) -> None:
        """GET /ready: at least one model has a complete pair of workers, or workers that are started on demand."""
        api = self._api
        if api.draining:
            raise UnavailableError("the coordinator is shutting down", reason="DRAINING")
        if not api.is_ready:
            message = "no model has a prefill and a decode worker that are ready"
            raise UnavailableError(message, reason="NO_WORKER")
        await _respond_json(exchange, {"status": "ready"})

    async def version(self, exchange: HttpExchange) -> None:
        """GET /version."""
        exchange.caller()
        await _respond_json(exchange, {"version": __version__})

    async def metrics(self, exchange: HttpExchange) -> None:
        """GET /metrics, for admins."""
        require_admin(exchange.caller())
        encode, content_type = choose_encoder(exchange.header(b"accept") or "")
        # On a thread, like scrapes of the metrics port: it may take milliseconds.
        text = await asyncio.to_thread(encode, self._metrics)
        await exchange.respond(200, text, content_type.encode())

    def _shown(self, model: inference_pb2.ModelInfo) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "splitserve",
            "root": model.parent or model.name,
            "parent": model.parent or None,
            "max_model_len": model.context_tokens,
        }


async def _respond_json(exchange: HttpExchange, value: dict[str, Any]) -> None:
    await exchange.respond(200, compact_json(value).encode())
