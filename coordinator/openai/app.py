"""The paths of the OpenAI-compatible face."""

from __future__ import annotations

from typing import Literal

from starlette.routing import Route, Router
from starlette.types import Receive, Scope
from starlette.types import Send as AsgiSend

from coordinator.front_door import FrontDoor
from coordinator.openai.completions import Completions
from coordinator.openai.endpoint import Call, Desk, Endpoint, Serve
from coordinator.openai.errors import HttpRefusal
from coordinator.openai.pages import Pages
from splitserve.metrics import Read

Method = Literal["GET", "POST"]


class Path:
    """One path: its endpoint for one method, 405 for the others."""

    def __init__(self, method: Method, serve: Serve) -> None:
        self._methods = ("GET", "HEAD") if method == "GET" else ("POST",)
        self._endpoint = Endpoint(serve)
        self._other = Endpoint(self._refuse)

    async def __call__(self, scope: Scope, receive: Receive, send: AsgiSend) -> None:
        """ASGI."""
        endpoint = self._endpoint if scope["method"] in self._methods else self._other
        await endpoint(scope, receive, send)

    async def _refuse(self, call: Call) -> None:
        allowed = ", ".join(self._methods)
        headers = [(b"allow", allowed.encode())]
        raise HttpRefusal(405, f"this path takes {allowed} only", "METHOD_NOT_ALLOWED", headers)


def make_app(door: FrontDoor, read_metrics: Read, max_body_bytes: int) -> Router:
    """The ASGI application."""
    desk = Desk(door, max_body_bytes)
    completions, pages = Completions(desk), Pages(desk, read_metrics)
    paths: list[tuple[str, Method, Serve]] = [
        ("/v1/chat/completions", "POST", completions.chat),
        ("/v1/completions", "POST", completions.completion),
        ("/v1/models", "GET", pages.models),
        ("/v1/models/{model:path}", "GET", pages.model),
        ("/health", "GET", pages.health),
        ("/ready", "GET", pages.ready),
        ("/metrics", "GET", pages.metrics),
        ("/version", "GET", pages.version),
    ]
    routes = [Route(path, Path(method, serve)) for path, method, serve in paths]
    # Starlette's application would wrap every `send` twice; errors are answered in Endpoint already.
    return Router(routes, redirect_slashes=False, default=Endpoint(_unknown))


async def _unknown(call: Call) -> None:
    raise HttpRefusal(404, "there is nothing at this path", "NOT_FOUND")
