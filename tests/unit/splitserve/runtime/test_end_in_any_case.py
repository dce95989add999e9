"""A process that was told to end, ends: tasks, threads and locks that do not let go of it notwithstanding."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from coordinator.background_tasks import BackgroundTasks
from splitserve.runtime.cancellation import END_S, end_tasks
from tests.support.virtual_time import run_in_virtual_time
from tests.support.waiting import PATIENCE_S


async def stubborn(release: asyncio.Event) -> None:
    while not release.is_set():
        try:
            await release.wait()
        except asyncio.CancelledError:
            continue


def test_tasks_that_do_not_end_are_waited_for_a_while_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    async def end() -> bool:
        release, ended = asyncio.Event(), asyncio.create_task(asyncio.sleep(3600))
        left = asyncio.create_task(stubborn(release), name="stubborn")
        await asyncio.sleep(0)
        await end_tasks([ended, left])
        cancelled, pending = ended.cancelled(), not left.done()
        release.set()
        await left
        return cancelled and pending

    assert run_in_virtual_time(end()) == (True, END_S)


def test_background_tasks_close_in_a_bounded_time() -> None:
    async def close() -> float:
        release, tasks, loop = asyncio.Event(), BackgroundTasks(), asyncio.get_running_loop()
        tasks.start(stubborn(release))
        await asyncio.sleep(0)
        await tasks.close(3.0)
        took_s = loop.time()
        release.set()
        await asyncio.sleep(0)
        return took_s

    took_s, _ = run_in_virtual_time(close())
    assert took_s == pytest.approx(3.0 + END_S)


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_a_process_that_stands_still_ends_and_says_where() -> None:
    # The event loop and the main thread are stuck as it is told to end.
    ended = run_python(
        "import asyncio, os, signal, threading\n"
        "from splitserve.runtime.process import stop_signal\n"
        "async def main():\n"
        "    stop = stop_signal(0.3)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    await stop.wait()\n"
        "    stands_still()\n"
        "def stands_still():\n"
        "    lock = threading.Lock()\n"
        "    lock.acquire(), lock.acquire()\n"
        "asyncio.run(main())\n"
    )
    assert ended.returncode == 1
    assert "in stands_still" in ended.stderr


def test_a_thread_in_a_long_call_does_not_hold_up_who_leaves_at_once() -> None:
    ended = run_python(
        "import concurrent.futures, time\n"
        "from splitserve.runtime.process import leave_at_once\n"
        "concurrent.futures.ThreadPoolExecutor(1).submit(time.sleep, 3600)\n"
        "print('said')\n"
        "leave_at_once(3)\n"
    )
    assert (ended.returncode, ended.stdout) == (3, "said\n")
