"""KV block arithmetic: blocks per sequence, the watermark, and content hashes of full blocks.

Block hashes are chained SHA-256 over CBOR, as in vLLM: equal hashes mean equal prefixes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import cbor2

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NAME_BYTES = 8
"""Size of a block's name in cache events: a prefix of its hash; see `CacheEvents` in the protos."""
NAMES_A_MESSAGE = 2**12
"""Maximum number of names that a worker sends in one message, over all its lists of cache events. 32 KiB are far below
the proto's bound and any message limit, and are applied within a few milliseconds."""
_KEY_BITS = 60
"""Bits of a block's index key. CPython allocates 32 bytes for an int of up to 60 bits, 48 for one of 64."""
_KEY_MASK = 2**_KEY_BITS - 1


Count = TypeVar("Count", int, "npt.NDArray[np.int64]")


def blocks_for(tokens: Count, block_size: int) -> Count:
    """Number of blocks for `tokens` tokens of a sequence, rounded up; elementwise for an array."""
    return -(-tokens // block_size)


def watermark_blocks(growing: int, total_blocks: int) -> int:
    """Blocks that a new sequence must leave free for the `growing` sequences: one each, at least 1% of all blocks.

    0 if no sequence grows.
    """
    return max(growing, total_blocks // 100) if growing else 0


def block_hash(parent: bytes | None, token_ids: Sequence[int], extra_keys: Sequence[bytes] = ()) -> bytes:
    """SHA-256 (32 bytes) of CBOR `[parent, token_ids, extra_keys]`.

    `parent` is the hash of the previous block, None for the first. Through the chain a hash identifies the whole
    prefix up to and including this block.
    """
    return hashlib.sha256(cbor2.dumps([parent, list(token_ids), list(extra_keys)])).digest()


def extend_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, cache_salt: bytes, num_blocks: int
) -> None:
    """Appends hashes for the full blocks of `token_ids` up to `num_blocks`.

    The salt enters the first block's hash and through the chain all later ones.
    """
    for index in range(len(hashes), num_blocks):
        parent = hashes[-1] if hashes else None
        salt = (cache_salt,) if index == 0 and cache_salt else ()
        hashes.append(block_hash(parent, token_ids[index * block_size : (index + 1) * block_size], salt))


class Adapter(NamedTuple):
    """A LoRA adapter: small weights beside a base model's. Only requests of the same adapter can use KV computed with
    it."""

    name: str
    fingerprint: str
    """SHA-256 of its files, 64 hex digits."""


def chain_salt(cache_salt: bytes, adapter: Adapter | None) -> bytes:
    """The salt of a prompt's block hashes: the tenant's salt, or 32 bytes derived from that salt and the adapter.

    So no block of an adapter is taken for one of the base model, of another adapter or of other content.
    """
    if adapter is None:
        return cache_salt
    return hashlib.sha256(cbor2.dumps([cache_salt, adapter.name, adapter.fingerprint])).digest()


def name_of(block_hash: bytes) -> bytes:
    """A block's name on the wire: the first 8 bytes of its hash."""
    return block_hash[:NAME_BYTES]


def keys_of(names: bytes) -> list[int]:
    """Index keys of concatenated names. Raises ValueError if the length is not a multiple of 8."""
    numbers = array("Q")
    numbers.frombytes(names)
    return [number & _KEY_MASK for number in numbers]


def block_keys(
    token_ids: Sequence[int], block_size: int, cache_salt: bytes, max_blocks: int
) -> tuple[int, ...]:
    """Index keys of a prompt's first full blocks, at most `max_blocks`. Takes about 3 us per block."""
    hashes: list[bytes] = []
    extend_block_hashes(
        hashes, token_ids, block_size, cache_salt, min(len(token_ids) // block_size, max_blocks)
    )
    return tuple(keys_of(b"".join(map(name_of, hashes))))
