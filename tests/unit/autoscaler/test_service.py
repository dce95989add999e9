"""How the autoscaler ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from autoscaler.service import closed_first
from splitserve.errors import ConfigError
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
