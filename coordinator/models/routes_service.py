"""RoutesService: administrators read and replace model routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from coordinator.models.model_routes import ModelRoute, ModelRoutes, Weights, checked_route
from coordinator.tenants.access_control import AccessControl
from coordinator.workers.registry import Registry
from splitserve.errors import InvalidArgumentError
from splitserve.v1 import routes_pb2
from splitserve.v1.routes_pb2_grpc import RoutesServiceServicer


@dataclass(eq=False)
class RoutesService(RoutesServiceServicer):
    """Shows and replaces the routes of this coordinator."""

    routes: ModelRoutes
    registry: Registry
    access: AccessControl
    coordinator_id: str

    @override
    async def GetRoutes(
        self, request: routes_pb2.GetRoutesRequest, context: Any
    ) -> routes_pb2.GetRoutesResponse:
        self.access.require_operator(context)
        return routes_pb2.GetRoutesResponse(
            coordinator_id=self.coordinator_id,
            routes=[self._in_force(route) for route in self.routes.in_force],
        )

    @override
    async def SetRoutes(
        self, request: routes_pb2.SetRoutesRequest, context: Any
    ) -> routes_pb2.SetRoutesResponse:
        self.access.require_operator(context)
        routes = checked_routes(request)
        self.routes.replace(routes)
        named = {model for route in routes for model in route.weights}
        return routes_pb2.SetRoutesResponse(
            coordinator_id=self.coordinator_id,
            unknown_models=sorted(named - self.registry.known_models().keys()),
        )

    def _in_force(self, route: ModelRoute) -> routes_pb2.RouteInForce:
        previous = self.routes.previous(route.name)
        return routes_pb2.RouteInForce(
            route=routes_pb2.ModelRoute(name=route.name, shares=_shares(route.weights)),
            changed=previous is not None,
            previous=_shares(previous or {}),
            ready_models=sorted(self.routes.ready_models & route.weights.keys()),
        )


def checked_routes(request: routes_pb2.SetRoutesRequest) -> list[ModelRoute]:
    """The validated routes of a request. Raises InvalidArgumentError naming field and bound."""
    routes: dict[str, ModelRoute] = {}
    for number, route in enumerate(request.routes):
        field = f"routes[{number}]"
        weights = {share.model: share.weight for share in route.shares}
        if len(weights) < len(route.shares):
            raise InvalidArgumentError(f"{field}.shares name a model twice", field=f"{field}.shares")
        if route.name in routes:
            raise InvalidArgumentError(f"{field}.name is given twice", field=f"{field}.name")
        routes[route.name] = checked_route(route.name, weights, field)
    return list(routes.values())


def _shares(weights: Weights) -> list[routes_pb2.RouteShare]:
    return [routes_pb2.RouteShare(model=model, weight=weight) for model, weight in weights.items()]
