"""How the autoscaler ends, of one model and of several."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from autoscaler import service
from autoscaler.actuators.actuator import Actuator
from autoscaler.service import scaling
from splitserve.config.autoscaler import AutoscalerConfig
from splitserve.errors import ConfigError
from tests.support.scaling.fake_actuator import FakeActuator


@pytest.mark.parametrize("models", [("",), ("a", "b")])
@pytest.mark.parametrize("failure", ["", "actuator", "loops"])
async def test_actuators_close_before_the_lease_is_released(
    monkeypatch: pytest.MonkeyPatch, models: tuple[str, ...], failure: str
) -> None:
    """An order under way may be carried out until then: another that acts would not know of it."""
    ends: list[str] = []

    class Closing(FakeActuator):
        async def close(self) -> None:
            ends.append("closed")

    def make(config: AutoscalerConfig) -> Actuator | None:
        if failure == "actuator" and config.model == models[-1]:
            raise ConfigError("actuator: wrong")
        return Closing()

    @asynccontextmanager
    async def loops(actuators: Mapping[str, Actuator | None]) -> AsyncIterator[list[str]]:
        if failure == "loops":
            raise ConfigError("policy: wrong")
        yield list(actuators)
        ends.append("released")

    monkeypatch.setattr(service, "make_actuator", make)
    configs = {model: AutoscalerConfig(model=model) for model in models}
    if failure:
        with pytest.raises(ConfigError, match="wrong"):
            async with scaling(configs, loops):
                pass
        assert ends == ["closed"] * (len(models) - (failure == "actuator"))
        return
    async with scaling(configs, loops) as entered:
        assert entered == list(models)
    assert ends == ["closed"] * len(models) + ["released"]


async def test_no_actuator_needs_no_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "make_actuator", lambda _config: None)

    @asynccontextmanager
    async def loops(actuators: Mapping[str, Actuator | None]) -> AsyncIterator[Mapping[str, Actuator | None]]:
        yield actuators

    async with scaling({"": AutoscalerConfig()}, loops) as entered:
        assert entered == {"": None}
