"""Names for full KV blocks: chained SHA-256 over CBOR, so that equal names mean equal prefixes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import cbor2


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
