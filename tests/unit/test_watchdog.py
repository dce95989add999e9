"""A worker whose engine thread hangs between two steps ends; one that computes for long does not."""

from __future__ import annotations

import threading

import pytest

from engine import watchdog
from engine.core import EngineCore
from engine.thread import EngineThread
from engine.types import StepResult
from tests.fakes.engine_rig import Rig


class QuietListener:
    def before_step(self, core: EngineCore, now: float) -> bool:
        return False

    def after_step(self, core: EngineCore, result: StepResult, now: float) -> None:
        pass

    def close(self) -> None:
        pass


class _Left(Exception):
    pass


def _leave(code: int) -> None:
    raise _Left(code)


async def test_a_thread_that_hangs_between_steps_ends_the_process(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    hanging, release = threading.Event(), threading.Event()

    def hang(_core: EngineCore, _listener: QuietListener) -> None:
        hanging.set()
        release.wait()

    engine = EngineThread(lambda: (Rig().core, QuietListener()), name="engine-test")
    await engine.start()
    try:
        engine.post(hang)
        with pytest.raises(_Left, match=str(watchdog.EXIT_CODE)):
            await watchdog.watch(engine.between_steps_s, "w", hung_s=0.05, check_s=0.001, leave=_leave)
        assert hanging.is_set()
        assert caplog.messages == ["engine.hung"]
        assert "in hang" in capfd.readouterr().err  # the stack names the function
    finally:
        release.set()
        await engine.stop()
    assert engine.between_steps_s() == 0.0


async def test_a_sleeping_thread_does_not_hang() -> None:
    engine = EngineThread(lambda: (Rig().core, QuietListener()), name="engine-test")
    await engine.start()
    try:
        await engine.call(lambda _core, _listener: None)
        while engine.between_steps_s():  # until it has gone to sleep again
            pass
    finally:
        await engine.stop()
