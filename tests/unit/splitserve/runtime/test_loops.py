"""Loops that fail are started again, are counted, and end nothing else."""

from __future__ import annotations

import asyncio

import pytest

from splitserve.runtime import loops
from splitserve.runtime.loops import LoopRunner
from tests.support.journal import Journal


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "FIRST_PAUSE_S", 0.001)


def failures(runner: LoopRunner) -> dict[str, float]:
    return {
        sample.labels["loop"]: sample.value
        for sample in runner.metric().samples
        if sample.name.endswith("_total")
    }


@pytest.mark.parametrize(
    "error",
    [ValueError("bad"), UnicodeError("label empty"), ExceptionGroup("two", [KeyError(1)]), MemoryError()],
)
async def test_a_loop_that_fails_runs_again(error: Exception) -> None:
    runs: Journal[str] = Journal()
    runner = LoopRunner()

    async def loop() -> None:
        runs.add("run")
        if len(runs.entries) < 3:
            raise error
        await asyncio.Event().wait()

    async def neighbour() -> None:
        await runs.wait(3)

    async with asyncio.TaskGroup() as group:
        bad = group.create_task(runner.run("bad", loop))
        good = group.create_task(runner.run("good", neighbour))
        await good
        assert failures(runner) == {"bad": 2, "good": 0}
        bad.cancel()
    assert bad.cancelled()


async def test_cancellation_from_outside_ends_it() -> None:
    runner, began = LoopRunner(), asyncio.Event()

    async def loop() -> None:
        began.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(runner.run("loop", loop))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert failures(runner) == {"loop": 0}


async def test_a_loop_that_fails_while_it_is_cancelled_is_not_started_again() -> None:
    runs: Journal[str] = Journal()
    runner = LoopRunner()

    async def loop() -> None:
        runs.add("run")
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("it cannot be closed")

    task = asyncio.create_task(runner.run("loop", loop))
    await runs.wait(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (len(runs.entries), failures(runner)) == (1, {"loop": 1})


async def test_a_library_that_cancels_what_is_awaited_does_not_end_it() -> None:
    runs: Journal[str] = Journal()

    async def loop() -> None:
        runs.add("run")
        if len(runs.entries) == 1:
            call = asyncio.get_running_loop().create_future()
            call.cancel()
            await call

    runner = LoopRunner()
    await runner.run("loop", loop)
    assert len(runs.entries) == 2
    assert failures(runner) == {"loop": 1}


async def test_the_pause_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def note(pause_s: float) -> None:
        pauses.append(pause_s)

    monkeypatch.setattr(loops.asyncio, "sleep", note)
    monkeypatch.setattr(
        loops, "FIRST_PAUSE_S", 10.0
    )  # a run that lasts longer than the last pause ends the row
    monkeypatch.setattr(loops, "LAST_PAUSE_S", 40.0)

    async def loop() -> None:
        if len(pauses) < 4:
            raise RuntimeError("again")

    await LoopRunner().run("loop", loop)
    assert pauses == [10.0, 20.0, 40.0, 40.0]
