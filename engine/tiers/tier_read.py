"""A read of a prefix that is under way, and who waits for it: the first who asked, and others that begin with it.

Reads for peers are bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine.tiers.pool_copier import PoolCopier
from engine.tiers.read_choice import TierName
from splitserve.alarms import Alarm, Alarms
from splitserve.errors import ResourceExhaustedError

MOST_PEER_READS = 4
"""Reads that peers have asked for, at a time."""

Late = Callable[[], None]
"""Called on the alarms' thread."""


@dataclass(eq=False, slots=True)
class Waiting:
    """One that waits for a read. Either is called, once: `ended` when the read has, `left` if it takes too long."""

    ended: Callable[[], None]
    left: Callable[[], None]
    owner: object = None
    """The sequence whose prompt waits; None where a peer does."""
    for_peer: bool = False
    """A peer waits, that fetches a prefix."""
    alarm: Alarm | None = None


@dataclass(eq=False, slots=True)
class TierRead:
    """Blocks on their way into the pool, for prompts that begin with them. For the engine thread, but for `load`."""

    hits: list[int]
    """Blocks of the prefix before them, which must stay."""
    hashes: Sequence[bytes]
    tiers: Sequence[TierName]
    waiting: list[Waiting] = field(default_factory=list)
    for_peer: bool = False
    """Begun for a peer; prompts may have joined it."""
    blocks: list[int] = field(default_factory=list)
    owned: int = 0
    """Blocks of the pool that are in use only for it: its own, and those before them that nobody else had."""
    parts: int = 0
    brought: set[int] = field(default_factory=set)
    given_up: bool = False
    """It has taken too long: its blocks are others' by now."""
    until_s: float = float("inf")
    """When it is given up, on the alarms' clock."""
    alarm: Alarm | None = None
    _loading: threading.Lock = field(default_factory=threading.Lock)

    def limit(self, seconds: float, alarms: Alarms, late: Late) -> bool:
        """Has `late` called after so long, unless `alarm` is cancelled; False if there can be no more threads."""
        self.until_s = alarms.now() + seconds
        self.alarm = alarms.set(seconds, late)
        return self.alarm is not None

    def join(self, waiting: Waiting, seconds: float, alarms: Alarms, late: Late) -> bool:
        """One more waits, for so long at most: then `late` is called. False if there can be no more threads."""
        if alarms.now() + seconds < self.until_s < float("inf"):
            waiting.alarm = alarms.set(seconds, late)
            if waiting.alarm is None:
                return False
        self.waiting.append(waiting)
        return True

    def leave(self, waiting: Waiting) -> None:
        """One does not wait any more. Ignored if the read has ended meanwhile."""
        if waiting in self.waiting:
            self.waiting.remove(waiting)
            waiting.left()

    def end(self) -> None:
        """Calls all that wait: those of one that is given up do not wait any more."""
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            if each.alarm is not None:
                each.alarm.cancel()
            (each.left if self.given_up else each.ended)()

    def shared(self, hashes: Sequence[bytes]) -> int:
        """How many of these blocks, which begin with its first one, it brings."""
        same = (own == other for own, other in zip(self.hashes, hashes, strict=False))
        return next(
            (place for place, is_same in enumerate(same) if not is_same), min(len(self.hashes), len(hashes))
        )

    def load(self, copier: PoolCopier, block: int, content: memoryview) -> bool:
        """Copies a block into the pool, on a tier's thread; False, and nothing copied, once it is given up."""
        with self._loading:
            if not self.given_up:
                copier.load(block, content)
            return not self.given_up

    def give_up(self) -> None:
        """Nothing is copied into the pool from now on. Waits for a block that is being copied, not for a disk."""
        with self._loading:
            self.given_up = True


def require_peer_room(under_way: Iterable[TierRead], blocks: int, most_owned: int) -> None:
    """One read for a peer may take all `most_owned` blocks that reads may, several half of them together.

    Raises ResourceExhaustedError (PREFIX_READS_FULL) where one more, of so many `blocks`, is too much.
    """
    owned = [read.owned for read in under_way if read.for_peer]
    if len(owned) >= MOST_PEER_READS or (owned and 2 * (sum(owned) + blocks) > most_owned):
        message = f"{len(owned)} reads for peers, of {sum(owned)} KV blocks, go on already"
        raise ResourceExhaustedError(message, reason="PREFIX_READS_FULL", retry_after_s=1.0)
