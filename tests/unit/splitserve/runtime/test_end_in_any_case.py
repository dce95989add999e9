"""A process that was told to end, ends: tasks, threads and locks that do not let go of it notwithstanding."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from coordinator.workers.client import BackgroundTasks
from splitserve.errors import NotFoundError
from splitserve.runtime.cancellation import END_S, end_tasks, run_beside
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


def test_what_runs_beside_ends_with_the_first_in_a_bounded_time(capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> bool:
        release = asyncio.Event()
        await run_beside(asyncio.sleep(1.0), [("quick", asyncio.sleep(0)), ("stubborn", stubborn(release))])
        release.set()
        await asyncio.sleep(0)
        return release.is_set()

    assert run_in_virtual_time(run()) == (True, 1.0 + END_S)


@pytest.mark.parametrize("fails_s", [0.5, 1.0])
def test_the_first_error_ends_what_runs_beside(fails_s: float) -> None:
    ended = list[str]()

    async def fail() -> None:
        await asyncio.sleep(fails_s)
        raise NotFoundError("gone")

    async def other(name: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(name)

    async def run() -> float:
        with pytest.raises(NotFoundError, match="gone"):
            await run_beside(other("first", 1.0), [("failing", fail()), ("other", other("other", 3600.0))])
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(run())[0] == pytest.approx(fails_s)
    assert sorted(ended) == ["first", "other"]


@pytest.mark.parametrize("whose", ["first", "beside"])
async def test_an_error_at_the_end_is_raised(whose: str) -> None:
    async def fail_at_the_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise NotFoundError("not written")

    first = asyncio.sleep(0) if whose == "beside" else fail_at_the_end()

    async def cancel(task: asyncio.Task[None]) -> None:
        await asyncio.sleep(0.01)
        task.cancel()

    running = asyncio.create_task(run_beside(first, [("beside", fail_at_the_end())]))
    cancelling = asyncio.create_task(cancel(running))
    with pytest.raises(NotFoundError if whose == "beside" else asyncio.CancelledError):
        await running
    await cancelling


async def test_a_first_one_that_cancels_itself_is_no_end_in_order() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await run_beside(cancelled(), [("beside", asyncio.Event().wait())])


def run_python(program: str, *before: str) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-c", program]
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


def test_one_that_holds_the_interpreters_lock_ends_a_little_later() -> None:
    ended = run_python(
        "import asyncio, ctypes, os, signal\n"
        "from splitserve.runtime import process\n"
        "process.LAST_S = 0.2\n"
        "async def main():\n"
        "    stop = process.stop_signal(0.1)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    await stop.wait()\n"
        "    ctypes.PyDLL(None).sleep(3600)\n"
        "asyncio.run(main())\n"
    )
    assert ended.returncode == 1
    assert "in main" in ended.stderr


def test_a_thread_in_a_long_call_does_not_hold_up_who_leaves_at_once() -> None:
    ended = run_python(
        "import concurrent.futures, time\n"
        "from splitserve.runtime.process import leave_at_once\n"
        "concurrent.futures.ThreadPoolExecutor(1).submit(time.sleep, 3600)\n"
        "print('said')\n"
        "leave_at_once(3)\n"
    )
    assert (ended.returncode, ended.stdout) == (3, "said\n")


def test_a_process_without_stdout_leaves_with_its_code() -> None:
    program = "import sys\nfrom splitserve.runtime.process import leave_at_once\n"
    program += "assert sys.stdout is None\nleave_at_once(3)\n"
    ended = run_python(program, "sh", "-c", 'exec "$@" >&-', "sh")
    assert (ended.returncode, ended.stderr) == (3, "")


@pytest.mark.parametrize(
    ("last", "code", "words"),
    [
        ("pass", 0, ""),
        ("raise NotFoundError('no such model')", 1, "error: no such model\n"),
        ("raise InvalidArgumentError('a wrong port', field='port')", 2, "error: a wrong port\n"),
    ],
)
def test_a_service_leaves_with_its_code_whatever_its_threads_and_tasks_do(
    last: str, code: int, words: str
) -> None:
    ended = run_python(
        "import asyncio, time\n"
        "from launcher.cli.services import leaving\n"
        "from splitserve.errors import InvalidArgumentError, NotFoundError\n"
        "async def stubborn():\n"
        "    while True:\n"
        "        try:\n"
        "            await asyncio.to_thread(time.sleep, 3600)\n"
        "        except asyncio.CancelledError:\n"
        "            pass\n"
        "async def serve():\n"
        "    task = asyncio.create_task(stubborn())\n"
        "    await asyncio.sleep(0.01)\n"
        f"    {last}\n"
        "asyncio.run(leaving(serve()))\n"
    )
    assert (ended.returncode, ended.stderr) == (code, words)
