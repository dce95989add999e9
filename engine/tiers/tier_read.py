"""A read of a prefix that is under way, and who waits for it: the first who asked, and others that begin with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from engine.tiers.pool_copier import PoolCopier
from engine.tiers.read_choice import TierName

T = TypeVar("T")
Late = Callable[[T], None]
"""Called on a timer's thread."""


@dataclass(eq=False, slots=True)
class Waiting:
    """One that waits for a read. Either is called, once: `ended` when the read has, `left` if it takes too long."""

    ended: Callable[[], None]
    left: Callable[[], None]
    timer: threading.Timer | None = None


@dataclass(eq=False, slots=True)
class TierRead:
    """Blocks on their way into the pool, for prompts that begin with them. For the engine thread, but for `load`."""

    hits: list[int]
    """Blocks of the prefix before them, which must stay."""
    hashes: Sequence[bytes]
    tiers: Sequence[TierName]
    waiting: list[Waiting] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    parts: int = 0
    brought: set[int] = field(default_factory=set)
    given_up: bool = False
    """It has taken too long: its blocks are others' by now."""
    until_s: float = float("inf")
    """When it is given up, on the monotonic clock."""
    timer: threading.Timer | None = None
    _loading: threading.Lock = field(default_factory=threading.Lock)

    def limit(self, seconds: float, late: Late[TierRead]) -> bool:
        """Has `late` called after so long, unless `timer` is cancelled; False if there can be no more threads."""
        self.until_s = time.monotonic() + seconds
        self.timer = _timer(seconds, late, self)
        return self.timer is not None

    def join(self, waiting: Waiting, seconds: float, late: Late[Waiting]) -> bool:
        """One more waits, for so long at most: then `late` is called. False if there can be no more threads."""
        if time.monotonic() + seconds < self.until_s < float("inf"):
            waiting.timer = _timer(seconds, late, waiting)
            if waiting.timer is None:
                return False
        self.waiting.append(waiting)
        return True

    def leave(self, waiting: Waiting) -> None:
        """One does not wait any more. Ignored if the read has ended meanwhile."""
        if waiting in self.waiting:
            self.waiting.remove(waiting)
            waiting.left()

    def end(self) -> None:
        """Calls all that wait."""
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            if each.timer is not None:
                each.timer.cancel()
            each.ended()

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


def _timer(seconds: float, late: Late[T], argument: T) -> threading.Timer | None:
    """A timer that runs; None if there can be no more threads."""
    timer = threading.Timer(seconds, late, (argument,))
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:
        return None
    return timer
