"""Typed wrapper of the part of NIXL that the transport uses; NIXL's errors become TransferError.

It calls NIXL's binding module instead of the `nixl_agent` class, which fixes one setting to zero: `pthrDelay`,
the longest sleep of the progress thread. At zero that thread spins. Measured between two processes that share
two cores and poll only between their steps of 50 ms (writer) and 20 ms (receiver) (NIXL 1.5.1, 1 MiB writes
over shared memory):

    progress thread      idle CPU of a worker   completion seen by the peer   loss of compute
    none                 0.0%                   60 ms after the post          none
    pthrDelay = 0        57-62% of a core       20-64 ms (fights for a core)  20-45%
    pthrDelay = 10 ms    0.5% of a core         11-15 ms                      not measurable

The kernel wakes a sleeping progress thread when data arrives, so a peer is acknowledged in the middle of a
step, and nearly every write is done when its post returns (over TCP: 15 of 20 at 1 MiB, 1 of 20 at 16 MiB).

Between processes of one host, notifications and acknowledgements use System V shared memory. With error
handling UCX excludes it by default; `UCX_SYSV_ERROR_HANDLING` adds it. Over loopback TCP each message wakes
the progress thread, which on a worker with one core competes with the writer: one 0.36 MiB block took 1.8 ms
to post over TCP and takes 0.05 ms over shared memory. Segments are marked for removal when attached, so a
killed process leaves none. Without a common IPC namespace UCX falls back to TCP.

For memory of a device there is no progress thread (ai-dynamo/nixl#2102): the engine's thread polls instead, also while
it waits for a step. And UCX keeps no mapping of a peer's device memory between writes, as it does by default until its
process ends (openucx/ucx#11753): a peer that has gone, or sleeps, would not give its memory back to the device.
"""

from __future__ import annotations

import importlib
import logging
import os
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_transfer.transports.ucx_lanes import lanes_without, lanes_without_room
from splitserve.errors import MissingExtraError, TransferError, UnavailableError
from splitserve.extras import NIXL

PROGRESS_SLEEP_US = 10_000
_BACKEND = "UCX"
_SHARED_MEMORY_VARIABLE = "UCX_SYSV_ERROR_HANDLING"
_KEPT_MAPPINGS_VARIABLE = "UCX_CUDA_IPC_CACHE"
_LANES_VARIABLE = "UCX_TLS"


class PeerLostError(TransferError):
    """The connection to a peer is broken: its process has ended or has closed its side."""

    default_reason = "PEER_LOST"


def load_nixl() -> ModuleType:
    """NIXL's binding module. Raises MissingExtraError if NIXL is not installed.

    Sets NIXL's loggers to WARNING unless the variable NIXL_LOG_LEVEL is set.
    """
    raise_exceptions = logging.raiseExceptions
    for package in NIXL:
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
    raise MissingExtraError("transport nixl", "cpu")


class NixlAgent:
    """One NIXL agent with the UCX backend. Every method raises TransferError if NIXL reports an error."""

    def __init__(self, agent_id: str, *, progress_thread: bool = True, device_memory: bool = False) -> None:
        """Without a progress thread NIXL makes progress only in `check` and `notifications`. `device_memory`: whether
        memory of a device will be registered."""
        nixl = load_nixl()
        self._nixl: Any = nixl
        self._errors = tuple(
            value for value in vars(nixl).values() if isinstance(value, type) and issubclass(value, Exception)
        )
        self._memory_kinds = {"DRAM": nixl.DRAM_SEG, "VRAM": nixl.VRAM_SEG}
        config = nixl.nixlAgentConfig()
        config.useProgThread = progress_thread
        if progress_thread:
            config.pthrDelay = PROGRESS_SLEEP_US
        # UCX reads these when the backend is created; where it uses no device it warns of the second.
        os.environ.setdefault(_SHARED_MEMORY_VARIABLE, "y")
        if device_memory:
            os.environ.setdefault(_KEPT_MAPPINGS_VARIABLE, "n")
        if left_out := lanes_without_room():
            os.environ[_LANES_VARIABLE] = lanes_without(os.environ.get(_LANES_VARIABLE), left_out)
        try:
            self._agent: Any = nixl.nixlAgent(agent_id, config)
            self._agent.createBackend(_BACKEND, {})
        except self._errors as error:
            message = f"transport nixl: no UCX backend: {error}"
            raise UnavailableError(message, reason="NIXL_MISSING") from error

    def register(self, address: int, size: int, device: int, memory_kind: str) -> Any:
        """Registers `size` bytes at `address`; returns the handle for `deregister`."""
        regions = self._nixl.nixlRegDList(self._memory_kinds[memory_kind], [(address, size, device, "")])
        self._call("register memory", self._agent.registerMem, regions)
        return regions

    def deregister(self, regions: Any) -> None:
        """The inverse of `register`."""
        self._call("deregister memory", self._agent.deregisterMem, regions)

    def metadata(self) -> bytes:
        """The metadata that peers pass to `add_peer`."""
        return bytes(self._call("read metadata", self._agent.getLocalMD))

    def add_peer(self, metadata: bytes) -> str:
        """Loads a peer's metadata and returns the agent id in it."""
        name = self._call("load a peer's metadata", self._agent.loadRemoteMD, metadata)
        return bytes(name).decode(errors="replace")

    def remove_peer(self, agent_id: str) -> None:
        """Closes the connection to a peer. Unknown ids are ignored."""
        self._call("remove a peer", self._agent.invalidateRemoteMD, agent_id)

    def prepare_blocks(
        self, peer: str | None, address: int, size: int, count: int, device: int, memory_kind: str
    ) -> int:
        """Prepares a descriptor list of `count` blocks of `size` bytes, one behind the other from `address` on.

        `peer`: whose memory; None for local memory. A strided row (address, length, device, stride, count) describes
        all blocks: 0.05 ms for a million of them, against 90 ms with one row per block.
        """
        strided: npt.NDArray[np.uint64] = np.array([[address, size, device, size, count]], dtype=np.uint64)
        owner = self._nixl.NIXL_INIT_AGENT if peer is None else peer
        kind = self._memory_kinds[memory_kind]
        return int(self._call("prepare descriptors", self._agent.prepXferDlist, owner, kind, strided))

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
        """Prepares a write of blocks, pairwise. NIXL merges blocks contiguous on both sides into one descriptor."""
        sides = (local, local_indices, remote, remote_indices)
        make, write = self._agent.makeXferReq, self._nixl.NIXL_WRITE
        return int(self._call("make a write", make, write, *sides, notification))

    def post(self, request: int) -> bool:
        """Starts a request; returns whether it is already done."""
        return self._is_done(self._call("post a write", self._agent.postXferReq, request))

    def check(self, request: int) -> bool:
        """Whether a posted request is done."""
        return self._is_done(self._call("check a write", self._agent.getXferStatus, request))

    def release(self, request: int) -> None:
        """Frees a request; one still in flight is abandoned."""
        self._call("release a write", self._agent.releaseXferReq, request)

    def send(self, agent_id: str, notification: bytes) -> None:
        """Sends a notification without a write."""
        self._call("send a notification", self._agent.genNotif, agent_id, notification)

    def notifications(self) -> dict[str, list[bytes]]:
        """Takes the arrived notifications, by sender."""
        arrived: dict[str, list[bytes]] = self._call("read notifications", self._agent.getNotifs, {})
        return arrived

    def _is_done(self, status: Any) -> bool:
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
