"""Public model names: which served model answers a request for one. No I/O, no clock.

A route maps a public name to served models with weights. The choice is a weighted rendezvous hash (each served model
draws -ln(u)/weight from its name and the request's key, the least one wins; Schindelhauer and Schomaker, 2005), so
that one key always has the same model, and a changed weight or a model that comes or goes moves no more keys than it
must.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from coordinator.caller import Caller
from coordinator.pools import Model
from coordinator.registry import Registry
from coordinator.request_validation import find_model
from splitserve.errors import InvalidArgumentError
from splitserve.logs import log_event

MAX_ROUTES = 256
MAX_SHARES = 16
MAX_NAME = 128
MAX_WEIGHT = 1e6

Weights = Mapping[str, float]
"""Weight by served model, in the order in which they were given."""


@dataclass(frozen=True, slots=True)
class Route:
    """A public name and what stands behind it; without weights: nothing, it does not exist."""

    name: str
    weights: Weights

    def choose(self, key: str, among: Collection[str]) -> str | None:
        """The served model for a key, of those in `among` with a weight above 0; None when there is none."""
        wanted = [(model, weight) for model, weight in self.weights.items() if weight > 0 and model in among]
        drawn = [(_draw(self.name, model, key) / weight, model) for model, weight in wanted]
        return min(drawn)[1] if drawn else None


@dataclass(frozen=True, slots=True)
class Found:
    """What a request's model name leads to."""

    public_name: str
    model: Model


@dataclass(frozen=True, slots=True)
class Nameable:
    """A name that a request may carry. `weights` is empty unless it is a route's."""

    name: str
    models: tuple[Model, ...]
    """Those that are known and get requests under this name; at least one."""
    weights: Weights


class ModelRoutes:
    """The routes in force. One `replace` is one swap: every request finds the old routes or the new ones."""

    def __init__(self, registry: Registry, routes: Sequence[Route] = (), direct_names: bool = True) -> None:
        self._registry = registry
        self._direct_names = direct_names
        self._routes: Mapping[str, Route] = {route.name: route for route in routes}
        self._previous: dict[str, Weights] = {}
        self._ready: tuple[int, frozenset[str]] = (-1, frozenset())

    @property
    def in_force(self) -> list[Route]:
        """All routes, in order of their names."""
        return [route for _, route in sorted(self._routes.items())]

    @property
    def ready_models(self) -> frozenset[str]:
        """Served models that have a complete pair of workers."""
        version, ready = self._ready
        if version != self._registry.version:
            snapshot = self._registry.snapshot()
            version, ready = self._registry.version, snapshot.ready_models()
            self._ready = version, ready
        return ready

    def previous(self, name: str) -> Weights | None:
        """The weights before the route's last change, empty if it did not exist; None: it was never changed."""
        return self._previous.get(name)

    def replace(self, routes: Sequence[Route]) -> None:
        """Puts routes in force, all at once, each in place of that of its name.

        Raises InvalidArgumentError when there would be too many; nothing changes then.
        """
        changed = dict(self._routes)
        for route in routes:
            changed[route.name] = route
        changed = {name: route for name, route in changed.items() if route.weights}
        if len(changed) > MAX_ROUTES:
            raise InvalidArgumentError(
                f"there may be {MAX_ROUTES} routes, not {len(changed)}", field="routes"
            )
        for route in routes:
            before = self._routes.get(route.name)
            if before is None or before.weights != route.weights:
                self._previous[route.name] = before.weights if before else {}
        while len(self._previous) > 2 * MAX_ROUTES:
            del self._previous[next(iter(self._previous))]
        self._routes = changed
        for route in routes:
            log_event("route.set", model=route.name, weights=dict(route.weights))

    def find(self, name: str, key: str, caller: Caller) -> Found | None:
        """Where a request for `name` goes; `key` keeps those together that carry the same one.

        None while no model of the route is known. Served models without ready workers are passed over as long as
        another one of the route has them. Raises NotFoundError (MODEL_NOT_FOUND).
        """
        name = self.public_name(name, caller)
        route = self._routes.get(name)
        known = self._registry.known_models()
        if route is None or not caller.may_use(name):
            if name in known and self._is_direct(name) and caller.may_use(name):
                return Found(name, known[name])
            direct = {n: known[n] for n in known if self._is_direct(n) and caller.may_use(n)}
            model = find_model(name, direct)
            return Found(model.name, model)
        served = route.choose(key, self.ready_models) or route.choose(key, known)
        return Found(name, known[served]) if served else None

    def nameable(self, caller: Caller) -> list[Nameable]:
        """The names that the caller may use, in order; routes of which no model is known are left out."""
        known = self._registry.known_models()
        found = {n: Nameable(n, (model,), {}) for n, model in known.items() if self._is_direct(n)}
        for route in self._routes.values():
            models = tuple(
                known[model] for model, weight in route.weights.items() if weight > 0 and model in known
            )
            if models:
                found[route.name] = Nameable(route.name, models, route.weights)
        return [found[name] for name in sorted(found) if caller.may_use(name)]

    def public_name(self, name: str, caller: Caller) -> str:
        """The name itself, or for an empty one the only name that it can stand for; empty when there is none such."""
        if name:
            return name
        public = self._public_names(caller)
        return public[0] if len(public) == 1 else ""

    def largest_share(self, name: str) -> str:
        """The served model with the largest weight behind a route's name; any other name as it is."""
        route = self._routes.get(name)
        return max(route.weights, key=lambda model: route.weights[model]) if route else name

    def _public_names(self, caller: Caller) -> list[str]:
        """What an empty name can stand for: routes, and served models that are behind none."""
        behind = {model for route in self._routes.values() for model in route.weights}
        names = [n for n in self._registry.known_models() if n not in behind and n not in self._routes]
        return [n for n in (*self._routes, *names) if caller.may_use(n)]

    def _is_direct(self, name: str) -> bool:
        return self._direct_names or all(name not in route.weights for route in self._routes.values())


def checked_route(name: str, weights: Weights, field: str) -> Route:
    """A route from outside. Raises InvalidArgumentError naming what is wrong below `field`."""
    _require(0 < len(name) <= MAX_NAME, f"{field}.name", f"1..{MAX_NAME} characters long")
    _require(len(weights) <= MAX_SHARES, f"{field}.shares", f"at most {MAX_SHARES}")
    for model, weight in weights.items():
        _require(0 < len(model) <= MAX_NAME, f"{field}.shares.model", f"1..{MAX_NAME} characters long")
        # Written so that NaN is refused.
        _require(0 <= weight <= MAX_WEIGHT, f"{field}.shares.weight", f"0..{MAX_WEIGHT:g}, not {weight:g}")
    _require(
        not weights or any(weights.values()), f"{field}.shares", "above 0 in weight, at least one of them"
    )
    return Route(name, dict(weights))


def _draw(name: str, model: str, key: str) -> float:
    digest = xxhash.xxh3_64_intdigest(f"{name}\0{model}\0{key}".encode())
    return -math.log((digest + 1) / 2**64)


def _require(condition: bool, field: str, bound: str) -> None:
    if not condition:
        raise InvalidArgumentError(f"{field} must be {bound}", field=field)
