"""A store of blocks that workers share: the interface. What it holds is asked, since nobody's books know it."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence

from engine.tiers.stores.block_store import BlockStore


class SharedStore(BlockStore):
    """Blocks by their hashes, for all workers whose blocks have one identity.

    What the store holds and evicts is the store's matter: a worker's books say only what it has found there. So a slot
    names a place in the books, and `slots` bounds these. A block that is there already is not written again.
    """

    shared_id: int
    """The same for all who share it, 64 bits, not 0; for coordinators."""

    @abstractmethod
    def held(self, hashes: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, are there now. Raises OSError if it cannot be asked.

        For another thread than the one that reads and writes, at the same time.
        """


def shared_id_of(*parts: bytes) -> int:
    """A store's `shared_id`, from what makes it the same store."""
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
    return int.from_bytes(digest[:8], "little") | 1
