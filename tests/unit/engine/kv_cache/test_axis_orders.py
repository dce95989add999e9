"""Blocks are put into another order: each element once, and where that order has it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache.axis_orders import BlockConverter, keys_and_values
from engine.kv_cache.memory import DTYPES
from kv_transfer.layout import AXIS_ORDER, CONVERTED_ORDERS, KEYS_BY_DIM, KvLayout
from splitserve.errors import InvalidArgumentError

LAYERS, HEADS, TOKENS, DIM, BLOCKS = 3, 2, 4, 6, 9
LAYOUT = KvLayout("f" * 64, "float32", TOKENS, LAYERS, HEADS, DIM)


def numbered(layout: KvLayout) -> list[torch.Tensor]:
    """Layers `[blocks, elements]` of one pool of whole blocks, in which no two elements are equal."""
    dtype = DTYPES[layout.dtype]
    size = layout.block_vectors * layout.head_dim
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    # Numbers that differ in their bits, whatever they mean as floating-point ones.
    pool = torch.arange(1, BLOCKS * size + 1, dtype=bits).view(dtype).view(BLOCKS, layout.num_layers, -1)
    return [pool[:, layer] for layer in range(layout.num_layers)]


def place(order: str, kind: int, head: int, token: int, dim: int) -> int:
    """Where an element stands in a piece: `kind` 0 for keys, 1 for values."""
    if order == AXIS_ORDER:
        return ((kind * HEADS + head) * TOKENS + token) * DIM + dim
    inner = dim * TOKENS + token if kind == 0 else token * DIM + dim
    return (head * 2 + kind) * TOKENS * DIM + inner


@pytest.mark.parametrize("order", sorted(CONVERTED_ORDERS))
def test_each_element_stands_where_its_order_says(order: str) -> None:
    pieces = torch.arange(2 * HEADS * TOKENS * DIM).repeat(2, 1)
    for kind, view in enumerate(keys_and_values(pieces, order, LAYOUT)):
        assert view.shape == (2, HEADS, TOKENS, DIM)
        assert view.data_ptr() < pieces.data_ptr() + pieces.nbytes, "a view"
        for head in range(HEADS):
            for token in range(TOKENS):
                for dim in range(DIM):
                    assert view[1, head, token, dim] == place(order, kind, head, token, dim)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(blocks=st.lists(st.integers(0, BLOCKS - 1), min_size=1, unique=True), data=st.data())
def test_conversion_moves_each_element_once_and_back(
    dtype: str, blocks: list[int], data: st.DataObject
) -> None:
    here, there = data.draw(st.permutations(sorted(CONVERTED_ORDERS)))
    layout = replace(LAYOUT, dtype=dtype, axis_order=here)
    layers = numbered(layout)
    before = [layer.clone() for layer in layers]
    BlockConverter(layout, layers).convert(blocks, there)
    for layer, was in zip(layers, before, strict=True):
        for block in range(BLOCKS):
            if block not in blocks:
                assert torch.equal(bits(layer[block]), bits(was[block])), "nobody's business"
        own = keys_and_values(layer[blocks], here, layout)
        sent = keys_and_values(was[blocks], there, layout)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(own, sent, strict=True))
        assert sorted(bits(layer).flatten().tolist()) == sorted(bits(was).flatten().tolist())
    BlockConverter(replace(layout, axis_order=there), layers).convert(blocks, here)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(layers, before, strict=True))


def bits(values: torch.Tensor) -> torch.Tensor:
    """As integers: some of the numbers are no numbers."""
    return values.contiguous().view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)


def test_a_few_blocks_are_converted_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [0, 1, 2, 3, 8, 5]
    whole, pieced = numbered(LAYOUT), numbered(LAYOUT)
    BlockConverter(LAYOUT, whole).convert(blocks, KEYS_BY_DIM)
    monkeypatch.setattr("engine.kv_cache.axis_orders.PIECE_BYTES", 2 * LAYOUT.block_bytes // LAYERS)
    BlockConverter(LAYOUT, pieced).convert(blocks, KEYS_BY_DIM)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieced, strict=True))


def test_bytes_are_read_layer_by_layer_as_they_lie() -> None:
    for dtype in ("float32", "bfloat16"):
        layers = numbered(replace(LAYOUT, dtype=dtype))
        read = BlockConverter(replace(LAYOUT, dtype=dtype), layers).read_blocks([7, 2])
        for block, data in zip((7, 2), read, strict=True):
            whole = torch.cat([bits(layer[block]) for layer in layers])
            assert data.tobytes() == whole.numpy().tobytes()


def test_it_knows_all_orders_but_its_own() -> None:
    layers = numbered(LAYOUT)
    assert BlockConverter(LAYOUT, layers).orders == {KEYS_BY_DIM}
    assert BlockConverter(replace(LAYOUT, axis_order=KEYS_BY_DIM), layers).orders == {AXIS_ORDER}
    with pytest.raises(InvalidArgumentError, match="not converted"):
        keys_and_values(layers[0], "dim,token", LAYOUT)
