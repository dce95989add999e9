"""Seeds new workers: the hottest prefixes go to their caches before or while they take traffic.

Once for each boot, as soon as a lane to it is measured, and once more when a standby comes into rotation. A worker is
seeded within bounds of time and of its own memory, one prefix after the other, from whoever holds most of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from coordinator.background_tasks import BackgroundTasks
from coordinator.peer_fetch.fetcher import PrefixFetcher
from coordinator.peer_fetch.hot_prefixes import Prefix
from coordinator.peer_fetch.policy import holders, whole_tokens
from coordinator.peer_fetch.prefix_offer import lane_seconds
from coordinator.workers.prefix_index.tier_reads import nearness
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker, WorkerKey
from splitserve.errors import DeadlineExceededError, SplitserveError
from splitserve.generation.kv_blocks import block_keys, chain_salt
from splitserve.logs import log_event

SEED_S = 10.0
"""Most time for one worker."""
MAX_PREFIXES = 256
MAX_FAILURES = 3
"""Fetches in a row that may fail before a worker is left to fill its cache by itself."""
FETCH_S = 2.0
"""Most time for one prefix."""
POOL_SHARE = 2
"""At most one block in so many of the worker's is filled."""
_ALL_LANES_S = 2.0
"""How long after its first lane a worker waits for those to the others: the first one may be to who holds nothing."""
_LOOK_S = 1.0
"""Lanes come with reports, which change no membership: how often to look while a worker has none."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a prefix is to come from, how many tokens of it, and seconds of the holder's read and of the lane."""

    holder: Worker
    tokens: int
    takes_s: float
    keys: Sequence[int]
    """Of the taker's blocks, in the prefix index."""


class Seeder:
    """Starts a background task for each worker that comes. Call `run` where peer fetch is on."""

    def __init__(self, registry: Registry, fetcher: PrefixFetcher, background: BackgroundTasks) -> None:
        self._registry, self._fetcher, self._background = registry, fetcher, background
        self._seeded: set[tuple[WorkerKey, bool]] = set()
        self._first_lane_s: dict[WorkerKey, float] = {}

    async def run(self) -> None:
        """Watches the registry until cancelled."""
        version = -1
        while True:
            workers = self._registry.snapshot().workers
            present = {worker.key for worker in workers}
            self._seeded = {seeded for seeded in self._seeded if seeded[0] in present}
            self._first_lane_s = {key: at_s for key, at_s in self._first_lane_s.items() if key in present}
            for worker in workers:
                if self._is_due(worker):
                    self._seeded.add((worker.key, worker.in_rotation))
                    self._background.start(self.seed(worker))
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    version = await self._registry.wait_change(version)

    def _is_due(self, worker: Worker) -> bool:
        if (worker.key, worker.in_rotation) in self._seeded:
            return False
        if not (worker.trades and worker.takes_prefixes and worker.usable):
            return False
        snapshot, now = self._registry.snapshot(), time.monotonic()
        near = holders(snapshot, worker, worker.model.name)
        if not any(_has_lane(holder, worker) for holder in near):
            return False
        mates = (mate for mate in snapshot.workers if mate.usable and mate.model.name == worker.model.name)
        writers = (mate for mate in mates if mate.key != worker.key and mate.writes_to(worker))
        waited_s = now - self._first_lane_s.setdefault(worker.key, now)
        return waited_s >= _ALL_LANES_S or all(_has_lane(writer, worker) for writer in writers)

    async def seed(self, worker: Worker) -> None:
        """Seeds one worker."""
        began_s, size = time.monotonic(), worker.block_size_tokens
        left = worker.load.total_blocks // POOL_SHARE
        prefixes = self._fetcher.hot.hottest((worker.model.name, *worker.adapters), MAX_PREFIXES, began_s)
        seeded = blocks = failures = 0
        for prefix in prefixes:
            await asyncio.sleep(0)  # each is hashed here, and most may need nothing
            left_s = began_s + SEED_S - time.monotonic()
            if left_s <= 0 or failures >= MAX_FAILURES:
                break
            source = self._source_of(prefix, worker)
            there = self._registry.get(worker.key)
            if there is None:
                break
            # A reservation that does not fit would hold up those of requests behind it.
            room = min(left, there.load.free_blocks // POOL_SHARE)
            if source is None or source.tokens // size > room:
                continue
            part = replace(prefix, token_ids=prefix.token_ids[: source.tokens])
            try:
                await self._yielding(source.holder, worker, began_s + SEED_S)
                left_s = began_s + SEED_S - time.monotonic()
                moved = await self._fetcher.seed(
                    source.holder, worker, part, source.keys, min(left_s, FETCH_S)
                )
            except SplitserveError as error:
                failures += 1
                log_event("worker.seed_failed", worker_id=worker.worker_id, reason=error.reason)
                continue
            # Until it reports them itself.
            self._registry.prefixes.expect([worker.key], source.keys, time.monotonic())
            failures, seeded, blocks, left = 0, seeded + 1, blocks + moved, left - moved
        if prefixes:
            took_s = round(time.monotonic() - began_s, 3)
            log_event(
                "worker.seeded", worker_id=worker.worker_id, prefixes=seeded, blocks=blocks, took_s=took_s
            )

    async def _yielding(self, holder: Worker, taker: Worker, deadline_s: float) -> None:
        """Waits until no request's fetch needs either worker."""
        while not self._fetcher.under_way.may_seed(holder.key, taker.key):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceededError("requests' fetches left no time", reason="NO_TIME_TO_SEED")
            await self._fetcher.under_way.changed(left_s)

    def _source_of(self, prefix: Prefix, taker: Worker) -> _Source | None:
        """Who sends most of a prefix within `FETCH_S`, and soonest; None if the taker has as much."""
        salt = chain_salt(prefix.cache_salt, prefix.adapter)
        near = list(holders(self._registry.snapshot(), taker, prefix.model))
        own_size = taker.block_size_tokens
        keys = {
            size: block_keys(prefix.token_ids, size, salt, len(prefix.token_ids) // size)
            for size in {own_size, *(holder.block_size_tokens for holder in near)}
        }
        prefixes, now = self._registry.prefixes, time.monotonic()
        hits = prefixes.hits_of(keys, now, confirmed_only=True)
        best: _Source | None = None
        for holder in near:
            for each in nearness(holder, hits):
                tokens = whole_tokens(each.blocks * holder.block_size_tokens, holder, taker)
                lane_s = lane_seconds(holder, taker, tokens)
                if not tokens or lane_s is None or each.read_s + lane_s > FETCH_S:
                    continue
                if best is None or (tokens, -each.read_s - lane_s) > (best.tokens, -best.takes_s):
                    best = _Source(holder, tokens, each.read_s + lane_s, keys[own_size][: tokens // own_size])
        owned = prefixes.hits_of(keys, now).blocks(taker.prefix_slot) * own_size
        return best if best is not None and best.tokens > owned else None


def _has_lane(holder: Worker, taker: Worker) -> bool:
    return lane_seconds(holder, taker, 0) is not None
