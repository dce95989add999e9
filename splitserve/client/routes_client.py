"""Reads and sets the model routes of coordinators."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import grpc
from google.protobuf.message import Message

from splitserve.addresses import check_address
from splitserve.errors import FailedPreconditionError, SplitserveError
from splitserve.rpc.channel import make_channel
from splitserve.rpc.credentials import ClusterCredentials, Metadata
from splitserve.rpc.status import error_from_rpc
from splitserve.security.api_keys import checked_key, key_metadata
from splitserve.security.tls import TlsFiles
from splitserve.v1 import routes_pb2
from splitserve.v1.routes_pb2_grpc import RoutesServiceStub

if TYPE_CHECKING:
    from splitserve.v1.routes_pb2_grpc import RoutesServiceAsyncStub

TIMEOUT_S = 5.0

Weights = Mapping[str, float]
"""Weights by served model."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RouteState:
    """A route of one coordinator. `previous` is None unless the route changed since the coordinator started."""

    name: str
    weights: Weights
    previous: Weights | None
    ready_models: frozenset[str]

    def share(self, model: str) -> float:
        """Share of new requests that a served model gets now, 0..1."""
        if not self.weights.get(model):
            return 0.0
        wanted = {name: weight for name, weight in self.weights.items() if weight > 0}
        ready = {name: weight for name, weight in wanted.items() if name in self.ready_models} or wanted
        return ready.get(model, 0.0) / sum(ready.values())


class RoutesClient:
    """Routes of several coordinators ("host:port"), kept equal. Every call has a deadline of `TIMEOUT_S`.

    With tenants, `api_key` must be an admin's; without tenants, `token` is the cluster token, if one is set.
    """

    def __init__(
        self,
        targets: Sequence[str],
        *,
        api_key: str | None = None,
        tls: TlsFiles | None = None,
        token: str | None = None,
    ) -> None:
        self.targets = [check_address(target, "target") for target in targets]
        self._security = ClusterCredentials(tls, token)
        self._metadata: Metadata = (*self._security.metadata, *key_metadata(checked_key(api_key)))

    async def routes(self) -> dict[str, list[RouteState] | SplitserveError]:
        """The routes of each coordinator, or its error."""
        answers = await self._ask_each(lambda stub: stub.GetRoutes, routes_pb2.GetRoutesRequest())
        return {
            target: answer
            if isinstance(answer, SplitserveError)
            else [_state(route) for route in answer.routes]
            for target, answer in answers.items()
        }

    async def set(self, name: str, weights: Weights) -> dict[str, list[str] | SplitserveError]:
        """Replaces a route on all coordinators, or removes it if `weights` is empty. Atomic on each coordinator.

        Returns, for each, the route's models that it does not know, or its error.
        """
        shares = [routes_pb2.RouteShare(model=model, weight=weight) for model, weight in weights.items()]
        request = routes_pb2.SetRoutesRequest(routes=[routes_pb2.ModelRoute(name=name, shares=shares)])
        answers = await self._ask_each(lambda stub: stub.SetRoutes, request)
        return {
            target: answer if isinstance(answer, SplitserveError) else list(answer.unknown_models)
            for target, answer in answers.items()
        }

    async def previous(self, name: str) -> Weights:
        """The route's weights before its last change, from the first coordinator that knows them.

        If none does, raises the first coordinator's error, or FailedPreconditionError (NO_PREVIOUS_ROUTE).
        """
        errors: list[SplitserveError] = []
        for routes in (await self.routes()).values():
            if isinstance(routes, SplitserveError):
                errors.append(routes)
                continue
            for route in routes:
                if route.name == name and route.previous is not None:
                    return route.previous
        if errors:
            raise errors[0]
        message = (
            f"route {name!r} was not changed since the coordinators' start: there is nothing to go back to"
        )
        raise FailedPreconditionError(message, reason="NO_PREVIOUS_ROUTE")

    async def _ask_each(
        self, method: Callable[[RoutesServiceAsyncStub], Callable[..., Awaitable[T]]], request: Message
    ) -> dict[str, T | SplitserveError]:
        async def ask(target: str) -> T | SplitserveError:
            async with make_channel(target, tls=self._security.tls) as channel:
                try:
                    call = method(RoutesServiceStub(channel))
                    return await call(request, timeout=TIMEOUT_S, metadata=self._metadata)
                except grpc.aio.AioRpcError as error:
                    return error_from_rpc(error)

        return dict(zip(self.targets, await asyncio.gather(*map(ask, self.targets)), strict=True))


def _state(route: routes_pb2.RouteInForce) -> RouteState:
    return RouteState(
        name=route.route.name,
        weights={share.model: share.weight for share in route.route.shares},
        previous={share.model: share.weight for share in route.previous} if route.changed else None,
        ready_models=frozenset(route.ready_models),
    )
