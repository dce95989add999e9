"""A process that is told to stop while it starts, and variables that are set meanwhile."""

from __future__ import annotations

import asyncio
import os

import pytest

from splitserve.errors import NotFoundError
from splitserve.runtime.process import environment_with, unless_stopped
from tests.support.virtual_time import run_in_virtual_time


class _LeftError(Exception):
    pass


def leave(code: int) -> None:
    raise _LeftError(code)


async def test_a_start_that_is_not_stopped_has_its_result() -> None:
    async def start() -> int:
        await asyncio.sleep(0)
        return 7

    assert await unless_stopped(start(), asyncio.Event(), leave) == 7


async def test_what_the_start_raises_is_raised() -> None:
    async def start() -> None:
        raise NotFoundError("no such model")

    with pytest.raises(NotFoundError, match="no such model"):
        await unless_stopped(start(), asyncio.Event(), leave)


@pytest.mark.parametrize("before", [True, False])
async def test_one_that_is_stopped_leaves_with_code_0(before: bool) -> None:
    stop, never = asyncio.Event(), asyncio.Event()
    if before:
        stop.set()
    else:
        asyncio.get_running_loop().call_soon(stop.set)
    with pytest.raises(_LeftError, match=r"^0$"):
        await unless_stopped(never.wait(), stop, leave)


@pytest.mark.parametrize(("takes_s", "left", "after_s"), [(4.0, False, 4.0), (3600.0, True, 1.0 + 5.0)])
def test_a_start_may_have_patience(takes_s: float, left: bool, after_s: float) -> None:
    async def run() -> bool:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(1.0, stop.set)
        try:
            await unless_stopped(asyncio.sleep(takes_s), stop, leave, patience_s=5.0)
        except _LeftError:
            return True
        return False

    assert run_in_virtual_time(run()) == (left, pytest.approx(after_s))


async def test_one_that_is_cancelled_cancels_the_start() -> None:
    begun = asyncio.ensure_future(asyncio.Event().wait())
    waiting = asyncio.create_task(unless_stopped(begun, asyncio.Event(), leave))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert begun.cancelling()


def test_variables_are_set_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSERVE_A", "before")
    monkeypatch.delenv("SPLITSERVE_B", raising=False)
    with environment_with({"SPLITSERVE_A": "1", "SPLITSERVE_B": "2"}):
        assert (os.environ["SPLITSERVE_A"], os.environ["SPLITSERVE_B"]) == ("1", "2")
        del os.environ["SPLITSERVE_B"]
    assert os.environ["SPLITSERVE_A"] == "before"
    assert "SPLITSERVE_B" not in os.environ
