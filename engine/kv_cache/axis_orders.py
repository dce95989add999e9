"""Blocks of another engine's `axis_order`, put into this one's: the same keys and values, in other places.

A piece of a block is what one layer has of it. Of each order `keys_and_values` gives two views, so that conversion is a
copy from the views of one order to those of the other.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from engine.kv_cache.memory import PIECE_BYTES, block_pieces, finish_writes
from kv_transfer.layout import AXIS_ORDER, CONVERTED_ORDERS, KEYS_BY_DIM, KvLayout
from kv_transfer.wire_format import OrderConverter
from splitserve.errors import InvalidArgumentError


def keys_and_values(
    pieces: torch.Tensor, axis_order: str, layout: KvLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views `[blocks, kv_heads, block_size, head_dim]` of the pieces `[blocks, elements]` of one layer, which lie in
    `axis_order`. Raises InvalidArgumentError for an order that is not in `CONVERTED_ORDERS`."""
    heads, tokens, dim = layout.num_kv_heads, layout.block_size_tokens, layout.head_dim
    if axis_order == AXIS_ORDER:
        keys, values = pieces.unflatten(1, (2, heads, tokens, dim)).unbind(1)
        return keys, values
    if axis_order == KEYS_BY_DIM:
        keys, values = pieces.unflatten(1, (heads, 2, tokens * dim)).unbind(2)
        return keys.unflatten(2, (dim, tokens)).transpose(2, 3), values.unflatten(2, (tokens, dim))
    raise InvalidArgumentError(f"axis_order {axis_order!r} is not converted", field="axis_order")


class BlockConverter(OrderConverter):
    """Converts the blocks of a pool.

    `layers`: a view `[num_blocks, elements of a piece]` of each layer, in which each piece is contiguous. `layout` is
    the pool's, in one of the `CONVERTED_ORDERS`.
    """

    def __init__(self, layout: KvLayout, layers: Sequence[torch.Tensor]) -> None:
        self._layout = layout
        self._layers = layers
        self._device = layers[0].device
        self._at_once = max(1, PIECE_BYTES * layout.num_layers // layout.block_bytes)

    @property
    def orders(self) -> Set[str]:
        """See `OrderConverter`."""
        return CONVERTED_ORDERS - {self._layout.axis_order}

    def convert(self, block_ids: Sequence[int], peer_order: str) -> None:
        """See `OrderConverter`. Takes memory for `PIECE_BYTES` twice."""
        with torch.inference_mode():
            for index in block_pieces(block_ids, self._at_once, self._device):
                for layer in self._layers:
                    arrived = layer[index]
                    converted = torch.empty_like(arrived, memory_format=torch.contiguous_format)
                    own = keys_and_values(converted, self._layout.axis_order, self._layout)
                    theirs = keys_and_values(arrived, peer_order, self._layout)
                    for to, source in zip(own, theirs, strict=True):
                        to.copy_(source)
                    layer[index] = converted
        finish_writes(self._device)

    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        """See `OrderConverter`: uint8 `[block_bytes]` each, copies."""
        blocks = [torch.stack([layer[block] for layer in self._layers]) for block in block_ids]
        return [memoryview(block.cpu().view(torch.uint8).flatten().numpy()) for block in blocks]
