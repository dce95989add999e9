"""An engine thread that hangs, in a step or between two, ends its process; a slow or stopped one does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from engine.core.engine import StepResult
from engine.core.engine_core import EngineCore
from engine.core.model_runner import SampledToken, ScheduledSequence
from tests.support.engine.engine_rig import Rig, Script, request
from tests.support.virtual_time import run_in_virtual_time
from worker import engine_thread
from worker.engine_thread import (
    CLOSE_S,
    Activity,
    EngineThread,
    HangClock,
    end_engine,
    step_limit_s,
    watch_for_hangs,
)


class QuietListener:
    def before_step(self, core: EngineCore, now: float) -> bool:
        return False

    def after_step(self, core: EngineCore, result: StepResult, now: float) -> None:
        pass

    def close(self) -> None:
        pass


class _Left(Exception):
    pass


class Watched:
    """A watcher of an engine thread, and what it does."""

    def __init__(self, engine: EngineThread) -> None:
        self.engine = engine
        self.did: list[str] = []

    async def run(self) -> None:
        await watch_for_hangs(self.engine.activity, "w", self._not_serving, check_s=0.001, leave=self._leave)

    async def _not_serving(self) -> None:
        self.did.append("not serving")

    def _leave(self, code: int) -> None:
        self.did.append(f"left with {code}")
        raise _Left


class Hanging(Script):
    """A device that hangs until it is released."""

    hanging = threading.Event()
    release = threading.Event()

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        self.hanging.set()
        self.release.wait()
        return super().execute(batch)


async def test_a_thread_that_hangs_between_steps_ends_the_process(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, release = threading.Event(), threading.Event()

    def hang(_core: EngineCore) -> None:
        hanging.set()
        release.wait()

    monkeypatch.setattr("worker.engine_thread.BETWEEN_STEPS_S", 0.2)
    engine = EngineThread(lambda: (Rig().core, QuietListener()), name="engine-test")
    watched = Watched(engine)
    await engine.start()
    try:
        engine.post(hang)
        with pytest.raises(_Left):
            await watched.run()
        assert hanging.is_set()
        assert watched.did == ["not serving", f"left with {engine_thread.EXIT_CODE}"]
        assert caplog.messages == ["engine.hung"]
        assert "in hang" in capfd.readouterr().err  # the stack names the function
    finally:
        release.set()
        await engine.stop()
    assert engine.activity() is None


async def test_a_step_that_hangs_ends_the_process(caplog: pytest.LogCaptureFixture) -> None:
    engine = EngineThread(
        lambda: (Rig(kind=Hanging).core, QuietListener()), name="engine-test", hung_step_s=0.2
    )
    watched = Watched(engine)
    await engine.start()
    try:
        await engine.call(lambda core: core.add_request(request(max_tokens=2)))
        with pytest.raises(_Left):
            await watched.run()
        assert Hanging.hanging.is_set()
        (record,) = caplog.records
        assert record.__dict__["event_fields"]["during"] == "in a step"
        assert watched.did == ["not serving", f"left with {engine_thread.EXIT_CODE}"]
    finally:
        Hanging.release.set()
        await engine.stop()


async def test_a_process_that_cannot_say_goodbye_is_left_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_thread, "GOODBYE_S", 0.01)

    def leave(code: int) -> None:
        raise _Left(code)

    hung = Activity("in a step", 0.0)
    with pytest.raises(_Left, match="70"):
        await watch_for_hangs(lambda: hung, "w", lambda: asyncio.sleep(3600), check_s=0.001, leave=leave)


def test_an_engine_that_does_not_end_ends_the_process(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def end(stop_s: float) -> str:
        def leave(code: int) -> None:
            raise _Left(code)

        try:
            await end_engine(asyncio.sleep(stop_s), "w", CLOSE_S, leave)
        except _Left as left:
            return str(left)
        return "ended"

    assert run_in_virtual_time(end(CLOSE_S - 1.0)) == ("ended", CLOSE_S - 1.0)
    assert not caplog.messages
    assert run_in_virtual_time(end(3600.0)) == (str(engine_thread.EXIT_CODE), CLOSE_S)
    assert caplog.messages == ["engine.stop_overdue"]
    assert "in end_engine" in capfd.readouterr().err


async def test_what_the_end_of_an_engine_raises_is_raised() -> None:
    async def stop() -> None:
        raise _Left("broken")

    with pytest.raises(_Left, match="broken"):
        await end_engine(stop(), "w", CLOSE_S)


async def test_a_sleeping_thread_does_not_hang() -> None:
    engine = EngineThread(lambda: (Rig().core, QuietListener()), name="engine-test")
    await engine.start()
    try:
        await engine.call(lambda _core: None)
        while engine.activity() is not None:  # until it has gone to sleep again
            pass
    finally:
        await engine.stop()


def lasts(looks: Callable[[int], float], activity: Activity | None, count: int = 100) -> bool:
    """Whether one activity counts as hung at the last of so many looks at these times."""
    clock = HangClock(looks(0), max_tick_s=0.5)
    return [clock.look(activity, looks(n)) for n in range(count)][-1]


def test_only_time_in_which_the_watcher_ran_counts() -> None:
    step = Activity("in a step", limit_s=20.0)
    assert lasts(lambda n: 0.25 * n, step)
    assert not lasts(lambda n: 0.25 * n, None)
    assert not lasts(lambda n: 0.25 * n, step, count=70)
    # Stopped for an hour, again and again: each counts for half a second.
    assert not lasts(lambda n: 3600.0 * n, step, count=30)


def test_each_activity_counts_by_itself() -> None:
    clock = HangClock(0.0, max_tick_s=1.0)
    for n in range(100):
        assert not clock.look(Activity("in a step", limit_s=3.0), float(n))
    step = Activity("in a step", limit_s=3.0)
    assert [clock.look(step, 100.0 + n) for n in range(4)] == [False, False, False, True]
    assert clock.seconds == pytest.approx(3.0)


def test_the_limit_of_a_step_is_bounded_below_and_above() -> None:
    assert step_limit_s(0.01, 60.0) == 60.0
    assert step_limit_s(10.0, 60.0) == 200.0
    assert step_limit_s(1000.0, 60.0) == 600.0
    assert step_limit_s(None, 60.0) == 600.0
