"""When a prefix is fetched, from whom, and what is predicted for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.background_tasks import BackgroundTasks
from coordinator.peer_fetch.fetch_times import FetchTimes
from coordinator.peer_fetch.fetcher import PrefixFetcher
from coordinator.peer_fetch.policy import (
    MARGIN,
    FetchPlan,
    Wanted,
    compute_seconds,
    offer_of,
    plan_fetch,
)
from coordinator.peer_fetch.prefix_fetch import FetchParts
from coordinator.peer_fetch.prefix_offer import PrefixOffer
from coordinator.peer_fetch.under_way import FetchesUnderWay
from coordinator.records.decisions import decisions_of
from coordinator.records.request_record import AttemptFacts, RequestRecord
from coordinator.request.candidates import FetchedPrefix
from coordinator.request.state import AttemptReport
from coordinator.workers.catalog import Model
from coordinator.workers.prefix_index.hits import PrefixHits
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Isolation, PoolSnapshot, Worker
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import ResourceExhaustedError
from splitserve.v1 import registry_pb2

MODEL = Model("m", "m", 100_000, 100)
BLOCK, BLOCK_BYTES = 16, 10**6
PROMPT = 641
"""Forty blocks and a token."""


def worker(number: int, **fields: Any) -> Worker:
    lanes = tuple(
        registry_pb2.LaneReport(agent_id=f"agent-{peer}", gb_per_second=1.0, latency_ms=1.0)
        for peer in range(4)
        if peer != number
    )
    made = Worker(
        worker_id=f"w{number}",
        epoch=1,
        pool="prefill",
        address="h:1",
        model=MODEL,
        agent_id=f"agent-{number}",
        transport="memory",
        block_size_tokens=BLOCK,
        block_bytes=BLOCK_BYTES,
        max_running_requests=64,
        load=registry_pb2.WorkerLoad(free_blocks=64, prefill_tokens_per_second=1000.0),
        reported=True,
        output_open=True,
        neutral=True,
        prefix_slot=number,
        connected_agents=frozenset(lane.agent_id for lane in lanes),
        lanes=lanes,
    )
    return replace(made, **fields)


def plan(
    *workers: Worker, hits: dict[int, int], confirmed: dict[int, int] | None = None, prompt: int = PROMPT
) -> FetchPlan | None:
    """For the first worker."""
    known = PrefixHits.of(hits)
    sure = known if confirmed is None else PrefixHits.of(confirmed)
    wanted = Wanted(workers[0], prompt, {}, known, sure, "m")
    return plan_fetch(PoolSnapshot(workers), wanted, FetchTimes(), FetchesUnderWay(BackgroundTasks()), 0.0)


def test_a_prefix_is_fetched_where_that_is_sooner() -> None:
    found = plan(worker(0), worker(1), hits={0: 8, 1: 40})
    assert found is not None
    assert (found.holder.worker_id, found.taker.worker_id) == ("w1", "w0")
    assert (found.tokens, found.held_tokens) == (640, 128)
    assert found.compute_s == pytest.approx(0.512)
    assert found.lane_s == pytest.approx(0.001 + 32 * BLOCK_BYTES / 1e9)
    assert found.lane_s < found.fetch_s <= MARGIN * found.compute_s


def test_the_last_token_is_always_computed() -> None:
    found = plan(worker(0), worker(1), hits={1: 40}, prompt=640)
    assert found is not None
    assert found.tokens == 640 - BLOCK


@pytest.mark.parametrize(
    "changed",
    [
        {"lanes": ()},
        {"lanes": (registry_pb2.LaneReport(agent_id="agent-0", gb_per_second=0.05),)},
        {"lanes": (registry_pb2.LaneReport(agent_id="agent-0", gb_per_second=9, refused=True),)},
        {"connected_agents": frozenset()},
        {"draining": True},
        {"reported": False},
        {"isolation": Isolation(worker=True)},
        {"neutral": False, "pool": "decode"},
        {"model": Model("other", "m", 1, 1)},
    ],
)
def test_no_fetch_from_a_worker_that_cannot_or_is_too_slow(changed: dict[str, Any]) -> None:
    assert plan(worker(0), worker(1, **changed), hits={1: 40}) is None


def test_no_fetch_by_a_worker_that_gives_no_tickets_or_where_nothing_is_measured() -> None:
    assert plan(worker(0, neutral=False), worker(1), hits={1: 40}) is None
    new = registry_pb2.WorkerLoad(free_blocks=64)
    assert plan(worker(0, load=new), worker(1, load=new), hits={1: 40}) is None
    assert plan(worker(0, load=new), worker(1), hits={1: 40}), "as fast as the holder"


def test_pinned_workers_that_trade_fetch_in_all_directions() -> None:
    ways = [("prefill", "decode"), ("prefill", "prefill"), ("decode", "prefill"), ("decode", "decode")]
    for taker, holder in ways:
        pinned: dict[str, Any] = {"neutral": False, "trades_prefixes": True}
        workers = worker(0, pool=taker, **pinned), worker(1, pool=holder, **pinned)
        assert plan(*workers, hits={1: 40}), f"{holder} to {taker}"
        without = replace(workers[0], output_open=False)
        assert (plan(without, workers[1], hits={1: 40}) is None) == (taker == "prefill")


def test_no_fetch_of_what_the_taker_has_or_computes_or_the_holder_only_expects() -> None:
    assert plan(worker(0), worker(1), hits={0: 40, 1: 40}) is None
    assert plan(worker(0), worker(1), hits={1: 40}, confirmed={}) is None
    assert plan(worker(0), worker(1), hits={0: 40, 1: 40}, confirmed={1: 40}) is None


def test_of_several_holders_the_one_that_spares_most() -> None:
    busy = registry_pb2.WorkerLoad(
        free_blocks=64,
        prefill_tokens_per_second=1000,
        waiting_tokens=100,
        running_requests=1,
        decode_step_ms=20,
    )
    found = plan(worker(0), worker(1, load=busy), worker(2), worker(3), hits={1: 40, 2: 40, 3: 10})
    assert found is not None
    assert found.holder.worker_id == "w2"
    busy_only = plan(worker(0), worker(1, load=busy), hits={1: 40})
    assert busy_only is not None
    assert busy_only.wait_s == pytest.approx(0.06)


def test_whole_blocks_of_both_sizes() -> None:
    found = plan(worker(0, block_size_tokens=64, block_bytes=4 * BLOCK_BYTES), worker(1), hits={1: 39})
    assert found is not None
    assert found.tokens == 576


def test_computing_is_predicted_by_the_worker_s_own_fit() -> None:
    fit = registry_pb2.PromptFit(base_ms=10, token_ms=1, pair_ms=0.001)
    one = worker(0, load=registry_pb2.WorkerLoad(free_blocks=64, prompt_fit=fit), max_step_tokens=100)
    assert compute_seconds(one, 200, 0) == pytest.approx(0.02 + 0.2 + 0.02)
    assert compute_seconds(one, 50, 1000) == pytest.approx(0.05 + 51.25e-3)


def test_the_record_says_what_was_fetched_and_why() -> None:
    fetched = FetchedPrefix("w1", "w0", 320, 0.012, 0.64, 0.0111)
    attempt = AttemptFacts(
        1, "w0", "w2", False, (), AttemptReport(""), 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0, "", "", fetched=fetched
    )
    record = RequestRecord("r", "t", "m", "completed", 0.0, 5.0, served_model="m", attempts=[attempt])
    (said,) = [one for one in decisions_of(record, "prefix") if one.stage == "prefix_fetch"]
    assert (said.chosen, said.attempt) == ("w1", 1)
    text = "w0 lacked 320 tokens that it holds: predicted 12.0 ms, 640.0 ms to compute them; took 11.1 ms"
    assert said.reason == text
    attempt = replace(attempt, fetched=replace(fetched, failure="PREFIX_GONE: a block"))
    (said,) = [
        one
        for one in decisions_of(replace(record, attempts=[attempt]), "prefix")
        if one.stage == "prefix_fetch"
    ]
    assert said.reason == f"{text}, and failed: PREFIX_GONE: a block"


def test_no_fetch_to_a_worker_that_could_not_take_it_now() -> None:
    def taker(**fields: Any) -> Worker:
        return worker(0, load=registry_pb2.WorkerLoad(prefill_tokens_per_second=1000.0, **fields))

    assert plan(taker(free_blocks=40), worker(1), hits={1: 40}) is not None
    assert plan(taker(free_blocks=39), worker(1), hits={1: 40}) is None
    assert plan(taker(free_blocks=64, running_requests=64), worker(1), hits={1: 40}) is None
    assert plan(taker(free_blocks=64, waiting_reservations=1), worker(1), hits={1: 40}) is None


@pytest.mark.parametrize(
    ("reason", "rests"),
    [("PREFIX_READS_FULL", False), ("NO_ROOM_FOR_PREFIX", False), ("PREFIX_GONE", True)],
)
def test_a_pair_does_not_rest_where_a_worker_had_too_much_to_do(reason: str, rests: bool) -> None:
    unused: Any = None
    fetcher = PrefixFetcher(CoordinatorConfig(), Registry(5.0), unused, BackgroundTasks())
    wanted = plan(worker(0), worker(1), hits={1: 40})
    assert wanted is not None
    fetcher._count(wanted, 0, FetchParts(0.001), ResourceExhaustedError("not now", reason=reason))
    assert bool(fetcher._resting) is rests
    assert fetcher.counts.outcomes["failed"] == 1


def test_a_pair_that_rests_is_left_alone() -> None:
    near, far = worker(1), worker(2)
    hits = PrefixHits.of({1: 40, 2: 39})
    wanted = Wanted(worker(0), PROMPT, {}, hits, hits, "m")
    found = plan_fetch(
        PoolSnapshot((worker(0), near, far)),
        wanted,
        FetchTimes(),
        FetchesUnderWay(BackgroundTasks()),
        0.0,
        resting={(near.key, worker(0).key): 1.0},
    )
    assert found is not None
    assert found.holder.worker_id == "w2"


READS = {"host_tier": 10.0, "disk_tier": 1.0}
"""GB/s: a block takes 0.1 ms and 1 ms."""


def tiered(number: int, *, waiting_bytes: int = 0, free_blocks: int = 128, **speeds: float) -> Worker:
    """A worker with tiers; its three slots are 10, 11 and 12 times its number."""
    tiers = {
        name: registry_pb2.TierReads(gb_per_second=speed, waiting_bytes=waiting_bytes)
        for name, speed in (READS | speeds).items()
    }
    load = registry_pb2.WorkerLoad(
        free_blocks=free_blocks, total_blocks=128, prefill_tokens_per_second=1000.0, **tiers
    )
    return worker(number, load=load, prefix_slot=10 * number, near_slots=(11 * number, 12 * number))


def test_what_a_holder_reads_before_counts() -> None:
    near = plan(worker(0), tiered(1), hits={10: 40, 11: 40, 12: 40})
    host = plan(worker(0), tiered(1), hits={10: 40, 11: 40, 12: 10})
    both = plan(worker(0), tiered(1), hits={10: 40, 11: 30, 12: 10})
    assert near is not None
    assert host is not None
    assert both is not None
    assert {each.tokens for each in (near, host, both)} == {640}
    assert host.fetch_s - near.fetch_s == pytest.approx(30 * 1e-4)
    assert both.fetch_s - near.fetch_s == pytest.approx(10 * 1e-3), "both are read at once"
    assert both.wait_s == pytest.approx(10 * 1e-3)


def test_reads_before_it_count() -> None:
    found = plan(worker(0), tiered(1, waiting_bytes=10**9), hits={10: 40, 11: 40, 12: 10})
    assert found is not None
    assert found.wait_s == pytest.approx(0.1 + 30 * 1e-4)


def test_only_what_is_near_is_fetched_where_a_read_takes_too_long() -> None:
    """A block on the disk takes 20 ms, and 16 ms to compute."""
    slow = tiered(1, disk_tier=0.05)
    found = plan(worker(0), slow, hits={10: 40, 11: 20, 12: 8})
    assert found is not None
    assert found.tokens == 20 * BLOCK
    assert plan(worker(0), slow, hits={10: 40}) is None
    other = plan(worker(0), slow, worker(2), hits={10: 40, 2: 30})
    assert other is not None
    assert other.holder.worker_id == "w2"


def test_a_holder_without_room_sends_what_is_among_its_blocks() -> None:
    """It reads into three quarters of its free blocks at most."""
    found = plan(worker(0), tiered(1, free_blocks=40), hits={10: 40, 11: 40, 12: 10})
    assert found is not None
    assert found.tokens == 640
    found = plan(worker(0), tiered(1, free_blocks=39), hits={10: 40, 11: 40, 12: 10})
    assert found is not None
    assert found.tokens == 160


def test_what_a_taker_has_in_its_own_tiers_travels_all_the_same() -> None:
    found = plan(tiered(3), worker(1), hits={30: 20, 33: 15, 36: 5, 1: 40})
    assert found is not None
    assert (found.tokens, found.held_tokens) == (640, 320)
    assert found.compute_s == pytest.approx(0.32)
    assert found.lane_s == pytest.approx(0.001 + 35 * BLOCK_BYTES / 1e9)


def offer(*workers: Worker, hits: dict[int, int]) -> PrefixOffer | None:
    parts = FetchTimes(), FetchesUnderWay(BackgroundTasks()), "m", ()
    return offer_of(PoolSnapshot(workers), PROMPT, PrefixHits.of(hits), *parts, 0.0)


def test_an_offer_counts_the_holder_s_read() -> None:
    near, below = worker(1), tiered(2, disk_tier=0.1)
    fixed = offer(near, hits={1: 40})
    read = offer(below, hits={20: 40, 22: 40, 24: 10})
    assert fixed is not None
    assert read is not None
    assert (fixed.tokens, read.tokens) == (640, 640)
    assert read.fixed_s - fixed.fixed_s == pytest.approx(30 * 1e-4)
    both = offer(near, below, hits={1: 39, 20: 40, 22: 20, 24: 10})
    assert both is not None
    assert both.holder is near, "the other's last block takes longer to read than to compute"
    slow = offer(tiered(2, disk_tier=0.05), hits={20: 40, 22: 20, 24: 10})
    assert slow is not None
    assert slow.tokens == 320
    assert offer(tiered(2, disk_tier=0.05), hits={20: 40}) is None
