"""A process that leaves ends those that it has started, each by its id."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory

import psutil
import pytest

from tests.support.waiting import PATIENCE_S

START = (
    "import os, signal, subprocess, sys\n"
    "from splitserve.runtime.children_end import end_children, keep_at_end, remove_at_end\n"
    "from splitserve.runtime.process import leave_at_once, stop_signal\n"
    "def start(program):\n"
    "    child = subprocess.Popen([sys.executable, '-c', program], stdout=subprocess.PIPE)\n"
    "    return child.pid, int(child.stdout.readline())\n"
)
GRANDCHILD = (
    "import subprocess, time; print(subprocess.Popen(['sleep', '3600']).pid, flush=True); time.sleep(3600)"
)
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {GRANDCHILD}"


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", START + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_those_that_do_not_end_by_sigterm_are_killed_alone() -> None:
    ended = run_python(
        f"willing, stubborn = start({GRANDCHILD!r}), start({STUBBORN!r})\n"
        "print(*willing, *stubborn)\n"
        'assert end_children(0.3) == sorted(stubborn), "who ignores it has its children ignore it"\n'
        "assert end_children(0.3) == []\n"
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) == 4
    assert not any(map(runs, pids))


def test_a_stopped_child_is_killed() -> None:
    ended = run_python(
        f"child, grandchild = start({GRANDCHILD!r})\n"
        "os.kill(child, signal.SIGSTOP)\n"
        "print(child, grandchild)\n"
        "assert end_children(0.3) == [child]\n"
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not any(map(runs, map(int, ended.stdout.split())))


def test_who_leaves_takes_its_children_with_it_and_removes_what_they_would_leave() -> None:
    ended = run_python(
        "def one(): print('one')\n"
        "def two(): print('two')\n"
        "def broken(): raise OSError\n"
        "for remove in (one, broken, two): remove_at_end(remove)\n"
        "keep_at_end(two), keep_at_end(two)\n"
        f"print(*start({GRANDCHILD!r}))\n"
        "leave_at_once(3)\n"
    )
    pids, removed = ended.stdout.splitlines()
    assert (ended.returncode, ended.stderr, removed) == (3, "", "one")
    assert not any(map(runs, map(int, pids.split())))


def test_who_ends_at_the_limit_of_a_stop_takes_its_children_with_it() -> None:
    ended = run_python(
        "import asyncio, time\n"
        "async def main():\n"
        "    stop = stop_signal(0.2)\n"
        f"    print(*start({GRANDCHILD!r}), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    await stop.wait()\n"
        "    time.sleep(3600)\n"
        "asyncio.run(main())\n"
    )
    assert ended.returncode == 1
    assert "in main" in ended.stderr
    assert not any(map(runs, map(int, ended.stdout.split())))


@pytest.mark.parametrize("program", [GRANDCHILD, STUBBORN])
def test_a_second_signal_ends_them_at_once(program: str) -> None:
    ended = run_python(
        "import asyncio\n"
        "async def main():\n"
        f"    print(*start({program!r}), flush=True)\n"
        "    stop = stop_signal(3600)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    await stop.wait()\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    assert (ended.returncode, ended.stderr) == (130, "")
    assert not any(map(runs, map(int, ended.stdout.split())))


def test_the_tracker_of_shared_memory_ends_last_and_frees_it() -> None:
    ended = run_python(
        "from multiprocessing.shared_memory import SharedMemory\n"
        "memory = SharedMemory(create=True, size=64)\n"
        "print(memory.name, flush=True)\n"
        "assert end_children(0.1) == []\n"
        "leave_at_once()\n"
    )
    assert ended.returncode == 0
    with pytest.raises(FileNotFoundError):
        SharedMemory(ended.stdout.strip())


def test_without_children_nothing_is_looked_for() -> None:
    ended = run_python("assert end_children() == []\nassert 'psutil' not in sys.modules\n")
    assert (ended.returncode, ended.stderr) == (0, "")
