"""Checksums of KV blocks: what was sent is what arrived, or the handoff is refused.

The decode worker decides: its ticket asks for one block in so many. Both sides choose the same blocks from
the ticket's own numbers, each reads them from its own memory, and the completion carries the writer's
checksums. XXH3-64 (xxhash.com) finds accidents, not forgery: a writer that lies can lie about this too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence

import xxhash

from kv_transfer.notification import MAX_CHECKSUMS, Completion

BlockReader = Callable[[Sequence[int]], Sequence[memoryview]]
"""The bytes of the pool's blocks with these indices, in host memory."""
ONE_IN = {"off": 0, "sampled": 16, "all": 1}
"""`WorkerConfig.verify_kv` as `KvTicket.verify_one_in`."""


def verified_positions(epoch: int, reservation: int, count: int, one_in: int) -> range:
    """Which of a ticket's `count` blocks are verified: every `one_in`-th, from a place that differs by ticket.

    At least one where there are any blocks and `one_in` is not 0.
    """
    if not (one_in and count):
        return range(0)
    seed = xxhash.xxh3_64_intdigest(struct.pack("<QQ", epoch, reservation))
    return range(seed % min(one_in, count), count, one_in)


def digests_of(blocks: Iterable[memoryview]) -> list[int]:
    """The XXH3-64 of each block."""
    return [xxhash.xxh3_64_intdigest(block) for block in blocks]


def fold_digests(digests: Sequence[int]) -> tuple[int, ...]:
    """At most `MAX_CHECKSUMS` checksums: one for each run of neighbours in `digests`, in order."""
    width = -(-len(digests) // MAX_CHECKSUMS)
    if width <= 1:
        return tuple(digests)
    runs = (digests[begin : begin + width] for begin in range(0, len(digests), width))
    return tuple(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(run)}Q", *run)) for run in runs)


class HandoffVerifier:
    """The decode worker's side: remembers what was reserved, and compares when it is said to be complete."""

    def __init__(self, epoch: int, one_in: int, read_blocks: BlockReader) -> None:
        self.one_in = one_in
        self._epoch = epoch
        self._read_blocks = read_blocks
        self._expected: dict[int, list[int]] = {}

    def expect(self, reservation: int, block_ids: Sequence[int]) -> None:
        """A ticket for these blocks goes out."""
        positions = verified_positions(self._epoch, reservation, len(block_ids), self.one_in)
        if positions:
            self._expected[reservation] = [block_ids[position] for position in positions]

    def forget(self, reservation: int) -> None:
        """A reservation is over. Unknown ones are ignored."""
        self._expected.pop(reservation, None)

    def matches(self, completion: Completion) -> bool:
        """Whether a completion's checksums are those of the blocks here; to be asked once a reservation."""
        blocks = self._expected.pop(completion.reservation, [])
        return fold_digests(digests_of(self._read_blocks(blocks))) == completion.checksums
