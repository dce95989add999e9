"""UCX does not spend 0.4 s on replacing libc's functions for memory where no device has memory registered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kv_transfer.transports.nixl.binding import load_nixl
from splitserve import host_facts
from splitserve.errors import UnavailableError
from tests.support.waiting import PATIENCE_S

PROGRAM = """
import ctypes, os
from kv_transfer.transports.nixl.binding import NixlAgent
munmap = ctypes.cast(ctypes.CDLL(None).munmap, ctypes.c_void_p).value
before = ctypes.string_at(munmap, 16)
agent = NixlAgent("agent")
print(ctypes.string_at(munmap, 16) == before, flush=True)
os._exit(0)  # as workers end: the interpreter's end breaks in NIXL where an agent is left
"""


@pytest.mark.parametrize(("variable", "unchanged"), [(None, True), ("y", False)])
def test_libc_stays_as_it_is_unless_somebody_wants_otherwise(variable: str | None, unchanged: bool) -> None:
    try:
        load_nixl()
    except UnavailableError as error:
        pytest.skip(error.message)
    if host_facts.keeps_registrations():
        pytest.skip("a device has memory registered here")
    environment = {name: value for name, value in os.environ.items() if name != "UCX_MEM_EVENTS"}
    if variable is not None:
        environment["UCX_MEM_EVENTS"] = variable
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=environment,
    )
    assert (ended.returncode, ended.stdout) == (0, f"{unchanged}\n"), ended.stderr


@pytest.mark.parametrize("device", ["nvidia0", "kfd", "xpmem", "knem", "rdma"])
def test_a_device_that_has_memory_registered(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_facts, "_DEV", tmp_path / "dev")
    monkeypatch.setattr(host_facts, "_SYS", tmp_path / "sys")
    (tmp_path / "dev").mkdir()
    assert not host_facts.keeps_registrations()
    if device == "rdma":
        (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    else:
        (tmp_path / "dev" / device).touch()
    assert host_facts.keeps_registrations()
