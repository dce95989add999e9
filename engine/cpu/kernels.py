"""The kernels as Python calls them, at once or noted down for later."""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch

from engine.cpu.build import load_library
from engine.cpu.program import (
    OP,
    NormKind,
    Ops,
    int8_room_bytes,
    linear_int8_op,
    linear_op,
    rms_norm_op,
)
from engine.cpu.weight_memory import WeightMemory

_PANEL = 16
_PAIR = 2
_INT8_STEP = 16
"""Inputs that are quantized at once."""


class Recorder(Protocol):
    """Notes operations down while they are computed."""

    def note(self, op: Ops) -> None:
        """`op` has just been computed."""


class CpuKernels:
    """One library, and the number of threads that its operations run on.

    While `recorder` is set every operation is noted there too.
    """

    def __init__(self, threads: int) -> None:
        """Raises UnavailableError as `load_library`."""
        self.recorder: Recorder | None = None
        self._threads = threads
        self._weights = WeightMemory()
        library = load_library()
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.splitserve_op_bytes.restype = number
        assert library.splitserve_op_bytes() == OP.itemsize, "op.hpp and program.py differ"
        self._pack = library.splitserve_pack
        self._pack.argtypes = [pointer, number, number, pointer]
        self._run = library.splitserve_run
        self._run.argtypes = [pointer, number, ctypes.c_int]
        self._linear = library.splitserve_linear
        self._linear.argtypes = [ctypes.c_int, *[pointer] * 4, *[number] * 4]
        self._rms_norm = library.splitserve_rms_norm
        self._rms_norm.argtypes = [ctypes.c_int, *[pointer] * 3, *[number] * 3, ctypes.c_double]
        self._likeliest = library.splitserve_likeliest
        self._likeliest.argtypes = [ctypes.c_int, pointer, *[number] * 3, pointer]
        for function in (self._likeliest, self._pack, self._run, self._linear, self._rms_norm):
            function.restype = None

    def run(self, ops: Ops) -> None:
        """Computes operations, one after the other."""
        self._run(ops.ctypes.data, len(ops), self._threads)

    def compute(self, op: Ops) -> None:
        """Computes one operation, and notes it."""
        self.run(op)
        if self.recorder is not None:
            self.recorder.note(op)

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
        """A weight as `linear` or `linear_int8` wants it, in as much memory."""
        weight = weight.detach().contiguous()
        packed = self._weights.like(weight)
        outputs, inputs = weight.shape
        self._pack(weight.data_ptr(), outputs, inputs * weight.itemsize, packed.data_ptr())
        return packed

    def linear(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x W^T + bias`; x `[..., inputs]`, packed `[outputs, inputs]`. Raises TypeError for x of another dtype."""
        x = _bfloat16(x)
        outputs, inputs = packed.shape
        y = x.new_empty((*x.shape[:-1], outputs))
        rows = x.numel() // inputs
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
        if self.recorder is not None:
            self.recorder.note(linear_op(x.view(rows, inputs), packed, bias, y.view(rows, outputs)))
        return y

    def linear_int8(
        self, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`x W^T + bias` with int8 weights and each row of x quantized; see `linear_int8_op`."""
        outputs, inputs = packed.shape
        x = _bfloat16(x).view(-1, inputs)
        y = x.new_empty((x.shape[0], outputs))
        room = torch.empty(int8_room_bytes(x.shape[0], inputs), dtype=torch.uint8)
        self.compute(linear_int8_op(x, packed, scales, bias, y, room))
        return y

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, kind: NormKind, epsilon: float) -> torch.Tensor:
        """Root mean square norm of the last dimension. Raises TypeError for x of another dtype."""
        x = _bfloat16(x)
        y = torch.empty_like(x)
        width = x.shape[-1]
        self._rms_norm(
            self._threads,
            x.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            x.numel() // width,
            width,
            kind,
            epsilon,
        )
        if self.recorder is not None:
            self.recorder.note(rms_norm_op(x, weight, y, kind, epsilon))
        return y

    def likeliest(self, logits: torch.Tensor) -> list[int]:
        """The place of the first of each row's largest logits `[rows, vocabulary]`; -1 where that is not finite."""
        rows, vocabulary = logits.shape
        places = torch.empty(rows, dtype=torch.int64)
        address = logits.data_ptr()
        self._likeliest(self._threads, address, rows, vocabulary, logits.stride(0), places.data_ptr())
        return list(map(int, places.tolist()))


def _bfloat16(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is not torch.bfloat16:
        raise TypeError(f"the kernels compute in bfloat16, not in {x.dtype}")
    return x.contiguous()
