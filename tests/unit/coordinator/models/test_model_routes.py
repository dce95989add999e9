"""Public model names: shares, sessions, what a changed weight moves, what can be named."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.models.model_routes import ModelRoute, ModelRoutes, checked_route, load_routes
from coordinator.models.routes_service import checked_routes
from coordinator.request.inference_request import ANYONE, Caller
from coordinator.workers.registry import Registry
from splitserve.client.routes_client import RouteState
from splitserve.config.base import merge_settings
from splitserve.config.command_line import arguments
from splitserve.config.coordinator import CoordinatorConfig, format_route, parse_route
from splitserve.errors import ConfigError, InvalidArgumentError, NotFoundError
from splitserve.v1 import registry_pb2, routes_pb2
from tests.support.cluster.registrations import registration

V1, V2 = "smollm2-v1", "smollm2-v2"
BOTH = {V1, V2}
KEYS = [f"session-{number}" for number in range(20_000)]


def chosen(weights: dict[str, float], keys: list[str] = KEYS, among: set[str] = BOTH) -> list[str | None]:
    route = ModelRoute("smollm2", weights)
    return [route.choose(key, among) for key in keys]


def test_shares_are_those_of_the_weights() -> None:
    counts = Counter(chosen({V1: 95, V2: 5}))
    assert counts[V2] / len(KEYS) == pytest.approx(0.05, abs=0.005)
    third = Counter(chosen({V1: 1, V2: 1, "v3": 2}, among={*BOTH, "v3"}))
    assert third["v3"] / len(KEYS) == pytest.approx(0.5, abs=0.015)


def test_a_session_stays_where_it_is_as_long_as_it_may() -> None:
    before = chosen({V1: 95, V2: 5})
    assert chosen({V2: 5, V1: 95}) == before
    after = chosen({V1: 80, V2: 20})
    # A larger canary keeps all its keys and gains some; none moves the other way.
    assert all(new == V2 for old, new in zip(before, after, strict=True) if old == V2)
    moved = sum(old != new for old, new in zip(before, after, strict=True))
    assert moved / len(KEYS) == pytest.approx(0.15, abs=0.01)


def test_routes_choose_independently_of_one_another() -> None:
    weights = {V1: 50.0, V2: 50.0}
    one, two = ModelRoute("one", weights), ModelRoute("two", weights)
    same = sum(one.choose(key, BOTH) == two.choose(key, BOTH) for key in KEYS)
    assert same / len(KEYS) == pytest.approx(0.5, abs=0.02)


def test_weight_0_and_absence_get_nothing() -> None:
    assert set(chosen({V1: 1, V2: 0}, KEYS[:200])) == {V1}
    assert set(chosen({V1: 95, V2: 5}, KEYS[:200], {V2})) == {V2}
    assert set(chosen({V1: 1, V2: 0}, KEYS[:200], {V2})) == {None}


@given(
    st.dictionaries(st.text(min_size=1, max_size=5), st.floats(0, 1e6), min_size=1, max_size=5),
    st.text(max_size=20),
    st.data(),
)
def test_a_choice_is_always_possible_and_only_of_what_may_serve(
    weights: dict[str, float], key: str, data: st.DataObject
) -> None:
    among = set(data.draw(st.lists(st.sampled_from(sorted(weights)))))
    found = ModelRoute("r", weights).choose(key, among)
    possible = {model for model in among if weights[model] > 0}
    assert found in possible if possible else found is None


def registry_of(*models: str, ready: bool = False) -> Registry:
    registry = Registry(5.0)
    for model in models:
        decode = registration(f"d-{model}", registry_pb2.ROLE_DECODE, model=model)
        prefill = registration(f"p-{model}", registry_pb2.ROLE_PREFILL, model=model)
        for request in (decode, prefill):
            worker = registry.register(request, 0.0)
            registry.set_output_open(worker.key, True)
            report = registry_pb2.ReportRequest(worker_id=worker.worker_id, epoch=worker.epoch)
            if ready:
                report.connected_agent_ids.append(decode.endpoint.agent_id)
                registry.report(report, 1.0)
    return registry


def found(routes: ModelRoutes, name: str, key: str = "k", caller: Caller = ANYONE) -> tuple[str, str]:
    result = routes.find(name, key, caller)
    assert result is not None
    return result.public_name, result.model.name


def test_finding_a_model() -> None:
    routes = ModelRoutes(registry_of(V1, V2, "other", ready=True), [ModelRoute("smollm2", {V1: 1, V2: 0})])
    assert found(routes, "smollm2") == ("smollm2", V1)
    assert found(routes, V2) == (V2, V2)
    assert found(routes, "other") == ("other", "other")
    for name in ("nothing", ""):
        with pytest.raises(NotFoundError):
            routes.find(name, "k", ANYONE)
    only = ModelRoutes(registry_of(V1, V2, ready=True), [ModelRoute("smollm2", {V1: 1, V2: 0})])
    assert found(only, "") == ("smollm2", V1)


def test_versions_can_be_hidden() -> None:
    routes = ModelRoutes(
        registry_of(V1, V2, "other"), [ModelRoute("smollm2", {V1: 1, V2: 1})], direct_names=False
    )
    assert [nameable.name for nameable in routes.nameable(ANYONE)] == ["other", "smollm2"]
    with pytest.raises(NotFoundError):
        routes.find(V1, "k", ANYONE)
    shadowing = ModelRoutes(registry_of(V1, V2), [ModelRoute(V1, {V1: 0, V2: 1})])
    assert found(shadowing, V1) == (V1, V2)


def test_a_version_without_ready_workers_gets_no_share() -> None:
    registry = registry_of(V1, V2)
    routes = ModelRoutes(registry, [ModelRoute("smollm2", {V1: 1, V2: 10**6})])
    assert found(routes, "smollm2") == ("smollm2", V2)  # none is ready, so the weights decide
    for worker in registry.snapshot().workers:
        if worker.model.name == V1:
            agents = [peer.agent_id for peer in registry.snapshot().workers]
            registry.report(
                registry_pb2.ReportRequest(
                    worker_id=worker.worker_id, epoch=worker.epoch, connected_agent_ids=agents
                ),
                1.0,
            )
    assert routes.ready_models == {V1}
    assert found(routes, "smollm2") == ("smollm2", V1)


def test_a_route_without_a_known_model_is_waited_for() -> None:
    routes = ModelRoutes(registry_of("other"), [ModelRoute("smollm2", {V1: 1})])
    assert routes.find("smollm2", "k", ANYONE) is None
    assert [nameable.name for nameable in routes.nameable(ANYONE)] == ["other"]


def test_replacing_remembers_what_was_before() -> None:
    routes = ModelRoutes(registry_of(V1, V2), [ModelRoute("a", {V1: 1})])
    assert routes.previous("a") is None
    routes.replace([ModelRoute("a", {V1: 9, V2: 1}), ModelRoute("b", {V2: 1})])
    assert routes.previous("a") == {V1: 1}
    assert routes.previous("b") == {}
    routes.replace([ModelRoute("a", {V1: 9, V2: 1})])
    assert routes.previous("a") == {V1: 1}, "setting the same again is no change"
    routes.replace([ModelRoute("b", {})])
    assert [route.name for route in routes.in_force] == ["a"]
    assert routes.previous("b") == {V2: 1}
    with pytest.raises(InvalidArgumentError):
        routes.replace([ModelRoute(f"r{number}", {V1: 1}) for number in range(300)])
    assert [route.name for route in routes.in_force] == ["a"]


def test_rejected_requests_count_for_the_largest_share() -> None:
    routes = ModelRoutes(registry_of(V1), [ModelRoute("a", {V2: 5, V1: 95})])
    assert (routes.largest_share("a"), routes.largest_share("x")) == (V1, "x")


@pytest.mark.parametrize(
    ("shares", "field"),
    [
        ([("m", -1.0)], "routes[0].shares.weight"),
        ([("m", float("nan"))], "routes[0].shares.weight"),
        ([("m", 1e7)], "routes[0].shares.weight"),
        ([("m", 0.0)], "routes[0].shares"),
        ([("", 1.0)], "routes[0].shares.model"),
        ([("m", 1.0), ("m", 2.0)], "routes[0].shares"),
        ([(f"m{n}", 1.0) for n in range(17)], "routes[0].shares"),
    ],
)
def test_bad_routes_are_named(shares: list[tuple[str, float]], field: str) -> None:
    route = routes_pb2.ModelRoute(name="a")
    for model, weight in shares:
        route.shares.add(model=model, weight=weight)
    with pytest.raises(InvalidArgumentError) as caught:
        checked_routes(routes_pb2.SetRoutesRequest(routes=[route]))
    assert caught.value.field == field


def test_names_must_be_given_once() -> None:
    route = routes_pb2.ModelRoute(name="a", shares=[routes_pb2.RouteShare(model="m", weight=1)])
    with pytest.raises(InvalidArgumentError, match="twice"):
        checked_routes(routes_pb2.SetRoutesRequest(routes=[route, route]))
    with pytest.raises(InvalidArgumentError):
        checked_route("", {"m": 1}, "routes[0]")


def test_settings_and_options_say_the_same() -> None:
    weights: dict[str, Any] = {"smollm2": {V1: 95.0, V2: 5.0}}
    config = merge_settings(CoordinatorConfig, {"model_routes": [f"smollm2={V1}:95,{V2}:5"]})
    assert config.model_routes == weights
    assert arguments(config) == ["--model-route", f"smollm2={V1}:95,{V2}:5"]
    assert parse_route(format_route("smollm2", weights["smollm2"])) == ("smollm2", weights["smollm2"])
    for wrong in ("smollm2", "=m:1", "a=m:x", "a=m", "a=m:1,m:2"):
        with pytest.raises(ConfigError):
            merge_settings(CoordinatorConfig, {"model_routes": [wrong]})


def test_shown_shares() -> None:
    state = RouteState("a", {V1: 95, V2: 5, "v3": 0}, None, frozenset({V1, V2}))
    assert [state.share(model) for model in (V1, V2, "v3", "x")] == [0.95, 0.05, 0.0, 0.0]
    alone = RouteState("a", {V1: 95, V2: 5}, None, frozenset({V2}))
    assert [alone.share(V1), alone.share(V2)] == [0.0, 1.0]


def test_a_file_cut_short_removes_no_routes(tmp_path: Path) -> None:
    path = tmp_path / "routes.yaml"
    path.write_text("smollm2: {v1: 1}\n")
    assert [route.name for route in load_routes(path, has_routes=True)] == ["smollm2"]
    for text in ("", "# nothing\n"):
        path.write_text(text)
        assert load_routes(path) == []
        with pytest.raises(ConfigError, match=r"is empty; no routes are written \{\}"):
            load_routes(path, has_routes=True)
    path.write_text("{}")
    assert load_routes(path, has_routes=True) == []


def test_an_empty_file_of_routes_is_one_without_routes_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "routes.yaml"
    path.write_text("# none yet\n")
    routes = ModelRoutes(registry_of(V1), [])
    file = routes.follow(path)
    path.write_text("smollm2: {v1: 1}\n")
    assert file.reload()
    path.write_text("")
    assert not file.reload()
    assert "is empty" in file.problem
    assert [route.name for route in routes.in_force] == ["smollm2"]
    path.write_text("{}")
    assert file.reload()
    assert not routes.in_force
    path.write_text("")
    assert file.reload()
