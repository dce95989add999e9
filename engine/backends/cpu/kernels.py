"""The Python side of the cpu kernels: runs operations, and records them while a graph is captured."""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np
import torch

from engine.backends.cpu.build import load_library
from engine.backends.cpu.core_exchange import USES, BorrowedCores
from engine.backends.cpu.ops import (
    OP,
    NormKind,
    Ops,
    int8_workspace_bytes,
    linear_int8_op,
    linear_op,
    rms_norm_op,
)
from engine.kv_cache.memory import host_pages
from engine.model.named_weights import ALL_ROWS

_PANEL = 16
"""Outputs of a layer must be a multiple: a packed panel has 16, 32 or 48."""
_PANEL_OUTPUTS = 48
"""Outputs of every panel but the last."""
_PAIR = 2
"""Inputs of a bfloat16 layer must be a multiple: the dot product instruction takes pairs."""
_WORD_BYTES = 4
"""What panels are made of: a pair of bfloat16 inputs of one output, or four of int8."""
_INT8_STEP = 16
"""Inputs of an int8 layer must be a multiple: that many are quantized at a time."""


class OpRecorder(Protocol):
    """Takes operations in place of computing them; see `GraphCapture`."""

    def record(self, op: Ops) -> None:
        """`op` would be computed now. What it would write has any content."""


class CpuKernels:
    """The compiled library, and the number of threads that its operations run on.

    While `recorder` is set, operations are recorded there and not computed: a capture needs their addresses only.
    """

    def __init__(self, threads: int, *, amx: bool = True) -> None:
        """Raises UnavailableError as `load_library`, which has `amx`."""
        self.recorder: OpRecorder | None = None
        self._threads = threads
        self._borrowed: BorrowedCores | None = None
        self._placed: tuple[int, ...] = ()
        self.ops_run = self.ops_lent = 0
        """Operations that `run` computed since the latest `use`, and with borrowed cores, once for each of these."""
        self._weights = WeightMemory()
        library = load_library(amx=amx)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.splitserve_op_bytes.restype = number
        assert library.splitserve_op_bytes() == OP.itemsize, "op.hpp and ops.py differ"
        self._pack = library.splitserve_pack
        self._pack.argtypes = [pointer, number, number, pointer]
        self._run = library.splitserve_run
        self._run.argtypes = [pointer, number, ctypes.c_int]
        self._run_lent = library.splitserve_run_lent
        self._run_lent.argtypes = [
            pointer,
            number,
            ctypes.c_int,
            pointer,
            number,
            pointer,
            pointer,
            ctypes.c_int,
        ]
        self._run_lent.restype = number
        self._place = library.splitserve_place
        self._place.argtypes = [ctypes.c_int, ctypes.c_int, pointer]
        self._linear = library.splitserve_linear
        self._linear.argtypes = [ctypes.c_int, *[pointer] * 4, *[number] * 4]
        self._rms_norm = library.splitserve_rms_norm
        self._rms_norm.argtypes = [ctypes.c_int, *[pointer] * 3, *[number] * 3, ctypes.c_double]
        self._argmax = library.splitserve_argmax
        self._argmax.argtypes = [ctypes.c_int, pointer, *[number] * 3, pointer]
        for function in (self._argmax, self._pack, self._run, self._linear, self._rms_norm):
            function.restype = None

    @property
    def threads(self) -> int:
        """On cores of this worker's own."""
        return self._threads

    @threads.setter
    def threads(self, threads: int) -> None:
        self._threads = threads

    def run(self, ops: Ops) -> None:
        """Computes operations `[n]` of dtype `OP`, one after the other; does not record them."""
        if self._borrowed is None:
            self._run(ops.ctypes.data, len(ops), self._threads)
            return
        lent = self._borrowed
        self.ops_run += len(ops)
        self.ops_lent += self._run_lent(
            ops.ctypes.data,
            len(ops),
            self._threads,
            (ctypes.c_void_p * len(lent.addresses))(*lent.addresses),
            USES,
            (ctypes.c_int * len(lent.counts))(*lent.counts),
            (ctypes.c_int * len(lent.cores))(*lent.cores),
            len(lent.addresses),
        )

    def use(self, borrowed: BorrowedCores) -> bool:
        """Lets `run` use these cores too, while their owners rest, until `use_own`. Returns whether the system lets
        it."""
        if borrowed.cores != self._placed:
            cores = (ctypes.c_int * len(borrowed.cores))(*borrowed.cores)
            if not self._place(self._threads, len(borrowed.cores), cores):
                self._placed = ()
                return False
            self._placed = borrowed.cores
        self._borrowed = borrowed
        self.ops_run = self.ops_lent = 0
        return True

    def use_own(self) -> None:
        """Ends `use`."""
        self._borrowed = None

    def compute(self, op: Ops) -> None:
        """Computes one operation, or records it if there is a recorder."""
        if self.recorder is not None:
            self.recorder.record(op)
        else:
            self.run(op)

    @staticmethod
    def packs(weight: torch.Tensor) -> bool:
        """Whether `linear` can work with this weight `[outputs, inputs]`."""
        outputs, inputs = weight.shape
        return weight.dtype is torch.bfloat16 and outputs % _PANEL == 0 and inputs % _PAIR == 0

    @staticmethod
    def packs_int8(weight: torch.Tensor) -> bool:
        """Whether `linear_int8` can work with this weight `[outputs, inputs]` once it is quantized."""
        outputs, inputs = weight.shape
        return bool(outputs % _PANEL == 0 and inputs % _INT8_STEP == 0)

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight `[outputs, inputs]`, bfloat16 or int8, in the order that `linear` or `linear_int8` reads it in.

        Same shape and dtype; see `src/panels.hpp` for the order of the elements.
        """
        weight = weight.detach().contiguous()
        packed = self._weights.like(weight)
        outputs, inputs = weight.shape
        self._pack(weight.data_ptr(), outputs, inputs * weight.itemsize, packed.data_ptr())
        return packed

    @staticmethod
    def unpack(packed: torch.Tensor, rows: slice = ALL_ROWS) -> torch.Tensor:
        """The inverse of `pack`, of these rows of a bfloat16 or int8 weight. On the calling thread only."""
        outputs, inputs = packed.shape
        words = inputs * packed.itemsize // _WORD_BYTES
        first, end, _ = rows.indices(outputs)
        whole = outputs // _PANEL_OUTPUTS * _PANEL_OUTPUTS
        # All panels that have one of the rows.
        begin = first // _PANEL_OUTPUTS * _PANEL_OUTPUTS
        stop = min(outputs, -(-end // _PANEL_OUTPUTS) * _PANEL_OUTPUTS)
        pairs = packed.view(torch.int32).numpy()
        unpacked = np.empty((stop - begin, words), np.int32)
        for start, until, width in (
            (begin, min(stop, whole), _PANEL_OUTPUTS),
            (max(begin, whole), stop, outputs - whole),
        ):
            if start < until:
                panels = pairs[start:until].reshape(-1, words, width)
                into = unpacked[start - begin : until - begin].reshape(-1, width, words)
                into[:] = panels.transpose(0, 2, 1)
        own = unpacked.view(np.int16 if packed.itemsize == 2 else np.int8)[first - begin : end - begin]
        return torch.from_numpy(own).view(packed.dtype)

    def linear(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x W^T + bias`, all in bfloat16: x `[..., inputs]`, packed `[outputs, inputs]`, bias `[outputs]`.

        Raises TypeError for x of another dtype.
        """
        x = _bfloat16(x)
        outputs, inputs = packed.shape
        y = x.new_empty((*x.shape[:-1], outputs))
        rows = x.numel() // inputs
        if self.recorder is not None:
            self.recorder.record(linear_op(x.view(rows, inputs), packed, bias, y.view(rows, outputs)))
            return y
        self._linear(
            self._threads,
            x.data_ptr(),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            rows,
            inputs,
            outputs,
            inputs,
        )
        return y

    def linear_int8(
        self, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`x W^T + bias` with int8 weights, each row of x quantized on the fly; see `linear_int8_op`.

        x `[..., inputs]` in bfloat16; returns bfloat16 `[rows, outputs]`. Raises TypeError for x of another dtype.
        """
        outputs, inputs = packed.shape
        x = _bfloat16(x).view(-1, inputs)
        y = x.new_empty((x.shape[0], outputs))
        workspace = torch.empty(int8_workspace_bytes(x.shape[0], inputs), dtype=torch.uint8)
        self.compute(linear_int8_op(x, packed, scales, bias, y, workspace))
        return y

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, kind: NormKind, epsilon: float) -> torch.Tensor:
        """Root mean square norm over the last dimension of x `[..., width]`. Raises TypeError for x not in bfloat16.

        Rows are computed in the order in which x has them in memory, and the result has that order: where tokens come
        first there, as in a transposed view of heads, fewer of them are the first rows of a captured operation.
        """
        order = [*sorted(range(x.dim() - 1), key=lambda each: -x.stride(each)), x.dim() - 1]
        x = _bfloat16(x.permute(order))
        y = torch.empty_like(x)
        width = x.shape[-1]
        if self.recorder is not None:
            self.recorder.record(rms_norm_op(x, weight, y, kind, epsilon))
        else:
            addresses = x.data_ptr(), weight.data_ptr(), y.data_ptr()
            self._rms_norm(self._threads, *addresses, x.numel() // width, width, kind, epsilon)
        return y.permute([order.index(each) for each in range(y.dim())])

    def argmax(self, logits: torch.Tensor) -> list[int]:
        """The token of the largest logit of each row, the first of equal ones; -1 where that logit is not finite.

        logits `[rows, vocabulary]` in bfloat16, last dimension contiguous.
        """
        rows, vocabulary = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        address = logits.data_ptr()
        self._argmax(self._threads, address, rows, vocabulary, logits.stride(0), tokens.data_ptr())
        return list(map(int, tokens.tolist()))


def _bfloat16(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is not torch.bfloat16:
        raise TypeError(f"the kernels compute in bfloat16, not in {x.dtype}")
    return x.contiguous()


CHUNK_BYTES = 32 << 20
SMALL_BYTES = 1 << 18
"""Smaller weights get ordinary memory: they are read from a cache anyway."""
ALIGNED = 64
_HUGE_PAGE = 2 << 20


class WeightMemory:
    """Allocates memory for weights in chunks of huge pages. A chunk is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def like(self, weight: torch.Tensor) -> torch.Tensor:
        """An uninitialized contiguous tensor of a weight's shape and dtype."""
        num_bytes = weight.numel() * weight.itemsize
        if num_bytes < SMALL_BYTES:
            return torch.empty_like(weight, memory_format=torch.contiguous_format)
        if self._used + num_bytes > len(self._chunk):
            size = -(-max(num_bytes, CHUNK_BYTES) // _HUGE_PAGE) * _HUGE_PAGE
            self._chunk, self._used = torch.frombuffer(host_pages(size), dtype=torch.uint8), 0
        begin = self._used
        self._used += -(-num_bytes // ALIGNED) * ALIGNED
        return self._chunk[begin : begin + num_bytes].view(weight.dtype).view(weight.shape)
