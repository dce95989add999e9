"""Stand-ins for the kernels and graphs of a GPU: they compute in plain torch, and can be told to do it wrongly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch

from dev.gpu_self_checks import reference
from engine.backends.cuda.block_table import DeviceBlockTable
from engine.backends.cuda.staging import NOWHERE, PlacedStep, Staging, StepInputs
from engine.backends.cuda.step_graphs import bucket_sizes
from engine.kv_cache.memory import KvCacheMemory
from engine.model.attention_interface import LayerState, NewTokens
from engine.model.probe import AttentionKind

KernelFault = Literal["none", "no window", "no soft cap", "next slot", "nan", "one key too many", "raises"]
GraphFault = Literal[
    "none",
    "nothing captured",
    "stale",
    "padded rows write",
    "too small",
    "old table",
]
UNUSED_SLOT = 20
"""In a block that the check's sequences have and never reach."""


class PlainAttention:
    """Attention over a pool on cpu, one sequence after the other."""

    def __init__(self, pool: KvCacheMemory, fault: KernelFault = "none") -> None:
        self.inputs: StepInputs | None = None
        self._pool, self._fault = pool, fault

    def attend(
        self, layer: LayerState, tokens: NewTokens, scale: float, softcap: float | None
    ) -> torch.Tensor:
        assert self.inputs is not None
        query, key, value = tokens
        if self._fault == "raises":
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
        flat, size = self.inputs.flat, self._pool.layout.block_size_tokens
        kv = torch.stack((key, value))
        for row, slot in enumerate(self.inputs.slots.tolist()):
            if slot == NOWHERE:
                continue
            place = (slot + (self._fault == "next slot")) % (size * self._pool.num_blocks)
            self._pool.tensor[place // size, layer.index, :, :, place % size] = kv[:, :, row]
        window = None if self._fault == "no window" else layer.window
        cap = None if self._fault == "no soft cap" else softcap
        output = torch.zeros(query.shape[1], query.shape[0], query.shape[2], dtype=query.dtype)
        for index, keys in enumerate(flat.contexts.tolist()):
            begin, end = flat.query_starts[index : index + 2].tolist()
            if keys == 0:
                continue  # a padded row
            context = keys + (self._fault == "one key too many")
            first = int(self.inputs.table_starts[index])
            table = self.inputs.tables[first : first + -(-context // size)].tolist()
            mine = self._pool.tensor[table, layer.index].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
            kind = AttentionKind(query.shape[0], window, cap)
            output[begin:end] = reference(query[:, begin:end], mine, kind).to(query.dtype)
        if self._fault == "nan":
            output[0, 0, 0] = float("nan")
        return output


class PlainGraphs:
    """Replays by computing again, padded as a graph is."""

    def __init__(
        self,
        compute: Callable[[StepInputs], torch.Tensor],
        device: torch.device,
        max_rows: int,
        table: DeviceBlockTable,
        fault: GraphFault = "none",
    ) -> None:
        self._compute, self._fault = compute, fault
        self._staging = Staging(8, device)
        self._sizes = bucket_sizes(max_rows)
        self._last: torch.Tensor | None = None
        self._old: torch.Tensor | None = None

    @property
    def captured(self) -> list[int]:
        return [] if self._fault == "nothing captured" else self._sizes

    def logits(self, step: PlacedStep) -> torch.Tensor | None:
        rows = step.flat.num_decode
        if self._fault == "too small" and rows > 2:
            return None
        if self._fault == "old table":
            self._old = step.tables.clone() if self._old is None else self._old
            step = replace(step, tables=self._old)
        padded = step.padded(next(size for size in self._sizes if size >= rows))
        if self._fault == "padded rows write":
            padded.slots[rows:] = UNUSED_SLOT
        logits = self._compute(self._staging.stage(padded))
        if self._fault == "stale":
            logits, self._last = (logits if self._last is None else self._last), logits
        return logits[: len(step.flat.sample_order)]
