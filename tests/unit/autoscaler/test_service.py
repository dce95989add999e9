"""How the autoscaler ends, and that plans reach every coordinator, also when another one fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType

import pytest

from autoscaler.reconcile import PlannedRotation
from autoscaler.service import CoordinatorRotation, closed_first
from splitserve.client.scaling_client import ScalingClient
from splitserve.errors import ConfigError, UnavailableError
from splitserve.v1 import registry_pb2, scaling_pb2
from tests.support.scaling.fake_actuator import FakeActuator


@pytest.mark.parametrize("fails", [False, True])
async def test_the_actuator_closes_before_the_lease_is_released(fails: bool) -> None:
    """An order under way may be carried out until then: another that acts would not know of it."""
    ends: list[str] = []

    class Closing(FakeActuator):
        async def close(self) -> None:
            ends.append("closed")

    @asynccontextmanager
    async def loop() -> AsyncIterator[str]:
        if fails:
            raise ConfigError("policy: wrong")
        yield "loop"
        ends.append("released")

    if fails:
        with pytest.raises(ConfigError, match="wrong"):
            async with closed_first(Closing(), loop()):
                pass
        assert ends == ["closed"]
        return
    async with closed_first(Closing(), loop()) as entered:
        assert entered == "loop"
    assert ends == ["closed", "released"]


async def test_no_actuator_needs_no_closing() -> None:
    @asynccontextmanager
    async def loop() -> AsyncIterator[int]:
        yield 7

    async with closed_first(None, loop()) as entered:
        assert entered == 7


class Told(ScalingClient):
    """A coordinator that records plans, or is unreachable."""

    def __init__(self, target: str, away: bool = False) -> None:
        self.target = target
        self.away = away
        self.plans: list[tuple[object, ...]] = []

    async def apply_plan(
        self,
        *,
        standby: Iterable[str] = (),
        active: Iterable[str] = (),
        valid_s: float = 30.0,
        lease_number: int = 0,
        decisions: Iterable[scaling_pb2.PoolDecision] = (),
        roles: Mapping[str, str] = MappingProxyType({}),
        on_demand: Iterable[registry_pb2.ServedModel] = (),
    ) -> scaling_pb2.ApplyPlanResponse:
        if self.away:
            raise UnavailableError("no answer")
        self.plans.append((list(standby), list(active), valid_s))
        self.decisions, self.on_demand = list(decisions), list(on_demand)
        self.roles = dict(roles)
        return scaling_pb2.ApplyPlanResponse()


async def test_all_coordinators_get_the_same_plan() -> None:
    clients = [Told("a:1"), Told("b:2")]
    why = scaling_pb2.PoolDecision(reason="busy")
    x = frozenset({"x"})
    where = PlannedRotation(standby=x, active=frozenset({"z", "y"}), roles={"z": "decode"})
    await CoordinatorRotation(clients).apply(where, [why], 60.0)
    assert clients[0].roles == clients[1].roles == {"z": "decode"}
    assert clients[0].decisions == clients[1].decisions == [why]
    assert clients[0].plans == clients[1].plans == [(["x"], ["y", "z"], 60.0)]


async def test_the_others_get_the_plan_when_one_is_unreachable() -> None:
    clients = [Told("a:1", away=True), Told("b:2")]
    with pytest.raises(UnavailableError, match="a:1: no answer"):
        await CoordinatorRotation(clients).apply(PlannedRotation(), [], 60.0)
    assert clients[1].plans


async def test_plans_name_the_models_whose_workers_are_started_on_demand() -> None:
    client, models = Told("a:1"), [registry_pb2.ServedModel(name="m")]
    rotation = CoordinatorRotation([client], on_demand=lambda: models)
    await rotation.apply(PlannedRotation(), [], 60.0)
    assert client.on_demand == models
    models.clear()
    await rotation.apply(PlannedRotation(), [], 60.0)
    assert client.on_demand == []
