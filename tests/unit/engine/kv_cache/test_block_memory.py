"""Memory of KV blocks on cpu."""

from __future__ import annotations

import ctypes

import torch

from engine.kv_cache.memory import KvCacheMemory
from kv_transfer.layout import KvLayout

LAYOUT = KvLayout("ab" * 32, "bfloat16", block_size_tokens=16, num_layers=2, num_kv_heads=2, head_dim=64)


def test_memory_is_empty_but_for_the_blocks_of_probes() -> None:
    memory = KvCacheMemory(LAYOUT, 500, torch.device("cpu"))
    region = memory.memory()
    assert int(memory.bytes.max()) == 0
    probes = ctypes.string_at(
        region.base_address + 500 * LAYOUT.block_bytes, region.probe_blocks * LAYOUT.block_bytes
    )
    assert set(probes) == {1}
