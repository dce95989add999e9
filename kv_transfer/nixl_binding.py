"""The part of NIXL that the transport uses, typed, with NIXL's errors turned into TransferError.

It calls NIXL's binding module and not the `nixl_agent` class above it, for one setting that the class
fixes to zero: `pthrDelay`, the longest sleep of the progress thread. At zero that thread spins. Measured
between two processes that share two cores and poll only between their steps, the writer's 50 ms long,
the receiver's 20 ms (NIXL 1.5.1, 1 MiB writes over shared memory):

    progress thread      idle CPU of a worker   completion seen by the peer   loss of compute
    none                 0.0%                   60 ms after the post          none
    pthrDelay = 0        57-62% of a core       20-64 ms (fights for a core)  20-45%
    pthrDelay = 10 ms    0.5% of a core         11-15 ms                      none to be seen

With a sleeping progress thread the kernel wakes it when something arrives, a peer's acknowledgement is
given in the middle of a step, and nearly every write is done when its post returns
(over TCP: 15 of 20 at 1 MiB, 1 of 20 at 16 MiB).

Between processes of one host, notifications and acknowledgements go through shared memory (System V),
which UCX leaves out by default where broken peers must be noticed; `UCX_SYSV_ERROR_HANDLING` adds it.
Over TCP on loopback each of them wakes the progress thread, and on a worker with one core that thread
and the writer then spin against each other: one 0.36 MiB block took 1.8 ms to post, and now takes
0.05 ms. Segments are marked for removal as soon as they are attached, so a killed process leaves none.
Where the two processes share no IPC namespace, UCX falls back to TCP by itself.
"""

from __future__ import annotations

import importlib
import logging
import os
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from splitserve.errors import TransferError, UnavailableError

PROGRESS_SLEEP_US = 10_000
_PACKAGES = ("nixl_cu13", "nixl")
_BACKEND = "UCX"
_SHARED_MEMORY_VARIABLE = "UCX_SYSV_ERROR_HANDLING"


class PeerLostError(TransferError):
    """The connection to a peer has broken: its process is gone or has closed its side."""

    default_reason = "PEER_LOST"


def load_nixl() -> ModuleType:
    """NIXL's binding module. Raises UnavailableError when NIXL is not installed.

    Its loggers are set to WARNING unless the variable NIXL_LOG_LEVEL says otherwise.
    """
    raise_exceptions = logging.raiseExceptions
    for package in _PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
        except ImportError:
            continue
        finally:
            logging.raiseExceptions = raise_exceptions  # importing NIXL clears it for the whole process
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)
        binding: ModuleType = api.nixlBind
        return binding
    raise UnavailableError(
        "transport nixl: NIXL is not installed (pip install nixl-cu13)", reason="NIXL_MISSING"
    )


class NixlAgent:
    """One NIXL agent with the UCX backend. Every method raises TransferError when NIXL refuses."""

    def __init__(self, agent_id: str) -> None:
        nixl = load_nixl()
        self._nixl: Any = nixl
        self._errors = tuple(
            value for value in vars(nixl).values() if isinstance(value, type) and issubclass(value, Exception)
        )
        self._memory_kinds = {"DRAM": nixl.DRAM_SEG, "VRAM": nixl.VRAM_SEG}
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_SLEEP_US
        os.environ.setdefault(_SHARED_MEMORY_VARIABLE, "y")  # UCX reads it when the backend is made
        try:
            self._agent: Any = nixl.nixlAgent(agent_id, config)
            self._agent.createBackend(_BACKEND, {})
        except self._errors as error:
            message = f"transport nixl: no UCX backend: {error}"
            raise UnavailableError(message, reason="NIXL_MISSING") from error

    def register(self, address: int, size: int, device: int, memory_kind: str) -> Any:
        """Registers a range of memory, in bytes; returns what `deregister` takes."""
        regions = self._nixl.nixlRegDList(self._memory_kinds[memory_kind], [(address, size, device, "")])
        self._call("register memory", self._agent.registerMem, regions)
        return regions

    def deregister(self, regions: Any) -> None:
        """The inverse of `register`."""
        self._call("deregister memory", self._agent.deregisterMem, regions)

    def metadata(self) -> bytes:
        """What peers pass to `add_peer`."""
        return bytes(self._call("read metadata", self._agent.getLocalMD))

    def add_peer(self, metadata: bytes) -> str:
        """Loads a peer's metadata and returns the agent id found in it."""
        name = self._call("load a peer's metadata", self._agent.loadRemoteMD, metadata)
        return bytes(name).decode(errors="replace")

    def remove_peer(self, agent_id: str) -> None:
        """Closes the connection to a peer. Unknown ids are ignored."""
        self._call("remove a peer", self._agent.invalidateRemoteMD, agent_id)

    def prepare_blocks(
        self, peer: str | None, address: int, block_bytes: int, count: int, device: int, memory_kind: str
    ) -> int:
        """A descriptor list with one entry a block, for the own pool (`peer` None) or a peer's.

        One strided row (address, length, device, stride, count) describes them all: 0.05 ms for a million
        blocks, where a row a block takes 90 ms.
        """
        row: npt.NDArray[np.uint64] = np.array(
            [[address, block_bytes, device, block_bytes, count]], dtype=np.uint64
        )
        owner = self._nixl.NIXL_INIT_AGENT if peer is None else peer
        kind = self._memory_kinds[memory_kind]
        return int(self._call("prepare descriptors", self._agent.prepXferDlist, owner, kind, row))

    def release_blocks(self, blocks: int) -> None:
        """Frees a descriptor list."""
        self._call("release descriptors", self._agent.releasedDlistH, blocks)

    def make_write(
        self,
        local: int,
        local_indices: npt.NDArray[np.int32],
        remote: int,
        remote_indices: npt.NDArray[np.int32],
        notification: bytes,
    ) -> int:
        """A request to write blocks pairwise. NIXL merges neighbours on both sides into one descriptor."""
        sides = (local, local_indices, remote, remote_indices)
        make, write = self._agent.makeXferReq, self._nixl.NIXL_WRITE
        return int(self._call("make a write", make, write, *sides, notification))

    def post(self, request: int) -> bool:
        """Starts a request; returns whether it is over already."""
        return self._over(self._call("post a write", self._agent.postXferReq, request))

    def check(self, request: int) -> bool:
        """Whether a posted request is over."""
        return self._over(self._call("check a write", self._agent.getXferStatus, request))

    def release(self, request: int) -> None:
        """Frees a request; one that is not over is given up."""
        self._call("release a write", self._agent.releaseXferReq, request)

    def send(self, agent_id: str, notification: bytes) -> None:
        """Sends a notification without bytes."""
        self._call("send a notification", self._agent.genNotif, agent_id, notification)

    def notifications(self) -> dict[str, list[bytes]]:
        """Takes what has arrived, by sender."""
        arrived: dict[str, list[bytes]] = self._call("read notifications", self._agent.getNotifs, {})
        return arrived

    def _over(self, status: Any) -> bool:
        if status == self._nixl.NIXL_SUCCESS:
            return True
        if status == self._nixl.NIXL_IN_PROG:
            return False
        raise TransferError(f"a write failed: {status}")

    def _call(self, what: str, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._nixl.nixlRemoteDisconnectError as error:
            raise PeerLostError(f"cannot {what}: the peer is gone") from error
        except self._errors as error:
            raise TransferError(f"cannot {what}: {error}") from error
