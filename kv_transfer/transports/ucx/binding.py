"""Typed wrapper of the part of UCXX that the transport uses; its errors become TransferError.

It uses the core objects (`ucxx._lib`) instead of UCXX's asyncio layer, which has one UCX worker per process
with a progress and a notifier thread. Here a UCX worker belongs to the thread that owns the transport and
makes progress when that thread polls. Written against UCXX 0.52, UCX 1.21.

UCXX's `tag_recv` does not return the received length, so a message is probed for its length before its receive
is posted. A longer message cannot overrun the buffer: UCX completes it as truncated.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_transfer.transports.regions import KvMemoryRegion
from kv_transfer.transports.ucx_lanes import CUDA_IPC, lanes_without, lanes_without_room
from splitserve.errors import MissingExtraError, TransferError, UnavailableError

_DEFAULTS = {"RNDV_THRESH": "8192", "MAX_RNDV_RAILS": "1"}
"""UCX settings, each overridden by a variable UCX_<name>. From 8 KiB on, rendezvous avoids a second copy."""
_FIXED = {"SYSV_ERROR_HANDLING": "n"}
"""On one host everything goes over loopback TCP, because over shared memory a peer that closes its side while
its process lives on goes undetected. With error handling UCX itself excludes cma and cuda_ipc, as nothing could
stop a peer from reading memory that has been reused. cuda_ipc is taken out of the list of lanes as well, so that this
does not depend on UCX's version."""


@dataclass(frozen=True, slots=True)
class CudaBytes:
    """Device memory in the form that UCXX accepts."""

    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}


Memory = npt.NDArray[np.uint8] | CudaBytes


class RegionBytes:
    """Byte ranges of a registered memory region."""

    def __init__(self, memory: KvMemoryRegion) -> None:
        self.block_bytes = memory.layout.block_bytes
        self.num_blocks = memory.num_blocks
        self._address = memory.base_address
        self._host: npt.NDArray[np.uint8] | None = None
        if memory.memory_kind == "DRAM":
            buffer = (ctypes.c_uint8 * (memory.num_blocks * self.block_bytes)).from_address(
                memory.base_address
            )
            self._host = np.ctypeslib.as_array(buffer)

    def blocks(self, first: int, count: int) -> Memory:
        """The bytes of `count` contiguous blocks from `first` on. The range is not checked."""
        start, size = first * self.block_bytes, count * self.block_bytes
        if self._host is None:
            return CudaBytes(self._address + start, size)
        return self._host[start : start + size]


def load_ucxx() -> tuple[Any, Any]:
    """UCXX's core module and its array type. Raises MissingExtraError if UCXX is not installed.

    Importing UCXX sets UCX_ variables for the whole process, which NIXL's own copy of UCX would read too; they
    are removed again.
    """
    before = {name for name in os.environ if name.startswith("UCX_")}
    # UCX reads it when the library is loaded, so it must be set before the import; UCXX does the same.
    os.environ.setdefault("UCX_MEMTYPE_CACHE", "n")
    try:
        core = importlib.import_module("ucxx._lib.libucxx")
        array = importlib.import_module("ucxx._lib.arr").Array
    except ImportError as error:
        raise MissingExtraError("transport ucx", "ucx", error) from None
    finally:
        for name in [name for name in os.environ if name.startswith("UCX_") and name not in before]:
            del os.environ[name]
    return core, array


class Operation:
    """A posted send or receive. Keeps its buffer alive; drop it only when `done`."""

    __slots__ = ("_errors", "_request", "data")

    def __init__(self, request: Any, data: Any, errors: tuple[type[Exception], ...]) -> None:
        self._request = request
        self._errors = errors
        self.data = data

    @property
    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return bool(self._request.completed)

    def problem(self) -> str | None:
        """Why a finished operation failed; None if it succeeded."""
        try:
            self._request.check_error()
        except self._errors as error:
            return str(error)
        return None


class UcxEndpoint:
    """A connection to a peer's UCX worker."""

    def __init__(self, endpoint: Any, worker: UcxWorker) -> None:
        self._endpoint: Any = endpoint
        self._worker = worker

    @property
    def alive(self) -> bool:
        """False once UCX has detected a broken connection or it was closed here."""
        return self._endpoint is not None and bool(self._endpoint.alive)

    def send(self, data: Memory, tag: int) -> Operation:
        """Posts a send. Raises TransferError if UCX refuses it."""
        worker = self._worker
        if self._endpoint is None:
            raise TransferError("the connection is closed")
        return worker.post("send", data, lambda array: self._endpoint.tag_send(array, worker.tag(tag)))

    def close(self) -> None:
        """Closes the connection without waiting for the peer; operations in flight on it fail.

        With error handling `close_blocking` closes by force, and UCX returns no request to wait for. UCXX's `close`
        ignores its own flags: UCX flushes first, for which the peer must make progress.
        """
        if self._endpoint is not None:
            endpoint, self._endpoint = self._endpoint, None
            endpoint.close_blocking()


class UcxWorker:
    """One UCX context and worker. Not thread-safe; makes progress only in `progress`."""

    def __init__(self) -> None:
        core, self._array = load_ucxx()
        self._core: Any = core
        self.errors: tuple[type[Exception], ...] = (core.UCXError, RuntimeError, ValueError)
        config = {
            name: value for name, value in _DEFAULTS.items() if f"UCX_{name}" not in os.environ
        } | _FIXED
        config["TLS"] = lanes_without(os.environ.get("UCX_TLS"), [CUDA_IPC, *lanes_without_room()])
        try:
            self._context: Any = core.UCXContext(config, (core.Feature.TAG, core.Feature.WAKEUP))
            self._worker: Any = core.UCXWorker(self._context)
        except self.errors as error:
            raise UnavailableError(f"transport ucx: no UCX worker: {error}", reason="UCX_MISSING") from error

    @property
    def address(self) -> bytes:
        """The address that peers connect to."""
        return bytes(self._worker.address.tobytes())

    def connect(self, address: bytes) -> UcxEndpoint:
        """Connects to a peer's worker; UCX sets the connection up while both sides make progress.

        With error handling on, UCX uses only lanes that detect a peer's death. Raises TransferError.
        """
        try:
            theirs = self._core.UCXAddress.create_from_buffer(address)
            return UcxEndpoint(self._worker.create_endpoint_from_worker_address(theirs, True), self)
        except self.errors as error:
            raise TransferError(f"cannot connect: {error}") from error

    def progress(self) -> None:
        """Runs UCX until no more progress is possible."""
        self._worker.progress()

    def probe(self, tag: int, mask: int) -> tuple[int, int] | None:
        """(tag, length in bytes) of the oldest matching message without a posted receive, or None."""
        probed = self._worker.tag_probe(self.tag(tag), self._core.UCXXTagMask(mask))
        return (int(probed.sender_tag.value), int(probed.length)) if probed.matched else None

    def receive(self, data: Memory, tag: int) -> Operation:
        """Posts a receive for the oldest message with exactly this tag. Raises TransferError."""
        return self.post("receive", data, lambda array: self._worker.tag_recv(array, self.tag(tag)))

    def tag(self, value: int) -> Any:
        """UCXX's tag object."""
        return self._core.UCXXTag(value)

    def post(self, what: str, data: Memory, start: Any) -> Operation:
        """Starts an operation on `data`: `start` is called with its UCXX array. Raises TransferError."""
        array = self._array(data)
        try:
            return Operation(start(array), array, self.errors)
        except self.errors as error:
            raise TransferError(f"cannot {what}: {error}") from error

    def close(self) -> None:
        """Releases worker and context; UCX destroys them with their last endpoint and request."""
        self._worker = self._context = None


def to_memory(data: bytes) -> npt.NDArray[np.uint8]:
    """`data` as an array that can be sent."""
    return np.frombuffer(data, dtype=np.uint8)


PARTING_S = 5.0
"""Longest time in seconds that a connection stays open for its last messages to leave."""
MAX_PARTINGS = 4096


@dataclass(frozen=True, slots=True)
class _Parting:
    endpoint: UcxEndpoint
    sends: tuple[Operation, ...]
    until_s: float
    for_peer: bool

    def over(self, now: float) -> bool:
        left = not self.for_peer and all(send.done for send in self.sends)
        return left or now >= self.until_s or not self.endpoint.alive


class Partings:
    """The connections of one transport that are about to be closed. `clock`: in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: list[_Parting] = []
        self._unfinished: list[Operation] = []

    def part(self, endpoint: UcxEndpoint, sends: Iterable[Operation], *, for_peer: bool = False) -> None:
        """Closes a connection once `sends` have left it, `PARTING_S` later at the latest.

        With `for_peer`, closes it once the peer has closed it: UCX may have joined it with the connection that this
        side writes through, which would end as well.
        """
        until_s = float("inf") if for_peer else self._clock() + PARTING_S
        self._open.append(_Parting(endpoint, tuple(sends), until_s, for_peer))

    def cut(self, endpoint: UcxEndpoint, sends: Iterable[Operation]) -> None:
        """Closes a connection at once. Buffers that UCX has not given back are kept."""
        endpoint.close()
        self.keep(sends)

    def keep(self, operations: Iterable[Operation]) -> None:
        """Keeps the buffers of operations that nobody waits for any more until UCX has given them back."""
        self._unfinished += [operation for operation in operations if not operation.done]

    def poll(self, max_open: int = MAX_PARTINGS) -> None:
        """Closes the connections that can be closed, and the oldest beyond `max_open`."""
        self._unfinished = [operation for operation in self._unfinished if not operation.done]
        if not self._open:
            return
        now, over = self._clock(), len(self._open) - max_open
        gone = [number < over or parting.over(now) for number, parting in enumerate(self._open)]
        before, self._open = self._open, [p for p, ends in zip(self._open, gone, strict=True) if not ends]
        for parting, ends in zip(before, gone, strict=True):
            if ends:
                self.cut(parting.endpoint, parting.sends)

    def close(self) -> None:
        """Closes all connections."""
        self.poll(max_open=0)
        self._unfinished.clear()
