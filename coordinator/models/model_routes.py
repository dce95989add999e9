"""Model routes: which served model handles a request for a public name. No clock, no I/O but in `load_routes`.

A route maps a public name to served models with weights. The choice is weighted rendezvous hashing (each served model
draws -ln(u)/weight from its name and the request's key, and the least draw wins; Schindelhauer and Schomaker, 2005):
a key always maps to the same model, and a changed weight or a model that comes or goes moves as few keys as possible.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from coordinator.request.inference_request import Caller, find_model
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Model
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.config.yaml_file import read_yaml_file
from splitserve.errors import ConfigError, FailedPreconditionError, InvalidArgumentError
from splitserve.generation.bounds import require
from splitserve.logs import log_event
from splitserve.runtime.reload import ReloadedFiles

MAX_ROUTES = 256
MAX_SHARES = 16
MAX_NAME = 128
MAX_WEIGHT = 1e6

Weights = Mapping[str, float]
"""Weight by served model, in the configured order."""


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """A public name and the served models behind it. A route without weights does not exist."""

    name: str
    weights: Weights

    def choose(self, key: str, among: Collection[str]) -> str | None:
        """The served model for a key, among those in `among` with a weight above 0; None if there is none."""
        eligible = [
            (model, weight) for model, weight in self.weights.items() if weight > 0 and model in among
        ]
        draws = [(_draw(self.name, model, key) / weight, model) for model, weight in eligible]
        return min(draws)[1] if draws else None


@dataclass(frozen=True, slots=True)
class Found:
    """The result of resolving a request's model name: the public name, and the served model behind it."""

    public_name: str
    model: Model


@dataclass(frozen=True, slots=True)
class Nameable:
    """A model name that a request may use. `weights` is empty unless it names a route."""

    name: str
    models: tuple[Model, ...]
    """The known models that get requests under this name; at least one."""
    weights: Weights


class ModelRoutes:
    """The routes in force. `replace` swaps them atomically: a request sees either the old routes or the new ones."""

    def __init__(
        self, registry: Registry, routes: Sequence[ModelRoute] = (), direct_names: bool = True
    ) -> None:
        self._registry = registry
        self._direct_names = direct_names
        self._routes: Mapping[str, ModelRoute] = {route.name: route for route in routes}
        self._previous: dict[str, Weights] = {}
        self._names_in_file: frozenset[str] = frozenset()
        self._ready: tuple[int, frozenset[str]] = (-1, frozenset())

    @property
    def in_force(self) -> list[ModelRoute]:
        """All routes, sorted by name."""
        return [route for _, route in sorted(self._routes.items())]

    @property
    def ready_models(self) -> frozenset[str]:
        """Served models that take requests: with a complete pair of workers, or with workers started on demand."""
        version, ready = self._ready
        if version != self._registry.version:
            snapshot = self._registry.snapshot()
            on_demand = self._registry.plan.on_demand
            waking = {
                name for name, model in self._registry.known_models().items() if model.base_name in on_demand
            }
            version, ready = self._registry.version, snapshot.ready_models() | waking
            self._ready = version, ready
        return ready

    def previous(self, name: str) -> Weights | None:
        """The weights before the route's last change, empty if it did not exist; None if it never changed."""
        return self._previous.get(name)

    def replace(self, routes: Sequence[ModelRoute]) -> None:
        """Puts routes in force atomically. Each replaces the route of its name; one without weights removes it.

        Raises InvalidArgumentError if there would be too many; nothing changes then.
        """
        changed = {**self._routes, **{route.name: route for route in routes}}
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

    def follow(self, path: Path) -> ReloadedFiles[Sequence[ModelRoute]]:
        """Puts the routes in a file into force, now and whenever it changes. Raises ConfigError.

        A change replaces the routes that the file names and removes those that it no longer names.
        """
        files: ReloadedFiles[Sequence[ModelRoute]] = ReloadedFiles(
            "model_routes",
            lambda: [path],
            lambda: load_routes(path, has_routes=bool(self._names_in_file)),
            self._adopt,
        )
        files.start()
        return files

    def _adopt(self, routes: Sequence[ModelRoute]) -> None:
        names = frozenset(route.name for route in routes)
        self.replace([*routes, *(ModelRoute(name, {}) for name in sorted(self._names_in_file - names))])
        self._names_in_file = names

    def find(self, name: str, key: str, caller: Caller) -> Found | None:
        """Resolves a model name. Requests with the same `key` get the same served model of a route.

        None while no model of the route is known. Served models without ready workers are skipped as long as another
        model of the route has some. Raises NotFoundError (MODEL_NOT_FOUND).
        """
        name = self.public_name(name, caller)
        route = self._routes.get(name)
        known = self._registry.known_models()
        if route is None or not caller.may_use(name):
            if name in known and self._is_direct(name) and caller.may_use(name):
                return Found(name, known[name])
            direct = {
                model: known[model] for model in known if self._is_direct(model) and caller.may_use(model)
            }
            only = find_model(name, direct)
            return Found(only.name, only)
        served = route.choose(key, self.ready_models) or route.choose(key, known)
        return Found(name, known[served]) if served else None

    def find_served(self, name: str, served: str, caller: Caller) -> Found | None:
        """The model `served`, with which a request for `name` began; None while it is not known.

        Raises NotFoundError (MODEL_NOT_FOUND), or FailedPreconditionError (MODEL_CHANGED) if `name` no longer stands
        for it.
        """
        name = self.public_name(name, caller)
        route = self._routes.get(name)
        if route is None or not caller.may_use(name):
            direct = self.find(name, "", caller)
            if direct is None or direct.model.name == served:
                return direct
        elif served in route.weights:
            model = self._registry.known_models().get(served)
            return Found(name, model) if model else None
        message = f"resume.served_model: {name!r} does not stand for {served[:MAX_NAME]!r} here"
        raise FailedPreconditionError(message, reason="MODEL_CHANGED", field="resume.served_model")

    def nameable(self, caller: Caller) -> list[Nameable]:
        """The names that the caller may use, sorted. Routes without a known model are left out."""
        known = self._registry.known_models()
        by_name = {
            name: Nameable(name, (model,), {}) for name, model in known.items() if self._is_direct(name)
        }
        for route in self._routes.values():
            models = tuple(
                known[model] for model, weight in route.weights.items() if weight > 0 and model in known
            )
            if models:
                by_name[route.name] = Nameable(route.name, models, route.weights)
        return [by_name[name] for name in sorted(by_name) if caller.may_use(name)]

    def public_name(self, name: str, caller: Caller) -> str:
        """The name itself. For an empty name the only route or base model behind no route that the caller may use;
        empty if there are none or several."""
        if name:
            return name
        behind_routes = {model for route in self._routes.values() for model in route.weights}
        known = self._registry.known_models()
        direct = [model for model in known if not known[model].base and model not in behind_routes]
        public = [model for model in {*self._routes, *direct} if caller.may_use(model)]
        return public[0] if len(public) == 1 else ""

    def largest_share(self, name: str) -> str:
        """The served model with the largest weight behind a route's name; any other name unchanged."""
        route = self._routes.get(name)
        return max(route.weights, key=lambda model: route.weights[model]) if route else name

    def _is_direct(self, name: str) -> bool:
        return self._direct_names or all(name not in route.weights for route in self._routes.values())


def configured_routes(config: CoordinatorConfig, registry: Registry) -> ModelRoutes:
    """The model routes of a coordinator's settings, without those of its file. Raises InvalidArgumentError."""
    routes = [
        checked_route(name, weights, f"model_routes.{name}") for name, weights in config.model_routes.items()
    ]
    return ModelRoutes(registry, routes, config.direct_model_names == "allow")


def checked_route(name: str, weights: Weights, field: str) -> ModelRoute:
    """A validated route. Raises InvalidArgumentError naming the field below `field` and its bound."""
    require(0 < len(name) <= MAX_NAME, f"{field}.name", f"1..{MAX_NAME} characters long")
    require(len(weights) <= MAX_SHARES, f"{field}.shares", f"at most {MAX_SHARES}")
    for model, weight in weights.items():
        require(0 < len(model) <= MAX_NAME, f"{field}.shares.model", f"1..{MAX_NAME} characters long")
        # NaN fails this comparison, too.
        require(0 <= weight <= MAX_WEIGHT, f"{field}.shares.weight", f"0..{MAX_WEIGHT:g}, not {weight:g}")
    require(
        not weights or any(weights.values()), f"{field}.shares", "above 0 in weight, at least one of them"
    )
    return ModelRoute(name, dict(weights))


def load_routes(path: Path, *, has_routes: bool = False) -> list[ModelRoute]:
    """The routes in a YAML file of "NAME: {MODEL: WEIGHT}". Raises ConfigError naming the line. `has_routes`: the file
    has had routes, and is refused if it is empty."""
    file = read_yaml_file(path, "model_routes_file")
    if has_routes and file.root is None:
        # The file may be half written; all routes would be removed.
        message = f"model_routes_file: {path} is empty; no routes are written {{}}"
        raise ConfigError(message, field="model_routes_file")
    with file.naming_lines():
        return [_route_in_file(name, weights) for name, weights in file.values.items()]


def _route_in_file(name: object, weights: object) -> ModelRoute:
    if not isinstance(name, str):
        raise ConfigError(f"{name!r} must be a name: a text", field=str(name))
    if not isinstance(weights, dict) or not weights:
        raise ConfigError(f"{name} must be a mapping of models to weights", field=name)
    for model, weight in weights.items():
        if not isinstance(model, str) or isinstance(weight, bool) or not isinstance(weight, int | float):
            message = f"{name}.{model} must be a model and its weight, a number (given: {weight!r})"
            raise ConfigError(message, field=f"{name}.{model}")
    try:
        return checked_route(name, weights, name)
    except InvalidArgumentError as error:
        raise ConfigError(error.message, field=name) from None


def _draw(name: str, model: str, key: str) -> float:
    digest = xxhash.xxh3_64_intdigest(f"{name}\0{model}\0{key}".encode())
    return -math.log((digest + 1) / 2**64)
