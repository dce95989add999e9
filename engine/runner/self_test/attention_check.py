"""Attention by a backend's kernels against the same in float64, on the device and for the shapes of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.backends.cuda.block_table import DeviceBlockTable
from engine.backends.cuda.forward import PagedAttention
from engine.backends.cuda.staging import Staging
from engine.backends.interface import flatten
from engine.core.types import SamplingParams, ScheduledSequence
from engine.kv_cache.int8_kv import quantize
from engine.kv_cache.memory import DTYPES, KvCacheMemory
from engine.model.attention_interface import AttentionContext, LayerState
from engine.model.probe import AttentionKind
from engine.runner.self_test.verdict import WrongResultError
from kv_transfer.layout import KvLayout
from splitserve.generation.kv_blocks import blocks_for

MakeAttention = Callable[[KvCacheMemory], PagedAttention]
LAYERS = 2
LONG_CONTEXT = 1500
"""Tokens; enough that the keys of a decode row are split over several programs."""
MOST_WINDOW = 8192
TOLERANCES = {"float32": 2e-5, "bfloat16": 3e-2}
"""Most difference of an element, whose inputs are normally distributed."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """What kernels are compiled for besides the kind of layer.

    `dtype`: "float32" or "bfloat16". `kv_dtype`: that of the pool, or "int8".
    """

    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    kv_dtype: str = ""
    """"": as `dtype`."""

    def pool(self, num_blocks: int, device: torch.device) -> KvCacheMemory:
        """A small pool of blocks of this shape."""
        dtype = self.kv_dtype or self.dtype
        layout = KvLayout("self-test", dtype, self.block_size, LAYERS, self.kv_heads, self.head_dim)
        return KvCacheMemory(layout, num_blocks, device)


def check_attention(
    make: MakeAttention,
    shape: KvShape,
    kinds: Sequence[AttentionKind],
    device: torch.device,
    long_context: int = LONG_CONTEXT,
) -> None:
    """Decode rows and chunks at and around the ends of blocks, and a long context, for each kind of layer.

    The pool is full of NaN but for the KV of the sequences. Raises WrongResultError.
    """
    for kind in kinds:
        beyond = min(kind.window or 0, MOST_WINDOW) + shape.block_size + 1
        _Sample(make, shape, kind, device).check(max(long_context, beyond))


class _Sample:
    """Sequences with random KV for one kind of layer."""

    def __init__(
        self, make: MakeAttention, shape: KvShape, kind: AttentionKind, device: torch.device
    ) -> None:
        self._make, self._shape, self._kind, self._device = make, shape, kind, device
        self._numbers = torch.Generator().manual_seed(7)

    def _random(self, *sizes: int) -> torch.Tensor:
        """On the host, rounded to the dtype of the model."""
        return torch.randn(sizes, generator=self._numbers).to(DTYPES[self._shape.dtype])

    def check(self, long_context: int) -> None:
        shape, kind, size = self._shape, self._kind, self._shape.block_size
        # Computed before, and now. Rows of one token first: so they come back in this order.
        steps = [(size - 1, 1), (size, 1), (long_context, 1), (0, size + 1), (3, size + 3)]
        counts = [blocks_for(computed + new, size) for computed, new in steps]
        pool = shape.pool(sum(counts) + 1, self._device)
        if pool.scales is None:
            pool.tensor.fill_(float("nan"))
        else:
            pool.scales.fill_(float("nan"))
        free = torch.randperm(sum(counts) + 1, generator=self._numbers).tolist()
        batch, expected, new_rows = [], [], []
        for (computed, new), count in zip(steps, counts, strict=True):
            blocks, free = free[:count], free[count:]
            total = computed + new
            kv = self._random(2, shape.kv_heads, total, shape.head_dim)
            query = self._random(kind.heads, new, shape.head_dim)
            _write(pool, blocks, kv[:, :, :computed])
            batch.append(ScheduledSequence("", [0] * total, 1, computed, new, blocks, True, SamplingParams()))
            expected.append(reference(query, kv if pool.scales is None else _rounded(kv), kind))
            new_rows.append((query, kv[:, :, computed:]))
        query, key, value = (
            # As a model passes them: heads beside each other in a token's row.
            torch.cat(part, 1).transpose(0, 1).contiguous().to(self._device).transpose(0, 1)
            for part in (
                [query for query, _ in new_rows],
                [kv[0] for _, kv in new_rows],
                [kv[1] for _, kv in new_rows],
            )
        )
        backend = self._make(pool)
        table = DeviceBlockTable(len(batch), max(counts), size, self._device)
        backend.inputs = Staging(8, self._device).stage(table.place(flatten(batch)))
        layer = LayerState(1, AttentionContext(), kind.window, True)
        found = backend.attend(layer, query, key, value, shape.head_dim**-0.5, kind.softcap)
        require_close(found, torch.cat(expected), shape.dtype, _shown(kind))


def _write(pool: KvCacheMemory, blocks: Sequence[int], kv: torch.Tensor) -> None:
    """Puts `kv` `[2, kv_heads, tokens, head_dim]` into the blocks of layer 1."""
    size = pool.layout.block_size_tokens
    for number in range(blocks_for(kv.shape[2], size)):
        part = kv[:, :, number * size : (number + 1) * size]
        place = blocks[number], 1, slice(None), slice(None), slice(part.shape[2])
        if pool.scales is None:
            pool.tensor[place] = part.to(pool.device)
        else:
            pool.tensor[place], pool.scales[place] = quantize(part.to(pool.device))


def _rounded(kv: torch.Tensor) -> torch.Tensor:
    """In float64: what is left of bfloat16 KV in int8."""
    codes, scales = quantize(kv)
    return codes.double() * scales.double().unsqueeze(-1)


def reference(query: torch.Tensor, kv: torch.Tensor, kind: AttentionKind) -> torch.Tensor:
    """Attention of the last tokens of a sequence in float64: `query` `[heads, new, head_dim]`, `kv` `[2, kv_heads,
    tokens, head_dim]` to `[new, heads, head_dim]`."""
    heads, new, head_dim = query.shape
    keys, values = kv.double().repeat_interleave(heads // kv.shape[1], 1)
    scores = query.double() @ keys.transpose(1, 2) * head_dim**-0.5
    if kind.softcap is not None:
        scores = torch.tanh(scores / kind.softcap) * kind.softcap
    places = torch.arange(kv.shape[2])
    rows = places[-new:, None]
    hidden = places > rows
    if kind.window is not None:
        hidden |= places <= rows - kind.window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ values).transpose(0, 1)


def require_close(found: torch.Tensor, expected: torch.Tensor, dtype: str, what: str) -> None:
    """Raises WrongResultError where an element of `found` differs by more than the dtype's tolerance, or is a NaN."""
    difference = (found.cpu().double() - expected.double()).abs().max().item()
    if not difference <= TOLERANCES[dtype]:  # a NaN is not
        raise WrongResultError(f"{what}: off by {difference:.2g}, {TOLERANCES[dtype]:g} is allowed")


def _shown(kind: AttentionKind) -> str:
    window = "" if kind.window is None else f", window {kind.window}"
    softcap = "" if kind.softcap is None else f", soft cap {kind.softcap:g}"
    return f"{kind.heads} heads{window}{softcap}"
