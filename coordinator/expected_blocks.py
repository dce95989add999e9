"""Blocks that prompts on their way will fill, so that equal prompts that come at once go to one worker."""

from __future__ import annotations

from collections.abc import Sequence

LIFETIME_S = 10.0
"""An expectation counts for once to twice as long; by then the worker has told of the block, or never will."""
MAX_KEYS = 2**16
"""Of one generation; when there are more, the older one goes early."""


class ExpectedBlocks:
    """Sets of slots by key, in two generations: dropping the older one forgets in O(1) what was not confirmed."""

    def __init__(self) -> None:
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._since_s = 0.0

    def add(self, keys: Sequence[int], bits: int, now: float) -> None:
        """The workers of these bits will hold these blocks of one prompt, in its order."""
        self.expire(now)
        if len(self._young) > MAX_KEYS:
            self._old, self._young, self._since_s = self._young, {}, now
        young = self._young
        if not keys or young.get(keys[-1], 0) & bits == bits:
            return
        known = next((at for at, key in enumerate(keys) if key not in young), len(keys))
        for key in keys[:known]:
            young[key] |= bits
        fresh = dict.fromkeys(keys[known:], bits)
        if not young.keys().isdisjoint(fresh):
            fresh = {key: bits | young.get(key, 0) for key in fresh}
        young.update(fresh)

    def expire(self, now: float) -> None:
        """Forgets what has had its time."""
        age_s = now - self._since_s
        if age_s >= LIFETIME_S:
            self._old = self._young if age_s < 2 * LIFETIME_S else {}
            self._young, self._since_s = {}, now

    def generations(self) -> tuple[dict[int, int], dict[int, int]]:
        """Sets of slots by key; both count. Not to be changed."""
        return self._young, self._old

    def clear(self) -> None:
        """Expects nothing any more."""
        self._young, self._old = {}, {}
