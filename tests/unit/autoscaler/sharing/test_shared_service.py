"""How the autoscaler of several models ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscaler.sharing import shared_service
from autoscaler.sharing.models_file import ModelsInForce, SharedModels
from autoscaler.sharing.shared_account import SharedAccount
from autoscaler.sharing.shared_service import ModelLoops, serve_models
from splitserve.config.autoscaler import AutoscalerConfig
from splitserve.errors import ConfigError
from tests.support.scaling.fake_actuator import FakeActuator


@pytest.mark.parametrize("starts", [True, False])
async def test_actuators_close_before_the_lease_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    """An order under way may be carried out until then: another that acts would not know of it."""
    path = tmp_path / "models.yaml"
    path.write_text(yaml.safe_dump({"models": [{"name": "a", "policy": "a.yaml"}]}))
    ends: list[str] = []

    class Closing(FakeActuator):
        async def close(self) -> None:
            ends.append("closed")

    @asynccontextmanager
    async def model_loops(shared: SharedModels, *_given: Any, **_settings: Any) -> AsyncIterator[ModelLoops]:
        if not starts:
            raise ConfigError("policy: wrong")
        yield ModelLoops({}, SharedAccount({}, {}), {}, {}, ModelsInForce(shared))
        ends.append("released")

    async def at_once(*_given: Any) -> None:
        return

    monkeypatch.setattr(shared_service, "make_actuator", lambda _config: Closing())
    monkeypatch.setattr(shared_service, "model_loops", model_loops)
    monkeypatch.setattr(shared_service, "run_until", at_once)
    config = AutoscalerConfig.model_validate({"models": str(path), "metrics_port": 0})
    if starts:
        await serve_models(config)
        assert ends == ["closed", "released"]
    else:
        with pytest.raises(ConfigError, match="policy: wrong"):
            await serve_models(config)
        assert ends == ["closed"]
