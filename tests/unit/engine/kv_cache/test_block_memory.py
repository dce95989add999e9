"""Memory of KV blocks on cpu: populated while it is in use."""

from __future__ import annotations

import threading

import torch

from engine.kv_cache.memory import BlockMemory
from kv_transfer.layout import KvLayout

LAYOUT = KvLayout("ab" * 32, "bfloat16", block_size_tokens=16, num_layers=2, num_kv_heads=2, head_dim=64)


def test_populating_keeps_what_is_there() -> None:
    memory = BlockMemory(LAYOUT, 500, torch.device("cpu"))
    memory.bytes[7] = 3
    memory.populate()
    memory.bytes[300] = 5
    for thread in threading.enumerate():
        if thread.name == "populate-kv":
            thread.join(30)
            assert not thread.is_alive()
    used = {block: int(memory.bytes[block].max()) for block in (0, 7, 300, 499)}
    assert used == {0: 0, 7: 3, 300: 5, 499: 0}
