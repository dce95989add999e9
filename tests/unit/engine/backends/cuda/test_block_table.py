"""Block tables that stay on the device, against tables made anew for each step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends.cuda.block_table import DeviceBlockTable
from engine.backends.interface import FlatStep, Ints, flatten
from engine.core.engine import EngineRequest, StopParams
from engine.core.model_runner import SamplingParams, ScheduledSequence
from engine.core.scheduler import KVCacheManager
from engine.core.sequence import Sequence
from engine.kv_cache.block_pool import BlockPool
from splitserve.generation.kv_blocks import blocks_for

CPU = torch.device("cpu")
BLOCK = 4
ROWS = 6
COLUMNS = 16
BLOCKS = 48


def scheduled(table_id: int, computed: int, blocks: list[int], new: int = 1) -> ScheduledSequence:
    tokens = list(range(computed + new))
    return ScheduledSequence("r", tokens, 1, computed, new, blocks, True, SamplingParams(), table_id=table_id)


def check(table: DeviceBlockTable, flat: FlatStep) -> Ints:
    """The step as the kernels would read it is what its sequences say; returns the rows."""
    step = table.place(flat)
    slots = []
    for sequence, start in zip(flat.sequences, step.table_starts.tolist(), strict=True):
        end = sequence.num_computed + sequence.num_new
        width = blocks_for(end, BLOCK)
        assert step.tables[start : start + width].tolist() == list(sequence.block_ids[:width])
        places = range(sequence.num_computed, end)
        slots += [sequence.block_ids[place // BLOCK] * BLOCK + place % BLOCK for place in places]
    assert step.slots.tolist() == slots
    return step.table_starts // COLUMNS


class Engine:
    """Sequences over a pool of blocks, which start, grow, are preempted, resume and end at random."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.kv = KVCacheManager(BlockPool(BLOCKS), BLOCK)
        self.live: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.arrived = 0

    def arrive(self) -> None:
        # Few first tokens: most prompts share a prefix with an earlier one, and so its cached blocks.
        head = [self.pick.randrange(2)] * self.pick.randrange(1, 24)
        prompt = head + [self.pick.randrange(100) for _ in range(self.pick.randrange(8))]
        stop = StopParams(COLUMNS * BLOCK)
        self.arrived += 1
        request = EngineRequest(str(self.arrived), tuple(prompt), SamplingParams(), stop)
        self.waiting.append(Sequence(request, self.arrived))

    def change(self) -> None:
        """Something happens between two steps."""
        for _ in range(self.pick.randrange(3)):
            self.arrive()
        if self.live and self.pick.random() < 0.25:
            ended = self.live.pop(self.pick.randrange(len(self.live)))
            self.kv.free(ended)
            if self.pick.random() < 0.5:
                self.waiting.append(ended)  # preempted: it resumes, in other blocks
        while self.waiting and len(self.live) < ROWS:
            sequence = self.waiting[0]
            if self.kv.start(sequence, watermark=0) is None:
                break
            self.live.append(self.waiting.pop(0))

    def step(self) -> list[ScheduledSequence]:
        """A part of the running sequences, chunks and single tokens mixed."""
        return [
            sequence.scheduled(min(sequence.remaining, self.pick.choice((1, 3, 64))))
            for sequence in self.live
            if self.pick.random() < 0.8
        ]

    def finish(self, batch: list[ScheduledSequence]) -> None:
        by_id = {sequence.request_id: sequence for sequence in self.live}
        for item in batch:
            sequence = by_id[item.request_id]
            sequence.num_computed += item.num_new
            self.kv.cache_computed(sequence)
            if item.sample:
                sequence.tokens.append(self.pick.randrange(100))
                full = len(sequence.tokens) > COLUMNS * BLOCK or not self.kv.grow(sequence)
                if full:
                    self.live.remove(sequence)
                    self.kv.free(sequence)


@pytest.mark.parametrize("seed", range(12))
def test_the_kept_table_is_the_one_made_anew(seed: int) -> None:
    engine, table = Engine(seed), DeviceBlockTable(ROWS, COLUMNS, BLOCK, CPU)
    steps = hits = 0
    for _ in range(150):
        engine.change()
        batch = engine.step()
        if batch:
            check(table, flatten(batch))
            steps += 1
        engine.finish(batch)
        hits += sum(sequence.cached_tokens > 0 for sequence in engine.live)
    assert steps > 100
    assert hits
    assert engine.arrived > 5 * ROWS, "rows go from one sequence to the next many times"


def changed_entries(table: DeviceBlockTable, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many entries each copy to the device has from now on."""
    counts: list[int] = []
    send = table._upload.send

    def counted(arrays: list[Any]) -> list[torch.Tensor]:
        counts.append(len(arrays[0]))
        return send(arrays)

    monkeypatch.setattr(table._upload, "send", counted)
    return counts


def test_only_new_entries_are_sent_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    table = DeviceBlockTable(ROWS, COLUMNS, BLOCK, CPU)
    counts = changed_entries(table, monkeypatch)
    first, second = [7, 3, 9], [5]
    check(table, flatten([scheduled(1, 9, first), scheduled(2, 2, second)]))
    check(table, flatten([scheduled(1, 10, first), scheduled(2, 3, second)]))
    assert counts == [4], "the second step needs no copy"
    second.append(8)
    check(table, flatten([scheduled(1, 11, first), scheduled(2, 4, second)]))
    assert counts == [4, 1]
    check(table, flatten([scheduled(3, 0, [1, 2], new=6), scheduled(1, 11, first)]))
    assert counts == [4, 1, 2]


def test_a_row_stays_while_its_sequence_runs() -> None:
    table = DeviceBlockTable(ROWS, COLUMNS, BLOCK, CPU)
    address = table.tables.data_ptr()
    row = None
    for other in range(2, 40):
        rows = check(table, flatten([scheduled(other, 0, [other]), scheduled(1, other, list(range(20, 36)))]))
        assert row is None or rows[1] == row
        row = rows[1]
    assert table.tables.data_ptr() == address


def test_tables_without_a_name_are_sent_each_time() -> None:
    table = DeviceBlockTable(ROWS, COLUMNS, BLOCK, CPU)
    for blocks in ([1, 2], [3, 4], [5, 6]):
        check(table, flatten([scheduled(0, 6, blocks), scheduled(0, 6, blocks[::-1])]))


def test_a_step_that_has_no_room_is_refused() -> None:
    table = DeviceBlockTable(2, 2, BLOCK, CPU)
    with pytest.raises(ValueError, match="room for 2 of 2"):
        table.place(flatten([scheduled(number, 0, [number]) for number in (1, 2, 3)]))
    with pytest.raises(ValueError, match="up to 3 blocks"):
        table.place(flatten([scheduled(1, 8, [1, 2, 3])]))
    check(table, flatten([scheduled(1, 7, [1, 2])]))


def test_what_may_not_have_reached_the_device_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table = DeviceBlockTable(ROWS, COLUMNS, BLOCK, CPU)
    check(table, flatten([scheduled(1, 0, [9])]))
    send = table._upload.send

    def out_of_memory(arrays: list[Any]) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(table._upload, "send", out_of_memory)
    batch = [scheduled(1, 4, [9, 8]), scheduled(2, 3, [7])]
    with pytest.raises(torch.OutOfMemoryError):
        table.place(flatten(batch))
    monkeypatch.setattr(table._upload, "send", send)
    check(table, flatten(batch))


def test_the_same_table_again_in_a_shorter_step() -> None:
    """A step may be run again, without some of its sequences."""
    table = DeviceBlockTable(ROWS, COLUMNS, BLOCK, CPU)
    batch = [scheduled(1, 0, [9, 8], new=8), scheduled(2, 0, [5, 4], new=6)]
    rows = check(table, flatten(batch))
    assert check(table, flatten(batch[1:])) == rows[1]
    assert np.array_equal(check(table, flatten(batch)), rows)
