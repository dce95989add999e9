"""The Python side of the cpu kernels: runs operations, and records them while a graph is captured."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from engine.backends.cpu.build import load_library
from engine.backends.cpu.ops import OP, NormKind, Ops, linear_op, rms_norm_op
from engine.kv_cache.memory import host_pages

_PANEL = 16
"""The number of outputs of a layer must be a multiple of this: a packed panel has 16, 32 or 48."""
_PAIR = 2
"""The number of inputs of a layer must be a multiple of this: the dot product instruction takes pairs."""


class CpuKernels:
    """The compiled library, and the number of threads that its operations run on.

    While `record` is set, it is called with each operation instead of computing it: a `GraphCapture` needs addresses
    only, and the results have arbitrary content.
    """

    def __init__(self, threads: int, *, amx: bool = True) -> None:
        """Raises UnavailableError as `load_library`, which has `amx`."""
        self.record: Callable[[Ops], None] | None = None
        self.threads = threads
        self._weights = WeightMemory()
        library = load_library(amx=amx)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.splitserve_op_bytes.restype = number
        assert library.splitserve_op_bytes() == OP.itemsize, "op.hpp and ops.py differ"
        self._pack = library.splitserve_pack
        self._pack.argtypes = [pointer, number, number, pointer]
        self._run = library.splitserve_run
        self._run.argtypes = [pointer, number, ctypes.c_int]
        self._linear = library.splitserve_linear
        self._linear.argtypes = [ctypes.c_int, *[pointer] * 4, *[number] * 4]
        self._rms_norm = library.splitserve_rms_norm
        self._rms_norm.argtypes = [ctypes.c_int, *[pointer] * 3, *[number] * 3, ctypes.c_double]
        self._argmax = library.splitserve_argmax
        self._argmax.argtypes = [ctypes.c_int, pointer, *[number] * 3, pointer]
        for function in (self._argmax, self._pack, self._run, self._linear, self._rms_norm):
            function.restype = None

    def run(self, ops: Ops) -> None:
        """Computes operations `[n]` of dtype `OP`, one after the other; does not record them."""
        self._run(ops.ctypes.data, len(ops), self.threads)

    def compute(self, op: Ops) -> None:
        """Computes one operation, or records it while `record` is set."""
        if self.record is not None:
            self.record(op)
        else:
            self.run(op)

    @staticmethod
    def packs(weight: torch.Tensor) -> bool:
        """Whether `linear` can work with this weight `[outputs, inputs]`."""
        outputs, inputs = weight.shape
        return weight.dtype is torch.bfloat16 and outputs % _PANEL == 0 and inputs % _PAIR == 0

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight `[outputs, inputs]` in bfloat16, in the order of elements that `linear` reads.

        Same shape and dtype; see `src/panels.hpp` for the order of the elements.
        """
        weight = weight.detach().contiguous()
        packed = self._weights.like(weight)
        outputs, inputs = weight.shape
        self._pack(weight.data_ptr(), outputs, inputs * weight.itemsize, packed.data_ptr())
        return packed

    def linear(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x W^T + bias`, all in bfloat16: x `[..., inputs]`, packed `[outputs, inputs]`, bias `[outputs]`.

        Raises TypeError for x of another dtype.
        """
        x = _bfloat16(x)
        outputs, inputs = packed.shape
        y = x.new_empty((*x.shape[:-1], outputs))
        rows = x.numel() // inputs
        if self.record is not None:
            self.record(linear_op(x.view(rows, inputs), packed, bias, y.view(rows, outputs)))
            return y
        self._linear(
            self.threads,
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

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, kind: NormKind, epsilon: float) -> torch.Tensor:
        """Root mean square norm over the last dimension of x `[..., width]`. Raises TypeError for x not in bfloat16.

        Rows are computed, and the result is stored, in the order of x in memory. If tokens are the outermost dimension
        there, as in a transposed view of heads, a step of fewer tokens is the first rows of a captured operation.
        """
        order = [*sorted(range(x.dim() - 1), key=lambda dim: -x.stride(dim)), x.dim() - 1]
        x = _bfloat16(x.permute(order))
        y = torch.empty_like(x)
        width = x.shape[-1]
        if self.record is not None:
            self.record(rms_norm_op(x, weight, y, kind, epsilon))
        else:
            addresses = x.data_ptr(), weight.data_ptr(), y.data_ptr()
            self._rms_norm(self.threads, *addresses, x.numel() // width, width, kind, epsilon)
        return y.permute([order.index(dim) for dim in range(y.dim())])

    def argmax(self, logits: torch.Tensor) -> list[int]:
        """The token of the largest logit of each row, the first of equal ones; -1 where that logit is not finite.

        logits `[rows, vocabulary]` in bfloat16, last dimension contiguous.
        """
        rows, vocabulary = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        address = logits.data_ptr()
        self._argmax(self.threads, address, rows, vocabulary, logits.stride(0), tokens.data_ptr())
        return list(map(int, tokens.tolist()))


def _bfloat16(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is not torch.bfloat16:
        raise TypeError(f"the kernels compute in bfloat16, not in {x.dtype}")
    return x.contiguous()


CHUNK_BYTES = 32 << 20
SMALL_BYTES = 1 << 18
"""Smaller weights get ordinary memory, as they stay in a cache."""
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
