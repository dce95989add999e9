"""Memory of KV blocks on cpu: populated while it is in use."""

from __future__ import annotations

import ctypes

import torch

from engine.kv_cache.memory import BlockMemory
from kv_transfer.layout import KvLayout

LAYOUT = KvLayout("ab" * 32, "bfloat16", block_size_tokens=16, num_layers=2, num_kv_heads=2, head_dim=64)


def test_populating_goes_in_pieces_and_keeps_what_is_there() -> None:
    memory = BlockMemory(LAYOUT, 500, torch.device("cpu"))
    memory.bytes[7] = 3
    pieces = 0
    while memory.populate():
        pieces += 1
        memory.bytes[300] = 5
    assert pieces == -(-memory.total_bytes // (2 << 20))
    assert not memory.populate()
    used = {block: int(memory.bytes[block].max()) for block in (0, 7, 300, 499)}
    assert used == {0: 0, 7: 3, 300: 5, 499: 0}


def test_memory_that_is_given_up_and_taken_back_is_empty_and_where_it_was() -> None:
    memory = BlockMemory(LAYOUT, 500, torch.device("cpu"))
    region = memory.memory()
    memory.bytes[:] = 3
    assert memory.populate()
    memory.give_up()
    assert not memory.populate(), "it has none"
    memory.take_back()
    assert memory.populate()
    assert memory.memory() == region
    assert int(memory.bytes.max()) == 0
    probes = ctypes.string_at(
        region.base_address + 500 * LAYOUT.block_bytes, region.probe_blocks * LAYOUT.block_bytes
    )
    assert set(probes) == {1}, "blocks for probes are written to, as at the start"
    memory.bytes[499] = 7
    assert int(memory.bytes[499].min()) == 7
    memory.give_up()


def test_memory_says_what_it_takes_probes_included() -> None:
    memory = BlockMemory(LAYOUT, 500, torch.device("cpu"))
    assert memory.total_bytes == memory.memory().num_blocks * LAYOUT.block_bytes
