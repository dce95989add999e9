"""The clock of records."""

from __future__ import annotations

import pytest

from tests.unit.coordinator.telemetry.test_record import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)
