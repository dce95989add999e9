"""Checksums of KV blocks: a handoff whose bytes differ from what was sent is refused.

The ticket (`KvTicket.verify_one_in`) sets how many blocks are verified. Both sides derive the same block
positions from the ticket's numbers and hash the blocks in their own memory; the completion carries the
writer's checksums. XXH3-64 (xxhash.com) detects corruption, not a malicious writer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import xxhash

from kv_transfer.handoff.messages import MAX_CHECKSUMS, WriteCompletion
from kv_transfer.transports.regions import KvMemoryRegion

BlockReader = Callable[[Sequence[int]], Sequence[memoryview]]
"""Returns the bytes of the blocks with these indices, in host memory."""


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The memory that writes read from and peers write to. Used from the engine thread only."""

    region: KvMemoryRegion
    """What is registered with the transport."""
    read_blocks: BlockReader

    def digests(self, blocks: Sequence[int]) -> list[int]:
        """The XXH3-64 of each block."""
        return digests_of(self.read_blocks(blocks))


ONE_IN = {"off": 0, "sampled": 16, "all": 1}
"""`WorkerConfig.verify_kv` as `KvTicket.verify_one_in`, but for `auto`."""


def verify_one_in(verify_kv: str, memory_kind: str) -> int:
    """`WorkerConfig.verify_kv` as `KvTicket.verify_one_in`, for KV blocks in "DRAM" or "VRAM"."""
    if verify_kv == "auto":
        return ONE_IN["sampled" if memory_kind == "DRAM" else "off"]
    return ONE_IN[verify_kv]


def verified_positions(epoch: int, reservation: int, count: int, one_in: int) -> range:
    """Positions of the blocks to verify among a ticket's `count`: every `one_in`-th, from a seeded offset.

    The offset follows from `epoch` and `reservation`. At least one position unless `count` or `one_in` is 0.
    """
    if not (one_in and count):
        return range(0)
    seed = xxhash.xxh3_64_intdigest(struct.pack("<QQ", epoch, reservation))
    return range(seed % min(one_in, count), count, one_in)


def digests_of(blocks: Iterable[bytes | memoryview]) -> list[int]:
    """The XXH3-64 of each block."""
    return [xxhash.xxh3_64_intdigest(block) for block in blocks]


def fold_digests(digests: Sequence[int]) -> tuple[int, ...]:
    """Folds `digests` into at most `MAX_CHECKSUMS` values by hashing equal-sized runs of them, in order."""
    width = -(-len(digests) // MAX_CHECKSUMS)
    if width <= 1:
        return tuple(digests)
    runs = (digests[begin : begin + width] for begin in range(0, len(digests), width))
    return tuple(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(run)}Q", *run)) for run in runs)


class HandoffVerifier:
    """On the decode worker: remembers which blocks of each ticket to verify, and checks them on completion."""

    def __init__(self, epoch: int, one_in: int, kv_memory: KvMemory) -> None:
        self.one_in = one_in
        self._epoch = epoch
        self._kv_memory = kv_memory
        self._expected: dict[int, list[int]] = {}
        """The blocks to verify, by reservation."""

    def expect(self, reservation: int, block_ids: Sequence[int]) -> None:
        """Selects the blocks to verify for a new ticket."""
        positions = verified_positions(self._epoch, reservation, len(block_ids), self.one_in)
        if positions:
            self._expected[reservation] = [block_ids[position] for position in positions]

    def forget(self, reservation: int) -> None:
        """Drops a reservation that has ended. Unknown numbers are ignored."""
        self._expected.pop(reservation, None)

    def matches(self, completion: WriteCompletion) -> bool:
        """Whether the completion's checksums equal those of the received blocks. Call once per reservation."""
        digests = self._kv_memory.digests(self._expected.pop(completion.reservation, []))
        return fold_digests(digests) == completion.checksums
