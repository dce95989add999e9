"""Kernel operations made from tensors, in the memory layout of `src/op.hpp`."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

OP = np.dtype(
    [
        ("code", np.int64),
        ("pointer", np.int64, (6,)),
        ("size", np.int64, (4,)),
        ("stride", np.int64, (3, 4)),
        ("number", np.int64, (9,)),
        ("real", np.float64, (2,)),
    ]
)
Ops = npt.NDArray[Any]
"""Operations: an array `[n]` of dtype `OP`."""


class Code(IntEnum):
    """What an operation computes."""

    LINEAR = 0
    RMS_NORM = 1
    BINARY = 2
    UNARY = 3
    ATTEND = 4
    PREFILL = 5


class Binary(IntEnum):
    """Elementwise functions of two tensors."""

    ADD = 0
    SUB = 1
    MUL = 2


class Unary(IntEnum):
    """Elementwise functions of one tensor."""

    COPY = 0
    NEG = 1
    SILU = 2


class NormKind(IntEnum):
    """ROUNDED: rounds the normed value, then multiplies by the weight (Llama). ONE_PLUS: by 1 + weight, then rounds
    (Gemma)."""

    ROUNDED = 0
    ONE_PLUS = 1


def _op(code: Code) -> Ops:
    op = np.zeros(1, OP)
    op["code"] = code
    return op


def linear_op(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> Ops:
    """`y = x W^T + bias`, all in bfloat16.

    x `[rows, inputs]` and y `[rows, outputs]` contiguous, packed `[outputs, inputs]` (`CpuKernels.pack`), bias
    `[outputs]`.
    """
    op = _op(Code.LINEAR)
    rows, inputs = x.shape
    outputs = y.shape[1]
    op["pointer"][0, :4] = (
        x.data_ptr(),
        packed.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
    )
    op["number"][0, :5] = rows, inputs, outputs, inputs, outputs
    return op


def rms_norm_op(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, kind: NormKind, epsilon: float
) -> Ops:
    """Root mean square norm over the last dimension (arXiv:1910.07467); x and y `[..., width]` bfloat16, contiguous."""
    width = x.shape[-1]
    op = _op(Code.RMS_NORM)
    op["pointer"][0, :3] = x.data_ptr(), weight.data_ptr(), y.data_ptr()
    op["number"][0, :3] = x.numel() // width, width, kind
    op["real"][0, 0] = epsilon
    return op


def elementwise_op(code: Code, which: Binary | Unary, y: torch.Tensor, *inputs: torch.Tensor) -> Ops | None:
    """`y = f(inputs)`, each input broadcast to y's shape, all bfloat16; None if y has more than four dimensions."""
    if y.dim() > 4:
        return None
    op = _op(code)
    shape = (1,) * (4 - y.dim()) + tuple(y.shape)
    tensors = [tensor.expand(y.shape) for tensor in (y, *inputs, inputs[-1])[:3]]
    op["size"][0] = shape
    for place, tensor in enumerate(tensors):
        op["pointer"][0, place] = tensor.data_ptr()
        op["stride"][0, place] = (0,) * (4 - y.dim()) + tensor.stride()
    op["number"][0, 0] = which
    return op


def attend_op(
    code: Code,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    y: torch.Tensor,
    pool: torch.Tensor,
    step: npt.NDArray[np.int64],
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Ops:
    """Writes the new tokens' KV into the pool, then attends over it: ATTEND for one new token per sequence, PREFILL for
    new tokens of one sequence.

    All tensors are bfloat16: query `[heads, tokens, head_dim]`, key and value `[kv_heads, tokens, head_dim]`,
    y `[tokens, heads, head_dim]` contiguous, pool `[2, kv_heads, num_blocks, block_size, head_dim]`, one layer's view.
    step: see `DecodeInputs` and `ChunkInputs`. `window` counts positions, the token's own included.
    """
    op = _op(code)
    kv_heads, tokens, head_dim = key.shape
    pointers = (query, key, value, y, pool)
    op["pointer"][0] = (*(tensor.data_ptr() for tensor in pointers), step.ctypes.data)
    for place, tensor in enumerate((query, key, value)):
        op["stride"][0, place, :2] = tensor.stride()[:2]
    both, head, block = pool.stride()[:3]
    group, block_size = query.shape[0] // kv_heads, pool.shape[3]
    op["number"][0, :9] = tokens, kv_heads, group, head_dim, block_size, window or 0, both, block, head
    op["real"][0] = scale, softcap or 0.0
    return op
