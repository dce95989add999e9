"""UCX does not spend 0.4 s on replacing libc's functions for memory where no device has memory registered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.transports.nixl import binding
from kv_transfer.transports.nixl.binding import NixlAgent, load_nixl
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


class FakeNixl:
    """Of its binding module what makes an agent."""

    DRAM_SEG, VRAM_SEG = 0, 1
    hooks: str | None = None
    """As the backend finds them."""

    class nixlAgentConfig:
        pass

    class nixlAgent:
        def __init__(self, *_: Any) -> None:
            pass

        def createBackend(self, *_: Any) -> None:
            FakeNixl.hooks = os.environ.get("UCX_MEM_EVENTS")


@pytest.mark.parametrize(
    ("has_device", "given", "found"), [(True, None, None), (False, None, "n"), (False, "y", "y")]
)
def test_the_hooks_stay_where_a_device_has_memory_registered(
    has_device: bool, given: str | None, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UCX_MEM_EVENTS", "UCX_SYSV_ERROR_HANDLING"):
        monkeypatch.setenv(name, given or "")  # put back in the end
        if given is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(binding, "load_nixl", lambda: FakeNixl)
    monkeypatch.setattr(binding, "keeps_registrations", lambda: has_device)
    NixlAgent("agent")
    assert FakeNixl.hooks == found
    assert os.environ.get("UCX_MEM_EVENTS") == given, "others in this process have their own"


@pytest.mark.parametrize(
    "device", ["nvidia0", "kfd", "dxg", "nvmap", "dri/renderD128", "xpmem", "knem", "rdma"]
)
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
        (tmp_path / "dev/dri").mkdir()
        (tmp_path / "dev" / device).touch()
    assert host_facts.keeps_registrations()


def test_devices_that_cannot_be_read_may_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable() -> tuple[str, ...]:
        raise PermissionError("/sys/class/infiniband")

    monkeypatch.setattr(host_facts, "rdma_devices", unreadable)
    assert host_facts.keeps_registrations()
