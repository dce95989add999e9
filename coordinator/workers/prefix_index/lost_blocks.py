"""Blocks that a shared store lacks though a worker that shares it has them, as those have said who looked for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

MOST_LOST = 4096
"""Of one store. With more the ones that were lost first count as shared again; who wants to read them says so again."""


class LostBlocks:
    """Keys of blocks by the `shared_id` of their store. Only a hint, as the index is."""

    def __init__(self) -> None:
        self._lost: dict[int, dict[int, None]] = {}

    def __len__(self) -> int:
        """Of all stores."""
        return sum(map(len, self._lost.values()))

    def add(self, shared_id: int, keys: Iterable[int]) -> None:
        """These are not in the store. Costs O(keys + MOST_LOST)."""
        lost = self._lost.get(shared_id, {})
        for key in deque(keys, MOST_LOST):
            lost.pop(key, None)  # one that is lost again is a last one
            lost[key] = None
        if len(lost) > MOST_LOST:
            lost = dict.fromkeys(islice(lost, len(lost) - MOST_LOST, None))
        if lost:
            self._lost[shared_id] = lost

    def discard(self, shared_id: int, key: int) -> None:
        """It is in the store, or is being written."""
        lost = self._lost.get(shared_id)
        if lost is not None and key in lost:
            del lost[key]
            if not lost:
                del self._lost[shared_id]

    def keep(self, shared_ids: Collection[int]) -> None:
        """Forgets the stores that nobody shares any more."""
        self._lost = {store: lost for store, lost in self._lost.items() if store in shared_ids}

    def among(self, shared_id: int, keys: Sequence[int]) -> list[int]:
        """Which of these are lost."""
        lost = self._lost.get(shared_id)
        return [key for key in keys if key in lost] if lost else []

    def before(self, shared_id: int, keys: Sequence[int], depth: int) -> int:
        """How many of a prompt's first `depth` blocks come before the first one that is lost."""
        lost = self._lost.get(shared_id)
        if not lost or lost.keys().isdisjoint(keys[:depth]):
            return depth
        return next((at for at in range(depth) if keys[at] in lost), depth)
