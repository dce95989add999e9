"""How vLLM's kernels on cpu lay keys and values out in a block, which decides who may hand KV to whom."""

from __future__ import annotations

import pytest

from engine.vllm.kv_memory import CPU_BACKEND, order_of
from kv_transfer.layout import KEYS_BY_DIM

HEADS, DIM, TOKENS = 2, 64, 64

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def blocks_of(block_size: int, isa: str, dtype: str):  # type: ignore[no-untyped-def]
    """Keys and values `[tokens, heads, dim]`, and a kernel's blocks of them, `[blocks, heads, 2, elements]`."""
    import torch
    from vllm import _custom_ops

    count = TOKENS // block_size
    cache = torch.zeros(count, HEADS, 2 * block_size, DIM, dtype=getattr(torch, dtype))
    draw = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(TOKENS, HEADS, DIM, generator=draw).to(cache.dtype) for _ in range(2))
    of_keys, of_values = cache.chunk(2, dim=2)
    _custom_ops.cpu_attn_reshape_and_cache(keys, values, of_keys, of_values, torch.arange(TOKENS), isa)
    return keys, values, cache.view(count, HEADS, 2, block_size * DIM)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", ["vec", "vec16"])
@pytest.mark.parametrize("block_size", [32, 64])
def test_keys_are_transposed_in_a_block_and_values_are_in_order(
    block_size: int, isa: str, dtype: str
) -> None:
    import torch

    assert order_of(CPU_BACKEND, isa, getattr(torch, dtype)) == KEYS_BY_DIM
    keys, values, cache = blocks_of(block_size, isa, dtype)
    for block in range(TOKENS // block_size):
        tokens = slice(block * block_size, (block + 1) * block_size)
        for head in range(HEADS):
            of_keys, of_values = cache[block, head]
            assert torch.equal(of_keys.view(DIM, block_size), keys[tokens, head].T)
            assert torch.equal(of_values.view(block_size, DIM), values[tokens, head])
