"""The tiers below a pool: blocks are copied down as they enter the prefix cache, and read back for prompts.

Books are kept on the engine thread, bytes are moved by two threads: one between pool and host memory, one that alone
touches the disk. A block that is being copied has an owner in the pool, so nobody writes to it. Each job ends with a
function that `collect` runs on the engine thread. A store that workers share is asked by `look_ups.py`.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.cache_events import KvEventLog
from engine.pacing.step_time_fit import PromptFit
from engine.tiers.copies_down import CopiesDown, most_owned
from engine.tiers.look_ups import LookUps
from engine.tiers.pool_copier import PoolCopier
from engine.tiers.read_choice import (
    PrefixBelow,
    TierName,
    choose_read,
    choose_read_back,
    read_seconds,
    spared_by_more,
    waits_for_read,
    waits_in_place_of_transfer,
)
from engine.tiers.stores.block_store import BlockStore, HostStore
from engine.tiers.stores.shared_store import SharedStore
from engine.tiers.tier import ReadItem, ReadOutcome, Tier, TierPlaces
from engine.tiers.tier_index import Eviction
from engine.tiers.tier_read import TierRead, Waiting, require_peer_room
from splitserve.alarms import Alarms
from splitserve.logs import log_event

_LEAST_PATIENCE_S = 0.5
"""A read of a disk is waited for until computing would have been done, but at least this long."""
_UNKNOWN_PATIENCE_S = 5.0
"""At least while computing has not been measured, or is not what a read spares; at most, in place of a transfer."""
_CLOSE_S = 5.0
FLUSH_S = 10.0
"""How long an orderly end waits for blocks on their way down; less than what a call between two steps may take."""


class KvTiers:
    """Host memory below a pool, and below that a disk. Used on the engine thread, but for `wake`.

    Neither is needed for an answer: what cannot be written is not kept, and what cannot be read is computed.
    """

    def __init__(
        self,
        copier: PoolCopier,
        host: HostStore,
        disk: BlockStore | None,
        block_tokens: int,
        eviction: Eviction = "history",
        alarms: Alarms | None = None,
    ) -> None:
        self._alarms = alarms or Alarms("kv-alarms")
        self.host = Tier("host", host, eviction)
        self.disk = Tier("disk", disk, eviction) if disk is not None else None
        self.all: dict[TierName, Tier] = {"host": self.host}
        if self.disk is not None:
            self.disk.index.restore(self.disk.store.found())
            self.all["disk"] = self.disk
        self.places = TierPlaces(self.all)
        self._rates = {name: tier.rate for name, tier in self.all.items()}
        self.wake: Callable[[], object] = lambda: None
        """Called on any thread when `collect` has something to do."""
        self._copier, self._block_tokens, self._block_bytes = copier, block_tokens, host.block_bytes
        self._completed: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._reading = self._late_reads = 0
        self.copies = CopiesDown(copier, host, self.all, self.places, self._soon, self._cost)
        self._begun: dict[bytes, TierRead] = {}
        """By the hash of their first block, those that others may wait for, too."""
        self.under_way: dict[TierRead, None] = {}
        self.look_ups: LookUps | None = None
        """Where the disk is a store that workers share."""
        if self.disk is not None and isinstance(disk, SharedStore):
            self.look_ups = LookUps(self.disk, disk, self.places, self._alarms, self._soon, self._cost)
        self._closed = False

    def attach(
        self,
        pool: BlockPool,
        log: KvEventLog,
        freed: Callable[[], None],
        prompt_fit: Callable[[], PromptFit | None],
    ) -> None:
        """Joins the pool. `log`: a block counts as cached for as long as any tier has it. `freed` is called when blocks
        of the pool may have become free."""
        self._pool, self._freed, self._prompt_fit = pool, freed, prompt_fit
        self._most_owned = most_owned(pool)
        self.copies.attach(pool)
        self.places.attach(pool, log)

    @property
    def copying_blocks(self) -> int:
        """Blocks of the pool that are being copied to host memory."""
        return self.copies.blocks

    @property
    def busy(self) -> bool:
        """Whether blocks are on their way, up or down."""
        return bool(
            self.copies.blocks
            or self._reading
            or not self._completed.empty()
            or any(len(tier.thread) for tier in self.all.values())
            or (self.look_ups is not None and self.look_ups.busy)
        )

    @property
    def shared_id(self) -> int:
        """Of the store that workers share, 0 while this one's blocks do not count as there. For any thread."""
        return 0 if self.look_ups is None or self._late_reads else self.look_ups.shared_id

    def bring(
        self,
        hits: list[int],
        hashes: Sequence[bytes],
        tokens: int,
        then: Callable[[], None],
        again: Callable[[], None] | None = None,
        *,
        owner: object = None,
        whole: bool = False,
    ) -> bool:
        """Reads the blocks of a prompt that follow its `hits` in the pool, as far as that is sooner than computing.

        `hashes`: of the blocks after the hits, each in a tier. `tokens`: of the whole prompt. `then` is called when
        they are in the prefix cache, or when it takes too long. What is being read already is waited for: `again` is
        called when that is there; None: the prompt has waited for these before. False if nothing is to be read: then
        neither is called. `owner`: the prompt's sequence. `whole`: a peer needs all of them, and nothing is computed;
        raises ResourceExhaustedError (PREFIX_READS_FULL) where peers have too much read already.
        """
        names, fit = self._readable(hits, hashes), None if whole else self._prompt_fit()
        prefix, waits_s = PrefixBelow(tokens, self._block_tokens, len(hits), names), self._waits_s()
        patience_s = max(_UNKNOWN_PATIENCE_S, 2 * read_seconds(names, self._rates, waits_s))
        if fit is not None:
            patience_s = fit.chunk_s(tokens, 0)
        begun = self._begun_of(hashes) if again is not None else None
        if again is not None and begun is not None:
            shared, left_s = begun.shared(hashes), max(waits_s[name] for name in begun.tiers)
            if waits_for_read(prefix, self._rates, waits_s, fit, shared, left_s):
                return self._join(begun, Waiting(again, then, owner), patience_s)
        if whole:
            require_peer_room(self.under_way, len(hashes), self._most_owned)
        count = choose_read(prefix, self._rates, waits_s, fit)
        if whole and count < len(hashes):
            return False
        return self._begin(hits, hashes, names, count, patience_s, Waiting(then, then, owner, whole))

    def read_back(
        self, hits: list[int], hashes: Sequence[bytes], bytes_per_s: float, then: Callable[[], None]
    ) -> bool:
        """The same as far as that is sooner than a peer's transfer at this speed, above 0. Whether anything is read, or
        waited for; if not, `then` is never called."""
        transfer_s, waiting = self._block_bytes / bytes_per_s, Waiting(then, then)
        names, waits_s = self._readable(hits, hashes), self._waits_s()
        if (begun := self._begun_of(hashes)) is not None:
            shared, left_s = begun.shared(hashes), max(waits_s[name] for name in begun.tiers)
            if waits_in_place_of_transfer(names, self._rates, waits_s, transfer_s, shared, left_s):
                return self._join(begun, waiting, min(shared * transfer_s, _UNKNOWN_PATIENCE_S))
        count = choose_read_back(names, self._rates, waits_s, transfer_s)
        return self._begin(hits, hashes, names, count, min(count * transfer_s, _UNKNOWN_PATIENCE_S), waiting)

    def look_up_spares_s(
        self, hits: list[int], hashes: Sequence[bytes], unknown: int, bytes_per_s: float
    ) -> float:
        """Seconds that such a reservation is spared at most if the store that workers share has so many more blocks
        after these; 0 where it is not asked whatever it may have."""
        transfer_s = self._block_bytes / bytes_per_s
        if self._late_reads or self.look_ups is None or not self.look_ups.takes(unknown * transfer_s):
            return 0.0
        known = self._readable(hits, hashes)
        more = min(unknown, self._room(hits) - len(known))
        return spared_by_more(known, more, self._rates, self._waits_s(), transfer_s) if more > 0 else 0.0

    def give_up(self, read: TierRead) -> None:
        """Ends a read: those that wait are computed. Until its tier answers, nobody else waits for a disk."""
        read.give_up()
        self._late_reads += 1
        self._finish(read)

    def collect(self) -> None:
        """Takes what the threads have done. Raises what ended one of them: the device, or a bug."""
        while not self._completed.empty():
            self._completed.get_nowait()()
        self._freed()

    def flush(self, limit_s: float = FLUSH_S) -> None:
        """Waits until all blocks on their way down are there, `limit_s` seconds at most: others are logged, and lost
        if `close` follows. Raises as `collect`."""
        ends_s = time.monotonic() + limit_s
        while self.copies.under_way and (left_s := ends_s - time.monotonic()) > 0:
            with suppress(queue.Empty):
                self._completed.get(timeout=left_s)()
        if self.copies.under_way:
            log_event(
                "kv_tier.not_written", level=logging.WARNING, blocks=self.copies.under_way, waited_s=limit_s
            )
        self._freed()

    def close(self) -> None:
        """Ends the threads, and closes what they use. What is on its way is lost: see `flush`."""
        self._closed = True
        self._alarms.close()
        unasked = self.look_ups is None or self.look_ups.close(_CLOSE_S)
        for tier in self.all.values():
            if tier.thread.close(_CLOSE_S) and (unasked or tier is self.host):
                tier.store.close()
            else:  # a disk that does not answer; the process ends with it
                log_event("kv_tier.hung", tier=tier.name)

    def _room(self, hits: list[int]) -> int:
        """Blocks of the pool that a read after these may fill."""
        unowned = self._pool.unowned(hits)
        return max(0, min((self._pool.free - unowned) * 3 // 4, self._most_owned - self._reading - unowned))

    def _readable(self, hits: list[int], hashes: Sequence[bytes]) -> list[TierName]:
        """Where the first of these blocks are: as many as there is room for, and none behind a disk that hangs."""
        readable = hashes[: self._room(hits)]
        names: list[TierName] = ["host" if each in self.host.index else "disk" for each in readable]
        return names[: names.index("disk")] if self._late_reads and "disk" in names else names

    def _begun_of(self, hashes: Sequence[bytes]) -> TierRead | None:
        """The read under way that begins with the first of these blocks, unless it is one of a disk that hangs."""
        begun = self._begun.get(hashes[0])
        return None if begun is None or (self._late_reads and "disk" in begun.tiers) else begun

    def _waits_s(self) -> dict[TierName, float]:
        return {name: tier.reading_blocks * tier.rate.block_s for name, tier in self.all.items()}

    def _begin(
        self,
        hits: list[int],
        hashes: Sequence[bytes],
        names: Sequence[TierName],
        count: int,
        patience_s: float,
        waiting: Waiting,
    ) -> bool:
        """Begins to read the first `count` of the blocks whose tiers are `names`; False if there are none, or if the
        wait for a disk could have no end."""
        for name in set(names[count:]):
            self.all[name].rate.passed_over()
        read = TierRead(hits, hashes[:count], names[:count], [waiting], for_peer=waiting.for_peer)
        late, patience_s = partial(self._soon, partial(self._late, read)), max(patience_s, _LEAST_PATIENCE_S)
        if not count or ("disk" in read.tiers and not read.limit(patience_s, self._alarms, late)):
            return False
        read.owned = count + self._pool.unowned(hits)
        self._pool.share(hits)
        read.blocks = self._pool.allocate(count, after=hits[-1] if hits else None)
        self._reading += read.owned
        self.under_way[read] = None
        self._begun.setdefault(hashes[0], read)
        for tier in self.all.values():
            self._start_part(tier, read)
        return True

    def _join(self, read: TierRead, waiting: Waiting, patience_s: float) -> bool:
        late = partial(self._soon, partial(read.leave, waiting))
        return read.join(waiting, max(patience_s, _LEAST_PATIENCE_S), self._alarms, late)

    def _cost(self, depth: int) -> float:
        """Of computing a block at this depth, relative to the first."""
        fit = self._prompt_fit()
        return 1.0 if fit is None else 1.0 + depth * self._block_tokens * fit.pair_s / fit.token_s

    def _start_part(self, tier: Tier, read: TierRead) -> None:
        """Begins to read what a tier has of a read."""
        items = tier.items_of(read)
        if not items:
            return
        read.parts += 1
        tier.reading_blocks += len(items)
        work = partial(tier.read, read, items, self._copier, lambda: self._closed)
        tier.start(work, partial(self._part_read, tier, read, items), self._soon, urgent=True)

    def _part_read(self, tier: Tier, read: TierRead, items: list[ReadItem], outcome: ReadOutcome) -> None:
        if tier is self.disk and read.alarm is not None:
            read.alarm.cancel()
        if (damaged := tier.was_read(read, items, outcome)) is not None:
            shared = tier is self.disk and self.look_ups is not None
            self.places.left(damaged.block_hash, lost=shared and outcome.missing)
        read.parts -= 1
        if not read.parts:
            if read.given_up:
                self._late_reads -= 1
            else:
                self._finish(read)

    def _finish(self, read: TierRead) -> None:
        """Gives what has been read to the prefix cache, up to the first block that is missing."""
        for place, (block, block_hash) in enumerate(zip(read.blocks, read.hashes, strict=True)):
            if place not in read.brought:
                break
            self._pool.cache(block, block_hash)
            self.all[read.tiers[place]].stats.hit_tokens += self._block_tokens
        self._pool.release([*read.hits, *read.blocks])
        self._reading -= read.owned
        del self.under_way[read]
        if self._begun.get(read.hashes[0]) is read:
            del self._begun[read.hashes[0]]
        read.end()

    def _soon(self, call: Callable[[], None]) -> None:
        """Has `collect` call it. On any thread."""
        self._completed.put(call)
        self.wake()

    def _late(self, read: TierRead) -> None:
        if read in self.under_way:
            log_event("kv_tier.read_late", blocks=len(read.blocks))
            self.give_up(read)
