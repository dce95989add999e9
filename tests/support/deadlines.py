"""Deadlines of the product that pass when a test says so, not by the clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest


def kept_timeouts(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> list[asyncio.Timeout]:
    """Every `asyncio.timeout` of exactly this delay from now on, so that a test can let it pass."""
    kept: list[asyncio.Timeout] = []
    make = asyncio.timeout

    def timeout(delay: float | None) -> asyncio.Timeout:
        made = make(delay)
        if delay == delay_s:
            kept.append(made)
        return made

    monkeypatch.setattr(asyncio, "timeout", timeout)
    return kept


def kept_timers(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> list[asyncio.TimerHandle]:
    """Every `call_later` of exactly this delay on the running loop from now on."""
    kept: list[asyncio.TimerHandle] = []
    loop = asyncio.get_running_loop()
    make = loop.call_later

    def call_later(delay: float, callback: Callable[..., object], *args: Any, **more: Any) -> Any:
        made = make(delay, callback, *args, **more)
        if delay == delay_s:
            kept.append(made)
        return made

    monkeypatch.setattr(loop, "call_later", call_later)
    return kept


def passes_now(deadline: asyncio.Timeout | asyncio.TimerHandle) -> None:
    """Lets a deadline pass that has not passed yet and is still in force."""
    if isinstance(deadline, asyncio.Timeout):
        deadline.reschedule(asyncio.get_running_loop().time())
        return
    assert not deadline.cancelled()
    deadline._run()
    deadline.cancel()
