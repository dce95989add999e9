"""Captures a forward pass operation by operation, to replay it on other inputs at the same addresses.

The counterpart of a CUDA graph (`torch.cuda.CUDAGraph`) on cpu. The model's own code runs once under a dispatch mode
that sees every operation. Frequent operations become kernel operations, in lists that run without Python. Every other
operation is called again with the same arguments, and its result is copied to the place of the first result. So any
model can be captured; the more of its operations have kernels, the faster is the replay.

A graph is correct as long as the model's operations depend on its inputs through tensors only. Reading a value (`item`)
is detected and refused, and so are shapes that depend on values. As a further check, `CpuStepGraphs` compares the
results of its graphs on other inputs with those of the model.

Intermediate results that are not live at the same time share memory (`MemoryPlanner`), so a step's memory does not grow
with the number of layers, and stays in the processor's cache.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from engine.backends.cpu.kernels import CpuKernels
from engine.backends.cpu.ops import Binary, Code, Ops, Unary, elementwise_op

_aten = torch.ops.aten
_BINARY = {_aten.add.Tensor: Binary.ADD, _aten.sub.Tensor: Binary.SUB, _aten.mul.Tensor: Binary.MUL}
_UNARY = {_aten.neg.default: Unary.NEG, _aten.silu.default: Unary.SILU}
_COPIES = frozenset({_aten.clone.default, _aten.contiguous.default, _aten.reshape.default})
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_MASKS = (torch.bool, torch.uint8)
_EMPTY = frozenset({"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"})


class GraphCaptureError(Exception):
    """The model has an operation that cannot be captured."""


Call = Callable[[], None]
"""An operation without a kernel, called again in each replay."""


@dataclass(frozen=True, slots=True)
class CpuGraph:
    """What a `GraphCapture` recorded. To compute `output` from the inputs' content, run `parts` one after the other."""

    parts: list[Ops | Call]
    output: torch.Tensor
    memory: object
    """The owners of the memory that the operations address; kept alive with the graph."""


class GraphCapture(TorchDispatchMode):
    """Records every operation that runs within it, and computes those without a kernel. Enter it in inference mode."""

    def __init__(self, kernels: CpuKernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._entries: list[Ops | Call] = []
        self._buffers = Buffers()
        self._constants: dict[int, torch.UntypedStorage] = {}
        """Storages that operations read and that are no operation's result, by address; kept alive for the replays."""

    def __enter__(self) -> GraphCapture:
        self._kernels.record = self._record
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._kernels.record = None
        super().__exit__(*error)

    def _record(self, op: Ops) -> None:
        pointers = op["pointer"][0]
        for slot, pointer in enumerate(pointers.tolist()):
            if (place := self._buffers.find(pointer)) is not None:
                buffer, distance = place
                buffer.uses.append((len(self._entries), pointers, slot, distance))
        self._entries.append(op)

    def graph(self, output: torch.Tensor, planner: MemoryPlanner) -> CpuGraph:
        """The captured graph. Results that only kernels use get memory from `planner`, which graphs can share."""
        self._keep(output)
        assign_memory(self._buffers.all, planner)
        # Consecutive kernel operations become one array, which runs in a single call.
        parts: list[Ops | Call] = []
        run: list[Ops] = []
        for entry in [*self._entries, None]:
            if isinstance(entry, np.ndarray):
                run.append(entry)
                continue
            if run:
                parts.append(np.concatenate(run))
                run = []
            if entry is not None:
                parts.append(entry)
        return CpuGraph(parts, output, (planner, self._constants))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operation: computes it, then records how to compute it again."""
        kwargs = kwargs or {}
        if _depends_on_values(func, args):
            raise GraphCaptureError(f"{func} makes the step depend on values")
        if func not in _COPIES and _is_composite(func):
            return self._decompose(func, args, kwargs)
        result = func(*args, **kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        input_addresses = set()
        for tensor in inputs:
            storage = tensor.untyped_storage()
            input_addresses.add(storage.data_ptr())
            if self._buffers.find(storage.data_ptr()) is None:
                self._constants[storage.data_ptr()] = storage
        # An output in an input's memory is a view, or the input itself: it needs no memory of its own.
        new = [tensor for tensor in outputs if tensor.untyped_storage().data_ptr() not in input_addresses]
        for tensor in new:
            self._buffers.add(tensor.untyped_storage())
        if func._schema.is_mutable:
            self._record_call(lambda: func(*args, **kwargs), inputs)
        elif new and func._schema.name not in _EMPTY:
            ops = _as_ops(func, args, kwargs, new[0]) if len(outputs) == 1 else None
            if ops is not None:
                for op in ops:
                    self._record(op)
            else:
                self._record_copy_of(func, args, kwargs, outputs, inputs)
        return result

    def _decompose(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Captures the parts of a composite operation, which inference mode leaves whole (`bool` reads a value)."""
        super().__enter__()
        try:
            return func.decompose(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def _record_copy_of(
        self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> None:
        """Records a call of `func` whose results are copied into `outputs`."""

        def call() -> None:
            for target, source in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                target.copy_(source)

        self._record_call(call, [*inputs, *outputs])

    def _record_call(self, call: Call, tensors: list[torch.Tensor]) -> None:
        self._entries.append(call)
        for tensor in tensors:
            self._keep(tensor)

    def _keep(self, tensor: torch.Tensor) -> None:
        """Fixes the address of a tensor's memory, because operations without a kernel use it."""
        place = self._buffers.find(tensor.untyped_storage().data_ptr())
        if place is not None:
            place[0].fixed = True


@cache
def _is_composite(func: Any) -> bool:
    return bool(func.has_kernel_for_dispatch_key(_COMPOSITE))


def _depends_on_values(func: Any, args: tuple[Any, ...]) -> bool:
    if (
        func is _aten.index.Tensor
    ):  # the result's shape depends on the shape of indices, but on the values of masks
        return any(index is not None and index.dtype in _MASKS for index in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in arguments or results."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for part in value for tensor in _tensors(part)]


def _as_ops(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
) -> list[Ops] | None:
    """The kernel operations that compute `output`; None where the kernels cannot."""
    if output.dtype is not torch.bfloat16:
        return None
    if func is _aten.cat.default:
        return _cat(output, *args, **kwargs)
    if func in _BINARY and len(args) == 2 and not kwargs:
        return _elementwise(Code.BINARY, _BINARY[func], output, *args)
    if func in _UNARY:
        return _elementwise(Code.UNARY, _UNARY[func], output, args[0])
    if func in _COPIES:
        return _elementwise(Code.UNARY, Unary.COPY, output.view(args[0].shape), args[0])
    return None


def _elementwise(code: Code, which: Binary | Unary, output: torch.Tensor, *inputs: Any) -> list[Ops] | None:
    for tensor in inputs:
        if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.bfloat16:
            return None
    op = elementwise_op(code, which, output, *inputs)
    return None if op is None else [op]


def _cat(output: torch.Tensor, tensors: list[torch.Tensor], dim: int = 0) -> list[Ops] | None:
    ops: list[Ops] = []
    begin = 0
    for tensor in tensors:
        if tensor.shape == (0,):
            continue  # may lack dimensions that the others have
        part = output.narrow(dim, begin, tensor.shape[dim])
        begin += tensor.shape[dim]
        op = _elementwise(Code.UNARY, Unary.COPY, part, tensor)
        if op is None:
            return None
        ops += op
    return ops


ALIGNED = 64


@dataclass(slots=True, eq=False)
class Buffer:
    """A result's memory. `fixed`: operations without a kernel use its address, so it stays."""

    num_bytes: int
    fixed: bool = False
    uses: list[tuple[int, npt.NDArray[np.int64], int, int]] = field(default_factory=list)
    """Each use, in order: the operation's number, its pointer array, the index in it, the offset into the buffer."""


class MemoryPlanner:
    """Memory that graphs share: they are never replayed at the same time."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []

    def take(self, num_bytes: int) -> int:
        """The address of `num_bytes` bytes, valid for as long as the planner lives."""
        for chunk in self._chunks:
            if chunk.numel() >= num_bytes + ALIGNED:
                break
        else:
            # Powers of two, so that graphs of slightly growing size do not each take a chunk.
            chunk = torch.zeros((1 << (num_bytes - 1).bit_length()) + ALIGNED, dtype=torch.uint8)
            self._chunks.append(chunk)
        return -(-int(chunk.data_ptr()) // ALIGNED) * ALIGNED


def assign_memory(buffers: Iterable[Buffer], planner: MemoryPlanner) -> None:
    """Gives every buffer that is not fixed memory of the planner, and rewrites the operations' pointers."""
    movable = [buffer for buffer in buffers if buffer.uses and not buffer.fixed]
    offsets, size = _pack(movable)
    base = planner.take(size)
    for buffer, offset in zip(movable, offsets, strict=True):
        for _, pointers, slot, distance in buffer.uses:
            pointers[slot] = base + offset + distance


def _pack(buffers: list[Buffer]) -> tuple[list[int], int]:
    """The offset of each buffer and the total size in bytes.

    First fit in the order of first use: each buffer takes the lowest gap between the buffers that are live then.
    """
    offsets = [0] * len(buffers)
    live: list[tuple[int, int, int]] = []  # offset, end, last use
    size = 0
    for index in sorted(range(len(buffers)), key=lambda index: buffers[index].uses[0][0]):
        buffer = buffers[index]
        first, last = buffer.uses[0][0], buffer.uses[-1][0]
        live = sorted(entry for entry in live if entry[2] >= first)
        wanted = -(-buffer.num_bytes // ALIGNED) * ALIGNED
        offset = 0
        for begin, end, _ in live:
            if begin - offset >= wanted:
                break
            offset = max(offset, end)
        offsets[index] = offset
        live.append((offset, offset + wanted, last))
        size = max(size, offset + wanted)
    return offsets, size


class Buffers:
    """Results by address. Does not keep them alive: freed memory may be allocated again for another result."""

    def __init__(self) -> None:
        self.all: list[Buffer] = []
        self._starts: list[int] = []
        self._results: list[tuple[StorageWeakRef, Buffer]] = []

    def add(self, storage: torch.UntypedStorage) -> None:
        """Adds a result's new memory; forgets the freed results that it overlaps."""
        begin, num_bytes = storage.data_ptr(), storage.nbytes()
        if not num_bytes:
            return
        low, high = bisect_right(self._starts, begin), bisect_left(self._starts, begin + num_bytes)
        if low and self._starts[low - 1] + self._results[low - 1][1].num_bytes > begin:
            low -= 1
        buffer = Buffer(num_bytes)
        self._starts[low:high] = [begin]
        self._results[low:high] = [(StorageWeakRef(storage), buffer)]
        self.all.append(buffer)

    def find(self, address: int) -> tuple[Buffer, int] | None:
        """The live result that holds this address, and the offset of the address in it."""
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        storage, buffer = self._results[index]
        distance = address - self._starts[index]
        return None if distance >= buffer.num_bytes or storage.expired() else (buffer, distance)
