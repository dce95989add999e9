"""The part of UCXX that the transport uses, typed, with its errors turned into TransferError.

It uses the core objects (`ucxx._lib`), not UCXX's asyncio layer: that one runs a progress thread and a
notifier thread per process and a UCX worker for the whole process, while here a worker belongs to the one
thread that owns the transport and makes progress when that thread polls. What this was written against:
UCXX 0.52, UCX 1.21.

`tag_recv` of UCXX does not say how many bytes came, so a message's length is looked at (`probe`) before
its receive is posted. A longer one never overruns its buffer: UCX ends it as truncated.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_transfer.transport import PoolMemory
from splitserve.errors import TransferError, UnavailableError

_DEFAULTS = {"RNDV_THRESH": "8192", "MAX_RNDV_RAILS": "1"}
"""UCX settings, each unless the variable UCX_<name> is set. Blocks of 8 KiB or more are not copied twice."""
_FIXED = {"SYSV_ERROR_HANDLING": "n"}
"""On one host everything goes over loopback TCP: over shared memory a peer that has closed its side while
its process lives on is not noticed. UCX leaves cma and cuda_ipc out by itself where a peer's death must be
noticed, for nothing could then keep the peer from reading memory that was given to somebody else."""


@dataclass(frozen=True, slots=True)
class CudaBytes:
    """Device memory as UCXX takes it."""

    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}


Memory = npt.NDArray[np.uint8] | CudaBytes


class PoolBytes:
    """A registered pool as ranges of bytes."""

    def __init__(self, pool: PoolMemory) -> None:
        self.block_bytes = pool.layout.block_bytes
        self.num_blocks = pool.num_blocks
        self._address = pool.base_address
        self._host: npt.NDArray[np.uint8] | None = None
        if pool.memory_kind == "DRAM":
            buffer = (ctypes.c_uint8 * (pool.num_blocks * self.block_bytes)).from_address(pool.base_address)
            self._host = np.ctypeslib.as_array(buffer)

    def blocks(self, first: int, count: int) -> Memory:
        """The bytes of `count` neighbouring blocks. The caller has checked the range."""
        start, size = first * self.block_bytes, count * self.block_bytes
        if self._host is None:
            return CudaBytes(self._address + start, size)
        return self._host[start : start + size]


def load_ucxx() -> tuple[Any, Any]:
    """UCXX's core module and its array type. Raises UnavailableError when UCXX is not installed.

    Importing UCXX sets variables of UCX for the whole process, which another copy of UCX in it (NIXL's)
    would read too; they are taken back.
    """
    before = {name for name in os.environ if name.startswith("UCX_")}
    # Read when the library is loaded, so it must stand before the import. See UCXX's own remark there.
    os.environ.setdefault("UCX_MEMTYPE_CACHE", "n")
    try:
        core = importlib.import_module("ucxx._lib.libucxx")
        array = importlib.import_module("ucxx._lib.arr").Array
    except ImportError as error:
        raise UnavailableError(
            f"transport ucx: UCXX cannot be loaded (pip install 'splitserve[ucx]'): {error}",
            reason="UCX_MISSING",
        ) from None
    finally:
        for name in [name for name in os.environ if name.startswith("UCX_") and name not in before]:
            del os.environ[name]
    return core, array


class Operation:
    """A posted send or receive. Holds its memory until it is dropped; drop it only when `over`."""

    __slots__ = ("_errors", "_request", "data")

    def __init__(self, request: Any, data: Any, errors: tuple[type[Exception], ...]) -> None:
        self._request = request
        self._errors = errors
        self.data = data

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return bool(self._request.completed)

    def problem(self) -> str | None:
        """Why an operation that is over failed, or None."""
        try:
            self._request.check_error()
        except self._errors as error:
            return str(error)
        return None


class UcxEndpoint:
    """A connection to one peer's worker."""

    def __init__(self, endpoint: Any, worker: UcxWorker) -> None:
        self._endpoint: Any = endpoint
        self._worker = worker

    @property
    def alive(self) -> bool:
        """False once UCX has found the connection broken, or it was closed here."""
        return self._endpoint is not None and bool(self._endpoint.alive)

    def send(self, data: Memory, tag: int) -> Operation:
        """Posts a send. Raises TransferError when UCX refuses it."""
        worker = self._worker
        if self._endpoint is None:
            raise TransferError("the connection is closed")
        return worker.post("send", data, lambda array: self._endpoint.tag_send(array, worker.tag(tag)))

    def close(self) -> None:
        """Ends the connection at once, whatever the peer does; what is in flight on it fails."""
        if self._endpoint is not None:
            endpoint, self._endpoint = self._endpoint, None
            endpoint.close_blocking()


class UcxWorker:
    """One UCX context and worker. Not thread-safe; `progress` makes everything happen."""

    def __init__(self) -> None:
        core, self._array = load_ucxx()
        self._core: Any = core
        self.errors: tuple[type[Exception], ...] = (core.UCXError, RuntimeError, ValueError)
        config = {
            name: value for name, value in _DEFAULTS.items() if f"UCX_{name}" not in os.environ
        } | _FIXED
        try:
            self._context: Any = core.UCXContext(config, (core.Feature.TAG, core.Feature.WAKEUP))
            self._worker: Any = core.UCXWorker(self._context)
        except self.errors as error:
            raise UnavailableError(f"transport ucx: no UCX worker: {error}", reason="UCX_MISSING") from error

    @property
    def address(self) -> bytes:
        """What a peer connects to."""
        return bytes(self._worker.address.tobytes())

    def connect(self, address: bytes) -> UcxEndpoint:
        """A connection to a peer's worker; UCX sets it up while both sides make progress.

        With error handling on, UCX uses only lanes that notice a peer's death. Raises TransferError.
        """
        try:
            theirs = self._core.UCXAddress.create_from_buffer(address)
            return UcxEndpoint(self._worker.create_endpoint_from_worker_address(theirs, True), self)
        except self.errors as error:
            raise TransferError(f"cannot connect: {error}") from error

    def progress(self) -> None:
        """Lets UCX work until nothing more can be done now."""
        self._worker.progress()

    def probe(self, tag: int, mask: int) -> tuple[int, int] | None:
        """(tag, length in bytes) of the first arrived message that nobody has received, or None."""
        found = self._worker.tag_probe(self.tag(tag), self._core.UCXXTagMask(mask))
        return (int(found.sender_tag.value), int(found.length)) if found.matched else None

    def receive(self, data: Memory, tag: int) -> Operation:
        """Posts the receive of the first message with exactly this tag. Raises TransferError."""
        return self.post("receive", data, lambda array: self._worker.tag_recv(array, self.tag(tag)))

    def tag(self, value: int) -> Any:
        """UCXX's tag object."""
        return self._core.UCXXTag(value)

    def post(self, what: str, data: Memory, start: Any) -> Operation:
        """Starts an operation on an array over `data`."""
        array = self._array(data)
        try:
            return Operation(start(array), array, self.errors)
        except self.errors as error:
            raise TransferError(f"cannot {what}: {error}") from error

    def close(self) -> None:
        """Destroys worker and context once their last endpoint and request are dropped."""
        self._worker = self._context = None


def to_memory(data: bytes) -> npt.NDArray[np.uint8]:
    """Bytes to send."""
    return np.frombuffer(data, dtype=np.uint8)
