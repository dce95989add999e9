"""Transfers bfloat16 KV as fp8 e4m3: half the bytes, with a relative error per element of about 1/16 at most.

Each key and value vector (`head_dim` elements) has its own bfloat16 scale: its largest magnitude over 448, the largest
number of e4m3 (as in "FP8 Formats for Deep Learning", arXiv:2209.05433).

* A scale per vector and not per KV block: beyond its own tokens, a prompt's last block has KV of an earlier request.
  With a shared scale that would affect the rounding of the prompt's KV, and one NaN would spread.
* The largest element, which matters most, becomes 448 and is transferred almost exactly. Elements down to 2^-14 of it
  keep all four significant bits; the error of smaller ones is at most 2^-18 of it.
* A vector with an element that is not finite arrives as NaN throughout, never as plausible numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.kv_cache.memory import PIECE_BYTES, BlockMemory, KvCacheMemory, block_pieces, finish_writes
from kv_transfer.layout import FP8_E4M3, SCALE_BYTES
from kv_transfer.transports.transport import KvMemoryRegion
from kv_transfer.wire_format import KvWire

_MAGNITUDE = 0x7FFF
_LARGEST = 448.0
_SCALE_RANGE = (2.0**-126, 145 * 2.0**112)
"""From the smallest normal number to the largest bfloat16 whose product with 448 is still finite in bfloat16."""
_REBIAS = 2.0**120
"""e4m3 has the exponent bias 7, bfloat16 127."""
_SIGN_AND_MAGNITUDE = 0x87F0 - 0x10000
"""Mask of sign and magnitude of an e4m3 byte, sign-extended to 16 bits and shifted left by 4."""


def quantize(vectors: torch.Tensor) -> torch.Tensor:
    """bfloat16 `[blocks, vectors, head_dim]` to wire blocks, uint8 `[blocks, vectors * (2 + head_dim)]`.

    A wire block is the vectors' scales, bfloat16, followed by the elements' e4m3 codes.
    """
    largest = (vectors.view(torch.int16) & _MAGNITUDE).amax(-1).view(torch.bfloat16).float()
    scales = (largest / _LARGEST).clamp_(*_SCALE_RANGE).masked_fill_(~largest.isfinite(), math.nan)
    scales = scales.to(torch.bfloat16)
    factors = scales.float().reciprocal_().to(torch.bfloat16).unsqueeze(-1)
    codes = (vectors * factors).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat((scales.view(torch.uint8), codes.flatten(1)), 1)


def dequantize(blocks: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The inverse of `quantize`: uint8 `[blocks, block_bytes]` to bfloat16 `[blocks, vectors, head_dim]`.

    Accepts any bytes. Converts by hand, because torch's conversion from e4m3 is seven times slower on cpu.
    """
    vectors = blocks.shape[1] // (SCALE_BYTES + head_dim)
    scales, coded = blocks.split((SCALE_BYTES * vectors, vectors * head_dim), 1)
    codes = coded.view(torch.int8).unflatten(1, (vectors, head_dim)).to(torch.int16)
    codes <<= 4
    codes &= _SIGN_AND_MAGNITUDE
    values = codes.view(torch.bfloat16)
    values *= _REBIAS
    values *= scales.view(torch.bfloat16).unsqueeze(-1)
    return values


class Fp8Wire(KvWire):
    """One wire block for each block of a bfloat16 pool: about half of its memory in addition."""

    def __init__(self, pool: KvCacheMemory) -> None:
        layout = replace(pool.layout, wire_dtype=FP8_E4M3)
        self._head_dim = layout.head_dim
        self._blocks = BlockMemory(layout, pool.num_blocks, pool.device)
        self._vectors = pool.tensor.view(pool.num_blocks, layout.block_vectors, layout.head_dim)
        self._at_once = max(1, PIECE_BYTES // pool.layout.block_bytes)

    @property
    def memory(self) -> KvMemoryRegion:
        """The wire blocks."""
        return self._blocks.memory()

    def pack(self, block_ids: Sequence[int]) -> None:
        """See `KvWire`."""
        with torch.inference_mode():
            for index in block_pieces(block_ids, self._at_once, self._blocks.device):
                self._blocks.bytes[index] = quantize(self._vectors[index])
        finish_writes(self._blocks.device)

    def unpack(self, block_ids: Sequence[int], peer_order: str = "") -> None:
        """See `KvWire`."""
        with torch.inference_mode():
            for index in block_pieces(block_ids, self._at_once, self._blocks.device):
                self._vectors[index] = dequantize(self._blocks.bytes[index], self._head_dim)
        finish_writes(self._blocks.device)

    def populate(self) -> bool:
        """See `KvWire`."""
        return self._blocks.populate()

    @property
    def own_bytes(self) -> int:
        """See `KvWire`."""
        return self._blocks.total_bytes

    def give_up(self) -> None:
        """See `KvWire`."""
        self._blocks.give_up()

    def take_back(self) -> None:
        """See `KvWire`."""
        self._blocks.take_back()

    def read_blocks(self, block_ids: Sequence[int], peer_order: str = "") -> Sequence[memoryview]:
        """See `KvWire`."""
        return self._blocks.read_blocks(block_ids)
