"""Asks a store that workers share which blocks of a prompt it has: beside the steps, and for a bounded time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from engine.tiers.copy_thread import CopyThread
from engine.tiers.read_choice import ReadRate
from engine.tiers.stores.shared_store import SharedStore
from engine.tiers.tier import Tier, TierPlaces, raise_again
from engine.tiers.tier_index import TierBlock
from splitserve.alarms import Alarm, Alarms
from splitserve.logs import log_event

PATIENCE_S = 0.05
"""A prompt waits so long for an answer; what comes later is of use to the next one."""
MOST_WAITING = 64
"""Prompts that wait for answers. What more come are not asked for."""
MOST_LOST = 1 / 4
"""Of the blocks of late: a worker of which more are not written does not count as one of those who share the store."""
LATE_S = 1.0
"""Nor does one to which an answer is late by more."""
_ASSUMED_S = 0.001
"""That an answer takes, until the first."""
_FIRST, _GROWTH, _MOST = 8, 4, 512
"""Blocks in the first question about a prompt, the growth from one to the next, and blocks in the last ones."""

Extend = Callable[[list[bytes], int], None]
"""Appends hashes of a prompt's blocks until there are so many; on any thread."""


@dataclass(eq=False, slots=True)
class _LookUp:
    hashes: list[bytes]
    """Of the prompt's first blocks."""
    known: int
    """Blocks that were in the books before."""
    then: Callable[[], None]
    asked_s: float
    alarm: Alarm | None = None
    state: Literal["waiting", "left", "late", "answered"] = "waiting"
    """Left: the prompt does not wait any more, and the answer is not late."""


class LookUps:
    """What comes of one enters the books of the shared tier, from where it is read as what was written here.

    For the engine thread. While an answer is late nobody else asks, so a store that hangs costs one prompt's patience.
    """

    def __init__(
        self,
        tier: Tier,
        store: SharedStore,
        places: TierPlaces,
        alarms: Alarms,
        soon: Callable[[Callable[[], None]], None],
        cost: Callable[[int], float],
    ) -> None:
        """`soon` has a function called on the engine thread; for any thread. `cost`: of computing a block, by the
        blocks before it."""
        self._tier, self._store, self._places = tier, store, places
        self._alarms, self._soon, self._cost = alarms, soon, cost
        self._thread = CopyThread("kv-look-up")
        self._answers = ReadRate(_ASSUMED_S)
        self._waiting = self._late = 0
        self._late_since_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether an answer is on its way."""
        return bool(self._waiting or self._late or len(self._thread))

    @property
    def shared_id(self) -> int:
        """The store's, for coordinators; 0 while others may not find there what this worker has, or it does not answer.
        For any thread."""
        is_late = self._late and self._alarms.now() - self._late_since_s > LATE_S
        return 0 if is_late or self._tier.lost_share > MOST_LOST else self._store.shared_id

    def takes(self, spared_s: float) -> bool:
        """Whether it would ask for a prompt that may spare so many seconds. No is how answers that took long are
        forgotten."""
        if self._late or self._waiting >= MOST_WAITING:
            return False
        if spared_s <= self._answers.block_s:
            self._answers.passed_over()
            return False
        return True

    def ask(
        self,
        hashes: Sequence[bytes],
        extend: Extend,
        blocks: int,
        then: Callable[[], None],
        spared_s: float = float("inf"),
    ) -> bool:
        """Asks for the first of a prompt's `blocks` that the books do not know, and those after it.

        `hashes`: of its first blocks, at least one more than are known to be readable. `then` is called once the answer
        is in the books, or takes too long. `spared_s`: the seconds that it may spare; it is waited for no longer. False
        if nobody is asked, as where answers have taken longer of late: then it is not called.
        """
        if not self.takes(spared_s):
            return False
        hashes, known = list(hashes[:blocks]), 0
        while (known := self._known(hashes, known)) == len(hashes):
            if known == blocks:
                return False
            extend(hashes, min(blocks, known + _FIRST))
        look_up = _LookUp(hashes, known, then, self._alarms.now())
        if spared_s < PATIENCE_S:
            self._wait(look_up, spared_s, partial(self._leaves, look_up))
        else:
            self._wait(look_up, PATIENCE_S, partial(self._is_late, look_up))
        if look_up.alarm is None:
            return False
        self._waiting += 1
        self._thread.put(partial(self._look, look_up, extend, blocks))
        return True

    def close(self, patience_s: float) -> bool:
        """Ends the thread; False if it has not ended in time."""
        return self._thread.close(patience_s)

    def _known(self, hashes: Sequence[bytes], known: int) -> int:
        """How many of these blocks, from the first on, the books know; at least `known`."""
        index = self._tier.index
        return next((at for at in range(known, len(hashes)) if not index.knows(hashes[at])), len(hashes))

    def _look(self, look_up: _LookUp, extend: Extend, blocks: int) -> None:
        """On the thread. A prompt of which nothing is there costs one small question."""
        hashes, count, found = look_up.hashes, _FIRST, look_up.known
        blocks = min(blocks, self._store.slots)
        try:
            while found < blocks:
                end = min(blocks, found + count)
                extend(hashes, end)
                found += self._store.held(hashes[found:end])
                if found < end:
                    break
                count = min(count * _GROWTH, _MOST)
        except OSError as error:
            blocks = found  # of the others nothing is known
            log_event("kv_tier.look_up_failed", error=str(error))
        except BaseException as error:
            self._soon(partial(raise_again, error))
            return
        self._soon(partial(self._answered, look_up, found, lost=found < blocks))

    def _answered(self, look_up: _LookUp, found: int, *, lost: bool) -> None:
        """`lost`: the store does not have the next block; another worker may be believed to have written it."""
        self._answers.measured(1, min(self._alarms.now() - look_up.asked_s, PATIENCE_S))
        self._tier.stats.found_blocks += self._learn(look_up, found)
        if lost and not self._tier.index.knows(look_up.hashes[found]):
            self._places.left(look_up.hashes[found], lost=True)
        if look_up.state == "late":
            self._late -= 1
            return
        waits, look_up.state = look_up.state == "waiting", "answered"
        self._waiting -= 1
        if look_up.alarm is not None:
            look_up.alarm.cancel()
        if waits:
            look_up.then()

    def _learn(self, look_up: _LookUp, found: int) -> int:
        """Enters what was found into the books; how many blocks are new to them."""
        hashes, index, learned = look_up.hashes, self._tier.index, 0
        for depth in range(look_up.known, found):
            block = TierBlock(hashes[depth], hashes[depth - 1] if depth else None, depth)
            if index.knows(block.block_hash):
                continue
            placement = index.add(block, self._cost(depth))
            if placement is None:
                break
            self._places.left(placement.evicted)
            self._places.arrived(self._tier, block)
            learned += 1
        return learned

    def _wait(self, look_up: _LookUp, seconds: float, over: Callable[[], None]) -> None:
        look_up.alarm = self._alarms.set(seconds, partial(self._soon, over))

    def _leaves(self, look_up: _LookUp) -> None:
        """The prompt has waited for as long as it may spare; the store has the rest of its time."""
        if look_up.state == "waiting":  # else the answer has come meanwhile
            look_up.state = "left"
            left_s = max(0.0, look_up.asked_s + PATIENCE_S - self._alarms.now())
            self._wait(look_up, left_s, partial(self._is_late, look_up))
            if look_up.alarm is None:
                self._is_late(look_up)
            look_up.then()

    def _is_late(self, look_up: _LookUp) -> None:
        if look_up.state in ("waiting", "left"):
            waits, look_up.state = look_up.state == "waiting", "late"
            if not self._late:
                self._late_since_s = self._alarms.now()
            self._waiting -= 1
            self._late += 1
            if waits:
                look_up.then()
