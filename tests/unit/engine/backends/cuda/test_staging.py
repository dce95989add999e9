"""Flattened and staged steps: order, slots, tables, padding, and stable addresses."""

from __future__ import annotations

import numpy as np
import torch

from engine.backends.cuda.block_table import DeviceBlockTable
from engine.backends.cuda.forward import AsyncArgmax
from engine.backends.cuda.staging import NOWHERE, PlacedStep, Staging
from engine.backends.cuda.step_graphs import MAX_ROWS, bucket_sizes
from engine.backends.interface import flatten
from engine.core.model_runner import SamplingParams, ScheduledSequence

CPU = torch.device("cpu")
BLOCK = 4


def scheduled(
    tokens: list[int], computed: int, new: int, blocks: list[int], sample: bool = True
) -> ScheduledSequence:
    return ScheduledSequence("r", tokens, 1, computed, new, blocks, sample, SamplingParams())


MIXED = [
    scheduled([10, 11, 12, 13, 14, 15], 3, 3, [7, 2, 9]),  # a chunk; its last block holds nothing yet
    scheduled([20, 21, 22, 23, 24], 4, 1, [5, 1]),
    scheduled([30, 31], 0, 2, [8], sample=False),
    scheduled([40], 0, 1, [3]),
]


def placed(batch: list[ScheduledSequence]) -> PlacedStep:
    return DeviceBlockTable(8, 4, BLOCK, CPU).place(flatten(batch))


def test_decode_rows_come_first_and_tables_end_with_the_context() -> None:
    step = placed(MIXED)
    flat = step.flat
    assert flat.token_ids.tolist() == [24, 40, 13, 14, 15, 30, 31]
    assert flat.positions.tolist() == [4, 0, 3, 4, 5, 0, 1]
    assert step.slots.tolist() == [4, 12, 31, 8, 9, 32, 33]
    assert flat.contexts.tolist() == [5, 1, 6, 2]
    assert flat.query_starts.tolist() == [0, 1, 2, 5, 7]
    assert step.table_starts.tolist() == [0, 4, 8, 12]
    assert step.tables[:16].tolist() == [5, 1, 0, 0, 3, 0, 0, 0, 7, 2, 0, 0, 8, 0, 0, 0]
    assert flat.sample_rows.tolist() == [0, 1, 4]
    assert flat.sample_order == [1, 3, 0]
    assert (flat.num_decode, flat.num_prefill, flat.longest_chunk) == (2, 2, 3)
    assert not flat.decode_only


def test_padded_rows_read_and_write_no_kv() -> None:
    step = placed([MIXED[1], MIXED[3]]).padded(4)
    assert step.flat.decode_only
    assert step.flat.num_decode == 4
    assert step.slots.tolist() == [4, 12, NOWHERE, NOWHERE]
    assert step.flat.contexts.tolist() == [5, 1, 0, 0]
    assert step.flat.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert step.flat.sample_rows.tolist() == [0, 1, 0, 0]
    nothing = DeviceBlockTable(8, 4, BLOCK, CPU).nothing()
    assert nothing.padded(2).flat.contexts.tolist() == [0, 0]


def test_staged_arrays_are_those_of_the_step() -> None:
    staging = Staging(4, CPU)  # grows
    for batch in (MIXED, MIXED[:1], MIXED[1:]):
        step = placed(batch)
        inputs = staging.stage(step)
        assert inputs.token_ids.tolist() == [step.flat.token_ids.tolist()]
        assert inputs.positions.tolist() == [step.flat.positions.tolist()]
        assert inputs.tables is step.tables
        for name in ("slots", "contexts", "query_starts", "table_starts", "sample_rows"):
            array = getattr(step if name in ("slots", "table_starts") else step.flat, name)
            tensor = getattr(inputs, name)
            assert np.array_equal(array, tensor.numpy()), name
            assert tensor.numel() == 0 or tensor.data_ptr() % 16 == inputs.token_ids.data_ptr() % 16


def test_steps_of_one_size_have_the_same_addresses() -> None:
    """A captured graph contains addresses."""
    staging, table = Staging(256, CPU), DeviceBlockTable(8, 4, BLOCK, CPU)
    addresses = []
    for step in (
        table.nothing(),
        *(table.place(flatten(part)) for part in (MIXED[1:2], [MIXED[3], MIXED[1]])),
    ):
        inputs = staging.stage(step.padded(4))
        by_row = (inputs.token_ids, inputs.positions, inputs.slots)
        by_sequence = (inputs.contexts, inputs.query_starts, inputs.table_starts, inputs.sample_rows)
        addresses.append([tensor.data_ptr() for tensor in (*by_row, *by_sequence, inputs.tables)])
    assert addresses[0] == addresses[1] == addresses[2]
    assert all(addresses[0]), "an empty tensor would have no address"


def test_bucket_sizes() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(3) == [1, 2, 4]
    assert bucket_sizes(64) == [1, 2, 4, 8, 16, 32, 48, 64]
    assert bucket_sizes(65)[-1] == 80
    assert bucket_sizes(10_000)[-1] == MAX_ROWS


def test_argmax() -> None:
    nan, infinity = float("nan"), float("inf")
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, nan, 0.0], [0.0, infinity, 1.0], [-infinity, -2.0, -3.0]])
    assert AsyncArgmax(logits)() == [1, -1, -1, 1]
    assert AsyncArgmax(logits.bfloat16())() == [1, -1, -1, 1]
