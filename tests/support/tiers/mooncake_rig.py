"""A Mooncake Store of one process, where its package is installed."""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from engine.tiers.stores.mooncake_store import MooncakeStore, open_mooncake_store
from tests.support.waiting import PATIENCE_S

SEGMENT_BYTES = 2**24


class StoreWithMaster(MooncakeStore):
    """Ends its master when it is closed."""

    master: subprocess.Popen[bytes] | None = None
    address: str
    """Of the master."""

    def close(self) -> None:
        super().close()
        self.end_master()

    def end_master(self) -> None:
        if self.master is not None:
            self.master.kill()
            self.master.wait()
            self.master = None


def mooncake_store(
    block_bytes: int, slots: int, identity: bytes, segment_bytes: int = SEGMENT_BYTES
) -> StoreWithMaster:
    """A store with a master of its own, whose only node lends it so many bytes; skips the test without the package."""
    master, address = _start_master()
    try:
        store: Any = open_mooncake_store(address, block_bytes, slots, identity, segment_bytes, "127.0.0.1")
    except BaseException:
        master.kill()
        master.wait()
        raise
    store.__class__ = StoreWithMaster
    store.master, store.address = master, address
    return store  # type: ignore[no-any-return]


def _start_master() -> tuple[subprocess.Popen[bytes], str]:
    try:
        package = importlib.import_module("mooncake.store")
    except (
        ImportError
    ) as error:  # not installed, or a library that it needs: `make test` installs libibverbs1
        pytest.skip(f"mooncake-transfer-engine-non-cuda cannot be used: {error}")
    program = shutil.which("mooncake_master", path=str(Path(str(package.__file__)).parent))
    if program is None:
        pytest.skip("the package has no mooncake_master")
    ports = _free_ports(2)
    options = ["-rpc_address=127.0.0.1", f"-rpc_port={ports[0]}", "-metrics_host=127.0.0.1"]
    options += [f"-metrics_port={ports[1]}", "-enable_metric_reporting=false"]
    quiet = subprocess.DEVNULL
    master = subprocess.Popen([program, *options], stdout=quiet, stderr=quiet, env=dict(os.environ))
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", ports[0]), 1.0).close()
            return master, f"127.0.0.1:{ports[0]}"
        except OSError:
            if master.poll() is not None or time.monotonic() > until:
                master.kill()
                master.wait()
                raise
            time.sleep(0.02)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
