"""Names for full KV blocks: chained SHA-256 over CBOR, so that equal names mean equal prefixes."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import cbor2

NAME_BYTES = 8
"""Size of the name under which a worker tells coordinators of a block; see `CacheEvents` in the protos."""
_KEY_BITS = 60
"""Of a name as a number. CPython keeps so many in an int of 32 bytes, while 64 take 48."""
_KEY_MASK = 2**_KEY_BITS - 1


def block_hash(parent: bytes | None, token_ids: Sequence[int], extra_keys: Sequence[bytes] = ()) -> bytes:
    """SHA-256 (32 bytes) of CBOR `[parent, token_ids, extra_keys]`.

    `parent` is the hash of the block before, None for the first. The chain makes a hash stand for the
    whole prefix up to and including this block.
    """
    return hashlib.sha256(cbor2.dumps([parent, list(token_ids), list(extra_keys)])).digest()


def extend_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, cache_salt: bytes, num_blocks: int
) -> None:
    """Appends hashes until the first `num_blocks` full blocks of `token_ids` have one.

    The salt enters the first block only; through the chain it separates every later block as well.
    """
    for index in range(len(hashes), num_blocks):
        parent = hashes[-1] if hashes else None
        salt = (cache_salt,) if index == 0 and cache_salt else ()
        hashes.append(block_hash(parent, token_ids[index * block_size : (index + 1) * block_size], salt))


def name_of(block_hash: bytes) -> bytes:
    """The name of a block on the wire: the first 8 bytes of its hash."""
    return block_hash[:NAME_BYTES]


def keys_of(names: bytes) -> list[int]:
    """Names, one after the other, as the numbers that an index is keyed by.

    Raises ValueError when the length is no multiple of 8.
    """
    numbers = array("Q")
    numbers.frombytes(names)
    return [number & _KEY_MASK for number in numbers]


def block_keys(
    token_ids: Sequence[int], block_size: int, cache_salt: bytes, max_blocks: int
) -> tuple[int, ...]:
    """`keys_of` the names of a prompt's first full blocks, at most `max_blocks` of them. About 3 us a block."""
    hashes: list[bytes] = []
    extend_block_hashes(
        hashes, token_ids, block_size, cache_salt, min(len(token_ids) // block_size, max_blocks)
    )
    return tuple(keys_of(b"".join(map(name_of, hashes))))
