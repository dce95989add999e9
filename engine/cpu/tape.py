"""A pass of the model noted down operation by operation, to be played again on other inputs in the same places.

What a CUDA graph is on a GPU: the model's own code runs once, under a dispatch mode that sees every operation. The
frequent ones become operations of the kernels, in lists that run without Python; each other one is called again as it
was and its result copied to where the first one lay. So a tape holds for any model, only faster for some.

A tape is right as long as what the model does depends on its inputs through tensors alone. Reading a value (`item`)
is seen and refused, and so is a shape that depends on values; whoever makes a tape also plays it on other inputs than
those it was made with, and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.cpu.arena import Arena, place
from engine.cpu.buffers import Buffers
from engine.cpu.kernels import CpuKernels
from engine.cpu.program import Binary, Code, Ops, Unary, elementwise_op

_aten = torch.ops.aten
_BINARY = {_aten.add.Tensor: Binary.ADD, _aten.sub.Tensor: Binary.SUB, _aten.mul.Tensor: Binary.MUL}
_UNARY = {_aten.neg.default: Unary.NEG, _aten.silu.default: Unary.SILU}
_COPIES = frozenset({_aten.clone.default, _aten.contiguous.default, _aten.reshape.default})
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_MASKS = (torch.bool, torch.uint8)
_EMPTY = frozenset({"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"})


class NoTapeError(Exception):
    """The model does something that cannot be noted down."""


CANNOT_BE_NOTED = (
    NoTapeError,
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
)
"""What a model may raise when its operations are looked at."""
Call = Callable[[], None]


class Tape:
    """Plays what a `Recording` has noted."""

    def __init__(
        self, kernels: CpuKernels, parts: list[Ops | Call], output: torch.Tensor, memory: object
    ) -> None:
        """`memory`: what owns the memory that the operations name."""
        self._kernels, self._parts, self._output, self._memory = kernels, parts, output, memory

    @property
    def num_ops(self) -> tuple[int, int]:
        """Operations of kernels, and calls of others."""
        ops = [len(part) for part in self._parts if isinstance(part, np.ndarray)]
        return sum(ops), len(self._parts) - len(ops)

    def play(self) -> torch.Tensor:
        """The output, always the same tensor."""
        for part in self._parts:
            if isinstance(part, np.ndarray):
                self._kernels.run(part)
            else:
                part()
        return self._output


class Recording(TorchDispatchMode):
    """Computes and notes down what happens within it. Enter it in inference mode."""

    def __init__(self, kernels: CpuKernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._notes: list[Ops | Call] = []
        self._buffers = Buffers()
        self._constants: dict[int, torch.UntypedStorage] = {}
        """What was read and is nobody's result, by address: operations name it, so it must stay."""

    def __enter__(self) -> Recording:
        self._kernels.recorder = self
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._kernels.recorder = None
        super().__exit__(*error)

    def note(self, op: Ops) -> None:
        """See `Recorder.note`."""
        pointers = op["pointer"][0]
        for slot, pointer in enumerate(pointers.tolist()):
            found = self._buffers.find(pointer)
            if found is not None:
                buffer, distance = found
                buffer.uses.append((len(self._notes), pointers, slot, distance))
        self._notes.append(op)

    def tape(self, output: torch.Tensor, arena: Arena) -> Tape:
        """What was noted; results that only kernels see lie in the arena, which tapes can share."""
        self._keep(output)
        place(self._buffers.all, arena)
        parts: list[Ops | Call] = []
        run: list[Ops] = []
        for note in [*self._notes, None]:
            if isinstance(note, np.ndarray):
                run.append(note)
                continue
            if run:
                parts.append(np.concatenate(run))
                run = []
            if note is not None:
                parts.append(note)
        return Tape(self._kernels, parts, output, (arena, self._constants))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called for every operation."""
        kwargs = kwargs or {}
        if _depends_on_values(func, args):
            raise NoTapeError(f"{func} makes the step depend on values")
        if func not in _COPIES and func.has_kernel_for_dispatch_key(_COMPOSITE):
            return self._within(func, args, kwargs)
        result = func(*args, **kwargs)
        given, made = _tensors((args, kwargs)), _tensors(result)
        places = {}
        for tensor in given:
            storage = tensor.untyped_storage()
            places[storage.data_ptr()] = storage
            if self._buffers.find(storage.data_ptr()) is None:
                self._constants[storage.data_ptr()] = storage
        new = [tensor for tensor in made if tensor.untyped_storage().data_ptr() not in places]
        for tensor in new:
            self._buffers.add(tensor.untyped_storage())
        if func._schema.is_mutable:
            self._call(lambda: func(*args, **kwargs), given)
        elif new and func._schema.name not in _EMPTY:
            ops = _as_ops(func, args, kwargs, new[0]) if len(made) == 1 else None
            if ops is not None:
                for op in ops:
                    self.note(op)
            else:
                self._again(func, args, kwargs, made, given)
        return result

    def _within(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Inference mode passes operations on that consist of others: what these do must be seen (`bool` reads one)."""
        super().__enter__()
        try:
            return func.decompose(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def _again(
        self, func: Any, args: Any, kwargs: Any, made: list[torch.Tensor], given: list[torch.Tensor]
    ) -> None:
        def again() -> None:
            for target, source in zip(made, _tensors(func(*args, **kwargs)), strict=True):
                target.copy_(source)

        self._call(again, [*given, *made])

    def _call(self, call: Call, tensors: list[torch.Tensor]) -> None:
        self._notes.append(call)
        for tensor in tensors:
            self._keep(tensor)

    def _keep(self, tensor: torch.Tensor) -> None:
        """Its memory stays where it is."""
        found = self._buffers.find(tensor.untyped_storage().data_ptr())
        if found is not None:
            found[0].fixed = True


def _depends_on_values(func: Any, args: tuple[Any, ...]) -> bool:
    if func is _aten.index.Tensor:  # by numbers it has the shape of these, only by masks another
        return any(index is not None and index.dtype in _MASKS for index in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _tensors(value: Any) -> list[torch.Tensor]:
    """Those in arguments or results whose memory can be told; weights packed for oneDNN have none."""
    if isinstance(value, torch.Tensor):
        return [value] if value.layout is torch.strided else []
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for part in value for tensor in _tensors(part)]


def _as_ops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: torch.Tensor) -> list[Ops] | None:
    """What has just been computed as operations of the kernels; None where they have none for it."""
    if made.dtype is not torch.bfloat16:
        return None
    if func is _aten.cat.default:
        return _cat(made, *args, **kwargs)
    if func in _BINARY and len(args) == 2 and not kwargs:
        return _elementwise(Code.BINARY, _BINARY[func], made, *args)
    if func in _UNARY:
        return _elementwise(Code.UNARY, _UNARY[func], made, args[0])
    if func in _COPIES:
        return _elementwise(Code.UNARY, Unary.COPY, made.view(args[0].shape), args[0])
    return None


def _elementwise(code: Code, which: Binary | Unary, made: torch.Tensor, *inputs: Any) -> list[Ops] | None:
    for tensor in inputs:
        if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.bfloat16:
            return None
    op = elementwise_op(code, which, made, *inputs)
    return None if op is None else [op]


def _cat(made: torch.Tensor, tensors: list[torch.Tensor], dim: int = 0) -> list[Ops] | None:
    ops: list[Ops] = []
    begin = 0
    for tensor in tensors:
        if tensor.shape == (0,):
            continue  # may lack dimensions that the others have
        part = made.narrow(dim, begin, tensor.shape[dim])
        begin += tensor.shape[dim]
        op = _elementwise(Code.UNARY, Unary.COPY, part, tensor)
        if op is None:
            return None
        ops += op
    return ops
