"""What `up` forks is a process like one that was executed, and nothing depends on the process it was forked from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(120)
NAMES = {"coordinator", "prefill-worker", "decode-worker"}
SERVER = "fork-server"


class Up:
    """A running `splitserve up`."""

    def __init__(self, options: Sequence[str]) -> None:
        command = [sys.executable, "-m", "splitserve", "up", *options, "--grpc-port", "0"]
        read, write = os.pipe()
        self.stranger = os.readlink(f"/proc/self/fd/{write}")
        self.process = subprocess.Popen(
            [*command, "--http-port", "off", "--drain", "5"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            pass_fds=[write],
        )
        os.close(read)
        os.close(write)

    def says(self, part: str) -> str:
        assert self.process.stderr is not None
        return next(line for line in self.process.stderr if part in line)

    def ready(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("splitserve ready on "), line
        return line.split()[3]

    def children(self) -> dict[str, psutil.Process]:
        """Its children by command."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.NoSuchProcess, IndexError):  # it has just ended
                found[child.cmdline()[3]] = child
        return found


def open_files(pid: int) -> list[str]:
    found = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.append(os.readlink(file))
    return found


@contextmanager
def running_up(*options: str) -> Iterator[Up]:
    """With simulated engines unless there are options."""
    up = Up(options or ("--engine", "simulated"))
    family: list[psutil.Process] = []
    try:
        yield up
    finally:
        with_children = psutil.Process(up.process.pid) if up.process.poll() is None else None
        family = with_children.children() if with_children else []
        up.process.terminate()
        up.process.communicate(timeout=PATIENCE_S)
        assert not psutil.wait_procs(family, timeout=PATIENCE_S)[1]


def wait_until(condition: str, holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, condition
        time.sleep(0.02)


def test_the_server_may_die_alone_and_up_takes_all_with_it() -> None:
    with running_up() as up:
        up.ready()
        children = up.children()
        assert children.keys() == {*NAMES, SERVER}
        assert {os.getsid(child.pid) for child in children.values()} == {c.pid for c in children.values()}
        for child in children.values():  # what a shell left open in `up` is not theirs
            assert up.stranger not in open_files(child.pid)
        assert up.stranger in open_files(up.process.pid)
        children[SERVER].kill()
        before = children["prefill-worker"]
        before.kill()
        # Started by executing its program now.
        up.says("prefill-0 was killed by SIGKILL; starting it again")
        up.says("prefill-0: started, pid")
        wait_until("its program has been executed", lambda: "prefill-worker" in up.children())
        again = up.children()
        assert {name: again[name].pid for name in NAMES - {"prefill-worker"}} == {
            name: children[name].pid for name in NAMES - {"prefill-worker"}
        }
        assert again["prefill-worker"].pid != before.pid
        family = list(up.children().values())
        assert len(family) == len(NAMES)
        up.process.kill()
        assert not psutil.wait_procs(family, timeout=PATIENCE_S)[1]


def test_a_server_that_does_not_answer_keeps_nobody_from_ending() -> None:
    with running_up() as up:
        wait_until("the server is there", lambda: SERVER in up.children())
        server = up.children()[SERVER]
        server.suspend()
        up.process.send_signal(signal.SIGTERM)
        # It may not have begun to listen for signals.
        assert up.process.wait(PATIENCE_S) in (0, -signal.SIGTERM)
        assert not psutil.wait_procs([server], timeout=PATIENCE_S)[1]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_workers_are_forked_with_real_weights(tmp_path: Path) -> None:
    """One that loads them itself says how far it is, again and again; one that takes them is done at once."""
    with running_up("--model", "smollm2-135m-instruct", "--log-dir", str(tmp_path)) as up:
        up.ready()
        children = up.children()
        assert children.keys() == {*NAMES, SERVER}
        children["prefill-worker"].kill()
        log = tmp_path / "prefill-0.log"
        wait_until("it is there again", lambda: log.read_text().count('"worker.ready"') == 2)
        for name in ("prefill-0", "decode-0"):
            lines = (tmp_path / f"{name}.log").read_text().splitlines()
            events = [json.loads(line) for line in lines if line.startswith("{")]
            loading = [event["fraction"] for event in events if event["event"] == "worker.loading"]
            assert set(loading) == {1.0}
        child = children["decode-worker"].memory_full_info()
        assert child.pss < child.rss - 150_000_000  # the weights are in one place


BROKEN = """
import os, pathlib, sys, time
from splitserve.cluster.forking.owner import ForkServer
folder = pathlib.Path(sys.argv[1])
(folder / "broken_library.py").write_text("raise OSError('libx.so: cannot open shared object file')")
sys.path.insert(0, str(folder))
server = ForkServer.start(["broken_library"], lambda arguments: 0)
print("went on", flush=True)
if server is not None:
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    server.close()
"""


def test_a_server_that_cannot_import_ends_and_nothing_else_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BROKEN, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
    assert said == "went on\n", "once, in the process that asked"
