"""Seeding against a registry of scripted workers: from whom, how much, when again, and what stops it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import cast

import pytest

from coordinator.background_tasks import BackgroundTasks
from coordinator.peer_fetch import seeder
from coordinator.peer_fetch.fetcher import PrefixFetcher
from coordinator.peer_fetch.hot_prefixes import HotPrefixes, Prefix
from coordinator.peer_fetch.seeder import MAX_FAILURES, Seeder
from coordinator.peer_fetch.under_way import FetchesUnderWay, UnderWay
from coordinator.workers.registry import Registry
from coordinator.workers.rotation import RotationPlan
from coordinator.workers.snapshot import Worker
from splitserve.errors import FailedPreconditionError
from splitserve.generation.kv_blocks import block_keys, extend_block_hashes, name_of
from splitserve.v1 import registry_pb2
from tests.support.cluster.registrations import BLOCK_SIZE, registration
from tests.support.journal import settled
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(10)
BLOCKS = 4
SALT = b"tenant"


def prefix(number: int, blocks: int = BLOCKS) -> list[int]:
    return [number] * (blocks * BLOCK_SIZE)


class ScriptedFetcher:
    """Notes what it is to bring."""

    def __init__(self) -> None:
        self.hot, self.under_way = HotPrefixes(), FetchesUnderWay(BackgroundTasks())
        self.brought: list[tuple[str, str, Prefix]] = []
        self.fails = False

    async def seed(
        self, holder: Worker, taker: Worker, prefix: Prefix, keys: Sequence[int], limit_s: float
    ) -> int:
        self.brought.append((holder.worker_id, taker.worker_id, prefix))
        if self.fails:
            raise FailedPreconditionError("gone", reason="PREFIX_GONE")
        assert len(keys) == len(prefix.token_ids) // BLOCK_SIZE
        return len(keys)


class Rig:
    def __init__(self, *names: str) -> None:
        self.registry, self.fetcher = Registry(60.0), ScriptedFetcher()
        self.background = BackgroundTasks()
        self.seeder = Seeder(self.registry, cast("PrefixFetcher", self.fetcher), self.background)
        for name in names:
            request = registration(name, registry_pb2.POOL_PREFILL)
            request.neutral = True
            self.registry.register(request, 0.0)
            self.registry.set_output_open((name, 1), True)

    def report(
        self,
        name: str,
        holds: Sequence[list[int]] = (),
        total_blocks: int = 64,
        alone: bool = False,
        disk_block_s: float = 0.0,
    ) -> None:
        """With lanes to all others, unless it is `alone`; faster ones from those with later names. All but the first
        block is on a disk that reads a block in `disk_block_s`, if that is above 0."""
        peers = [] if alone else self.registry.peers_of(self.worker(name))
        lanes = [
            registry_pb2.LaneReport(agent_id=peer.agent_id, gb_per_second=1.0 + ord(name[0]))
            for peer in peers
        ]
        hashes: list[bytes] = []
        for tokens in holds:
            found: list[bytes] = []
            extend_block_hashes(found, tokens, BLOCK_SIZE, SALT, len(tokens) // BLOCK_SIZE)
            hashes += found
        stored = b"".join(map(name_of, hashes))
        events = registry_pb2.CacheEvents(sequence=1, cleared=True, stored=stored)
        load = registry_pb2.WorkerLoad(total_blocks=total_blocks, free_blocks=total_blocks)
        if disk_block_s:
            events.tiered, events.stored, events.on_disk = True, stored[:8], stored[8:]
            load.host_tier.gb_per_second = 1.0
            load.disk_tier.gb_per_second = self.worker(name).block_bytes / disk_block_s / 1e9
        self.registry.report(
            registry_pb2.ReportRequest(
                worker_id=name,
                epoch=1,
                connected_agent_ids=[peer.agent_id for peer in peers],
                lanes=lanes,
                load=load,
                cache_events=events,
            ),
            1.0,
        )

    def worker(self, name: str) -> Worker:
        found = self.registry.get((name, 1))
        assert found is not None
        return found

    def heat(self, *numbers: int, blocks: int = BLOCKS) -> None:
        for number in numbers:
            tokens = prefix(number, blocks)
            for _ in range(3):
                self.fetcher.hot.found(number, Prefix("words", tokens, SALT), len(tokens), time.monotonic())

    def brought(self) -> list[tuple[str, int, int]]:
        """Holder, first token and length of each fetch."""
        return [(holder, part.token_ids[0], len(part.token_ids)) for holder, _, part in self.fetcher.brought]


async def test_a_first_lane_to_who_holds_nothing_is_not_enough() -> None:
    rig = Rig("a", "b", "new")
    rig.heat(1)
    rig.report("new")
    rig.report("b", [prefix(1)], alone=True)
    rig.report("a")
    run = asyncio.create_task(rig.seeder.run())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not rig.fetcher.brought
    rig.report("b", [prefix(1)])
    await settled(lambda: any(to == "new" for _, to, _ in rig.fetcher.brought), 8.0)
    assert [holder for holder, to, _ in rig.fetcher.brought if to == "new"] == ["b"]
    run.cancel()
    await asyncio.wait([run])


async def test_each_prefix_comes_from_who_has_most_by_the_fastest_lane() -> None:
    rig = Rig("a", "b", "new")
    rig.heat(1, 2, 3)
    rig.report("a", [prefix(1), prefix(2)])
    rig.report("b", [prefix(1, 3), prefix(2)])
    rig.report("new")
    await rig.seeder.seed(rig.worker("new"))
    size = BLOCKS * BLOCK_SIZE
    assert sorted(rig.brought()) == [("a", 1, size), ("b", 2, size)], "nobody has 3"
    assert all(part.cache_salt == SALT for _, _, part in rig.fetcher.brought)
    keys = block_keys(prefix(1), BLOCK_SIZE, SALT, 99)
    slot = rig.worker("new").prefix_slot
    hits = rig.registry.prefixes.hits_of({BLOCK_SIZE: keys}, time.monotonic())
    assert hits.blocks(slot) == BLOCKS, "until it reports them itself"


@pytest.mark.parametrize(("disk_block_s", "blocks"), [(0.1, BLOCKS), (0.9, 1)])
async def test_what_a_holder_would_read_for_too_long_is_left_there(disk_block_s: float, blocks: int) -> None:
    rig = Rig("a", "new")
    rig.heat(1)
    rig.report("a", [prefix(1)], disk_block_s=disk_block_s)
    rig.report("new")
    await rig.seeder.seed(rig.worker("new"))
    assert rig.brought() == [("a", 1, blocks * BLOCK_SIZE)]


async def test_pinned_workers_that_trade_are_seeded_once_they_take_prefixes() -> None:
    rig = Rig("a")
    for name in ("old", "new"):
        request = registration(name, registry_pb2.POOL_PREFILL)
        request.trades_prefixes = name == "new"
        rig.registry.register(request, 0.0)
    rig.heat(1)
    rig.report("a", [prefix(1)])
    for name in ("old", "new"):
        rig.report(name)
    assert not rig.seeder._is_due(rig.worker("new")), "its output stream is not open yet"
    for name in ("old", "new"):
        rig.registry.set_output_open((name, 1), True)
    assert [rig.seeder._is_due(rig.worker(name)) for name in ("old", "new")] == [False, True]
    await rig.seeder.seed(rig.worker("new"))
    assert rig.brought() == [("a", 1, BLOCKS * BLOCK_SIZE)]


async def test_at_most_half_of_its_blocks_and_nothing_that_it_has() -> None:
    rig = Rig("a", "new")
    rig.heat(1, 2, 3, 4)
    rig.report("a", [prefix(number) for number in (1, 2, 3, 4)])
    rig.report("new", [prefix(1)], total_blocks=4 * BLOCKS)
    await rig.seeder.seed(rig.worker("new"))
    assert len(rig.fetcher.brought) == 2
    assert 1 not in {first for _, first, _ in rig.brought()}


async def test_it_stops_after_failures_in_a_row_and_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("a", "new")
    rig.heat(*range(1, 9))
    rig.report("a", [prefix(number) for number in range(1, 9)])
    rig.report("new")
    rig.fetcher.fails = True
    await rig.seeder.seed(rig.worker("new"))
    assert len(rig.fetcher.brought) == MAX_FAILURES
    rig.fetcher.fails = False
    monkeypatch.setattr(seeder, "SEED_S", 0.0)
    await rig.seeder.seed(rig.worker("new"))
    assert len(rig.fetcher.brought) == MAX_FAILURES


async def test_once_a_boot_and_again_when_a_standby_comes_into_rotation() -> None:
    rig = Rig("a", "new")
    rig.report("a", [prefix(1), prefix(2)])
    watching = asyncio.create_task(rig.seeder.run())
    try:
        rig.heat(1)
        rig.registry.apply_plan(RotationPlan(standby=frozenset({"new"})))
        rig.report("new")
        await settled(lambda: len(rig.fetcher.brought) == 1)
        rig.report("new", [prefix(1)])
        rig.heat(2)
        rig.registry.apply_plan(RotationPlan(active=frozenset({"new"})))
        await settled(lambda: len(rig.fetcher.brought) == 2)
        assert [first for _, first, _ in rig.brought()] == [1, 2]
        await settled(lambda: rig.background.count == 0)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_seed_waits_for_the_fetches_of_requests() -> None:
    rig = Rig("a", "new")
    rig.heat(1)
    rig.report("a", [prefix(1)])
    rig.report("new")
    over, now = asyncio.Event(), time.monotonic()

    async def bring() -> int:
        await over.wait()
        return 1

    fetch = UnderWay(rig.worker("a"), rig.worker("new"), (), now, now, 0.0)
    waiting = asyncio.create_task(rig.fetcher.under_way.begin(fetch, bring).wait(PATIENCE_S))
    seeding = asyncio.create_task(rig.seeder.seed(rig.worker("new")))
    await asyncio.sleep(0.02)
    assert rig.brought() == []
    over.set()
    await seeding
    assert len(rig.brought()) == 1
    assert await waiting == 1
