"""Attention of one step through a backend, and the same written down plainly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.core.model_runner import SamplingParams, ScheduledSequence
from engine.kv_cache.memory import KvCacheMemory
from engine.model.attention_interface import AttentionContext, LayerState
from kv_transfer.layout import KvLayout

BLOCK = 8
NUM_BLOCKS = 48
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def fill_with_nan(pool: KvCacheMemory) -> None:
    """Every block: what others left there must not get through."""
    pool.tensor.fill_(float("nan"))


def put(pool: KvCacheMemory, block: int, offset: int, kv: torch.Tensor) -> None:
    """Writes `[..., 2, kv_heads, head_dim]` of one position: of all layers, or of what `kv` broadcasts to."""
    pool.tensor[block, ..., offset, :] = kv


def values_of(pool: KvCacheMemory, blocks: Sequence[int]) -> torch.Tensor:
    """float64 `[blocks, layers, 2, kv_heads, block_size, head_dim]`: what the pool's bytes stand for."""
    return pool.tensor[list(blocks)].double()


@dataclass
class Rig:
    """A pool full of NaN but for the KV of some sequences, and new tokens of them.

    `compute` is the backend's `attend` on these: from the rig, the layer, the scale and the soft cap to
    `[tokens, heads, head_dim]`, decode rows first, then chunks.
    """

    compute: Callable[[Rig, LayerState, float, float | None], torch.Tensor]
    pool: KvCacheMemory
    batch: list[ScheduledSequence]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def make(
        cls,
        compute: Callable[[Rig, LayerState, float, float | None], torch.Tensor],
        steps: Sequence[tuple[int, int]],
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        device: torch.device | None = None,
        block: int = BLOCK,
        num_blocks: int = NUM_BLOCKS,
    ) -> Rig:
        """`steps`: computed before, and now, of each sequence."""
        device = device or torch.device("cpu")
        kv_dtype = str(dtype).removeprefix("torch.")
        pool = KvCacheMemory(KvLayout("model", kv_dtype, block, 2, kv_heads, head_dim), num_blocks, device)
        fill_with_nan(pool)
        numbers = torch.Generator().manual_seed(7)
        free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=numbers).to(device, dtype)

        batch = []
        for index, (computed, new) in enumerate(steps):
            blocks = [free.pop() for _ in range(-(-(computed + new) // block))]
            for position in range(computed):
                block_id, offset = blocks[position // block], position % block
                put(pool, block_id, offset, random(2, 2, kv_heads, head_dim))
            tokens = [0] * (computed + new)
            batch.append(
                ScheduledSequence(str(index), tokens, 1, computed, new, blocks, True, SamplingParams())
            )
        total = sum(new for _, new in steps)
        # As a model passes them: heads beside each other in a token's row.
        query = random(total, heads, head_dim).transpose(0, 1)
        key, value = (random(total, kv_heads, head_dim).transpose(0, 1) for _ in range(2))
        return cls(compute, pool, batch, query, key, value)

    def attend(self, window: int | None = None, softcap: float | None = None, layer: int = 1) -> torch.Tensor:
        """By the backend. Returns `[tokens, heads, head_dim]`."""
        state = LayerState(layer, AttentionContext(), window, True)
        return self.compute(self, state, self.query.shape[-1] ** -0.5, softcap)

    def order(self) -> list[ScheduledSequence]:
        """Sequences in the order of their rows."""
        return [s for s in self.batch if s.num_new == 1] + [s for s in self.batch if s.num_new != 1]

    def each_alone(self, window: int | None = None) -> Iterator[tuple[str, slice, torch.Tensor]]:
        """Each sequence computed without the others: its name, where its rows are among all, and its result. The rig
        has only the last one afterwards."""
        begin, parts = 0, (self.query, self.key, self.value)
        for sequence in self.order():
            span = slice(begin, begin + sequence.num_new)
            self.batch = [sequence]
            self.query, self.key, self.value = (part[:, span] for part in parts)
            yield sequence.request_id, span, self.attend(window)
            begin = span.stop

    def expected(
        self, window: int | None = None, softcap: float | None = None, layer: int = 1
    ) -> torch.Tensor:
        """In float64, one query after the other, from what is in the pool; rows in the backend's order."""
        group = self.query.shape[0] // self.key.shape[0]
        rows: list[torch.Tensor] = []
        for sequence in self.order():
            table = values_of(self.pool, list(sequence.block_ids))[:, layer]
            keys, values = table.permute(1, 2, 0, 3, 4).flatten(2, 3).repeat_interleave(group, 1)
            for position in range(sequence.num_computed, sequence.num_computed + sequence.num_new):
                low = 0 if window is None else max(0, position + 1 - window)
                query = self.query[:, len(rows)].double()
                scores = torch.einsum("hd,hkd->hk", query, keys[:, low : position + 1])
                scores *= self.query.shape[-1] ** -0.5
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                weights = scores.softmax(-1)
                rows.append(torch.einsum("hk,hkd->hd", weights, values[:, low : position + 1]))
        return torch.stack(rows)

    def check(self, **kind: Any) -> None:
        """One equals the other."""
        found = self.attend(**kind).double()
        tolerance = TOLERANCES[self.query.dtype]
        torch.testing.assert_close(found, self.expected(**kind), rtol=tolerance, atol=tolerance)
