"""Blocking calls on one thread that never holds up the end of the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from splitserve.runtime.call_thread import CallThread
from tests.support.waiting import PATIENCE_S

STUCK = """
import asyncio, threading
from splitserve.runtime.call_thread import CallThread

async def main():
    thread, began = CallThread("stuck"), threading.Event()
    call = asyncio.create_task(thread.call(lambda: (began.set(), threading.Event().wait())))
    await asyncio.to_thread(began.wait)
    call.cancel()
    print(await thread.close(0.0))

asyncio.run(main())
"""


async def test_calls_run_in_order_and_their_errors_come_back() -> None:
    thread, seen = CallThread("test"), []

    def work(number: int) -> int:
        seen.append((number, threading.current_thread().name))
        return 10 // number

    answers = await asyncio.gather(*(thread.call(lambda n=n: work(n)) for n in (1, 2)))
    assert answers == [10, 5]
    assert seen == [(1, "test"), (2, "test")]
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda: work(0))
    assert await thread.close(PATIENCE_S)
    with pytest.raises(RuntimeError, match="closed"):
        await thread.call(lambda: work(1))


async def test_a_call_given_up_ends_before_the_next_and_one_not_begun_never_runs() -> None:
    thread, began, may_end = CallThread("test"), threading.Event(), threading.Event()
    seen: list[str] = []

    def first() -> None:
        began.set()
        may_end.wait()
        seen.append("first")

    calls = [asyncio.create_task(thread.call(first))]
    await asyncio.to_thread(began.wait)
    calls += [asyncio.create_task(thread.call(lambda: seen.append("second")))]
    third = asyncio.create_task(thread.call(lambda: seen.append("third")))
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    may_end.set()
    await third
    assert seen == ["first", "third"]
    assert await thread.close(PATIENCE_S)


async def test_closing_waits_only_so_long_and_cancels_the_queue() -> None:
    thread, began, may_end = CallThread("test"), threading.Event(), threading.Event()

    def first() -> None:
        began.set()
        may_end.wait()

    under_way = asyncio.create_task(thread.call(first))
    await asyncio.to_thread(began.wait)
    queued = asyncio.create_task(thread.call(lambda: None))
    await asyncio.sleep(0)
    assert not await thread.close(0.01)
    with pytest.raises(asyncio.CancelledError):
        await queued
    may_end.set()
    await under_way
    assert await thread.close(PATIENCE_S)


def test_a_call_that_never_ends_does_not_hold_up_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


async def test_the_last_call_is_made_also_after_one_that_nobody_waits_for() -> None:
    thread, began, may_end, ended = CallThread("test"), *(threading.Event() for _ in range(3))
    call = asyncio.create_task(thread.call(lambda: (began.set(), may_end.wait())))
    assert await asyncio.to_thread(began.wait, PATIENCE_S)
    call.cancel()
    assert not await thread.close(0.0, ended.set)
    assert not ended.is_set()
    may_end.set()
    assert await asyncio.to_thread(ended.wait, PATIENCE_S)


async def test_a_thread_that_was_never_used_makes_no_last_call() -> None:
    ended = threading.Event()
    assert await CallThread("test").close(PATIENCE_S, ended.set)
    assert not ended.is_set()
