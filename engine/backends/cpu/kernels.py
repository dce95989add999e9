"""The Python side of the cpu kernels: runs operations, and records them while a graph is captured."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from engine.backends.cpu.build import load_library
from engine.backends.cpu.ops import OP, NormKind, Ops, linear_op, rms_norm_op

_PANEL = 16
"""The number of outputs of a layer must be a multiple of this: a packed panel has 16, 32 or 48."""
_PAIR = 2
"""The number of inputs of a layer must be a multiple of this: the dot product instruction takes pairs."""


class CpuKernels:
    """The compiled library, and the number of threads that its operations run on.

    While `record` is set, it is called with each operation instead of computing it: a `GraphCapture` needs addresses
    only, and the results have arbitrary content.
    """

    def __init__(self, threads: int) -> None:
        """Raises UnavailableError as `load_library`."""
        self.record: Callable[[Ops], None] | None = None
        self.threads = threads
        library = load_library()
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.splitserve_op_bytes.restype = number
        assert library.splitserve_op_bytes() == OP.itemsize, "op.hpp and ops.py differ"
        self._pack = library.splitserve_pack
        self._pack.argtypes = [pointer, number, number, pointer]
        self._run = library.splitserve_run
        self._run.argtypes = [pointer, number, ctypes.c_int]
        self._pack.restype = self._run.restype = None

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
        packed = torch.empty_like(weight)
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
        self.compute(linear_op(x.view(rows, inputs), packed, bias, y.view(rows, outputs)))
        return y

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, kind: NormKind, epsilon: float) -> torch.Tensor:
        """Root mean square norm over the last dimension of x `[..., width]`. Raises TypeError for x not in bfloat16.

        Rows are computed, and the result is stored, in the order of x in memory. If tokens are the outermost dimension
        there, as in a transposed view of heads, a step of fewer tokens is the first rows of a captured operation.
        """
        order = [*sorted(range(x.dim() - 1), key=lambda dim: -x.stride(dim)), x.dim() - 1]
        x = _bfloat16(x.permute(order))
        y = torch.empty_like(x)
        self.compute(rms_norm_op(x, weight, y, kind, epsilon))
        return y.permute([order.index(dim) for dim in range(y.dim())])


def _bfloat16(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is not torch.bfloat16:
        raise TypeError(f"the kernels compute in bfloat16, not in {x.dtype}")
    return x.contiguous()
