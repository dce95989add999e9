"""Forked services are processes like any other: exit codes, signals, output, and nothing that stays unnoticed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitserve import __version__
from tests.support.cluster.forked import ForkServer
from tests.support.cluster.streams import eventually
from tests.support.waiting import PATIENCE_S

COORDINATOR = ["coordinator", "--grpc-port", "0", "--http-port", "off"]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer("simulated")
    yield server
    server.stop()


def test_output_and_exit_codes(server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    for arguments, code, said in ((["--version"], 0, __version__), (["dance"], 2, "error: No such command")):
        process = server.start(arguments, os.environ, log)
        assert process.wait(PATIENCE_S) == process.returncode == code
        assert said in log.read_text()


def test_the_environment_is_the_given_one(server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = server.start(["status"], {**os.environ, "SPLITSERVE_TARGET": "nowhere"}, log)
    assert process.wait(PATIENCE_S) == 2
    assert "nowhere" in log.read_text()


async def test_signals(server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = server.start(COORDINATOR, os.environ, log)
    await eventually(lambda: log.exists() and "coordinator.ready" in log.read_text(), "it has started")
    assert process.poll() is None
    assert os.getsid(process.pid) == process.pid
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    process.terminate()  # as with any process that has ended, nothing happens


def test_what_is_left_behind_is_killed_and_told(tmp_path: Path) -> None:
    server = ForkServer("simulated")
    process = server.start(COORDINATOR, os.environ, tmp_path / "log")
    with pytest.raises(AssertionError, match="left behind"):
        server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
