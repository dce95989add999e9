"""The prefix router: the least predicted cost over all pairs, and the properties that users rely on."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.peer_fetch.prefix_offer import PrefixOffer
from coordinator.request.candidates import PairCost
from coordinator.routing import prefix_router
from coordinator.routing.baseline_routers import RoundRobinRouter
from coordinator.routing.prefix_router import PrefixRouter
from coordinator.routing.router import Pair, Router, RoutingRequest
from coordinator.routing.scores import crowding, pair_cost
from coordinator.workers.catalog import Model
from coordinator.workers.load_ledger import LoadLedger
from coordinator.workers.prefix_index.hits import PrefixHits
from coordinator.workers.snapshot import ChangeLog, PoolName, PoolSnapshot, Worker
from splitserve.v1 import registry_pb2

MODEL = Model("m", "source", context_tokens=100_000, vocabulary_size=100, block_sizes=(16,))
REQUEST = RoutingRequest("m", prompt_tokens=1000, expected_output_tokens=50)
RATE, STEP_MS, LANE = 1000.0, 10.0, 10.0
SLOTS = {f"{pool}{n}": 10 * (pool == "d") + n for pool in "pd" for n in range(8)}


def worker(name: str, pool: PoolName, **changed: Any) -> Worker:
    fields = registry_pb2.WorkerLoad.DESCRIPTOR.fields_by_name
    load = {key: changed.pop(key) for key in list(changed) if key in fields}
    usual = {"total_blocks": 1000, "free_blocks": 1000, "decode_step_ms": STEP_MS}
    made = Worker(
        worker_id=name,
        epoch=1,
        pool=pool,
        address="h:1",
        model=MODEL,
        agent_id=f"agent-{name}",
        transport="memory",
        block_size_tokens=16,
        max_running_requests=8,
        load=registry_pb2.WorkerLoad(**(usual | {"prefill_tokens_per_second": RATE} | load)),
        reported=True,
        output_open=True,
        block_bytes=100_000,
        prefix_slot=SLOTS[name],
    )
    return dataclasses.replace(made, **changed)


def prefill(name: str, *peers: str, lanes: dict[str, float] | None = None, **changed: Any) -> Worker:
    speeds = lanes or dict.fromkeys(peers, LANE)
    return worker(
        name,
        "prefill",
        connected_agents=frozenset(f"agent-{peer}" for peer in peers),
        lanes=tuple(
            registry_pb2.LaneReport(agent_id=f"agent-{peer}", gb_per_second=speed)
            for peer, speed in speeds.items()
        ),
        **changed,
    )


def decode(name: str, **changed: Any) -> Worker:
    return worker(name, "decode", **changed)


def choose(*workers: Worker, **changed: Any) -> Pair | None:
    request = dataclasses.replace(REQUEST, **changed)
    return choose_among(workers, request)


def choose_among(
    workers: Sequence[Worker], request: RoutingRequest, router: Router | None = None
) -> Pair | None:
    router = router or PrefixRouter()
    return router.choose_pair(PoolSnapshot(tuple(workers)), LoadLedger.of(workers), request, now=0.0)


def chosen(*workers: Worker, **changed: Any) -> tuple[str, str | None]:
    pair = choose(*workers, **changed)
    assert pair is not None
    return pair.prefill.worker_id, pair.decode.worker_id if pair.decode else None


def hits(**blocks: int) -> PrefixHits:
    return PrefixHits.of({SLOTS[name]: count for name, count in blocks.items()})


TWO = prefill("p0", "d0", "d1"), prefill("p1", "d0", "d1"), decode("d0"), decode("d1")


def test_the_holder_of_the_prefix_wins_among_equals() -> None:
    assert chosen(*TWO, hits=hits(p1=60)) == ("p1", "d0")
    assert chosen(*TWO, hits=hits(p1=60), turn=1) == ("p1", "d1")


def test_the_holder_loses_when_its_queue_costs_more_than_the_prefix_saves() -> None:
    # One of two is busy: the 800 cached tokens count four times, for the requests behind.
    busy = prefill("p0", "d0", waiting_tokens=3100)
    assert chosen(busy, prefill("p1", "d0"), decode("d0"), hits=hits(p0=50)) == ("p0", "d0")
    busy = prefill("p0", "d0", waiting_tokens=3300)
    assert chosen(busy, prefill("p1", "d0"), decode("d0"), hits=hits(p0=50)) == ("p1", "d0")


def test_computing_again_counts_more_the_busier_the_pool_is() -> None:
    held, two = hits(p0=50), [prefill("p0", "d0", waiting_tokens=2000), prefill("p1", "d0")]
    idle, busy = ([prefill(f"p{n}", "d0", waiting_tokens=load) for n in range(2, 6)] for load in (0, 5000))
    assert chosen(*two, *idle, decode("d0"), hits=held)[0] != "p0"
    assert chosen(*two, *busy, decode("d0"), hits=held)[0] == "p0"


def test_blocks_cached_on_decode_are_not_transferred() -> None:
    slow = {"d0": 0.1, "d1": 0.1}
    workers = prefill("p0", "d0", "d1", lanes=slow), decode("d0", running_requests=4), decode("d1")
    assert chosen(*workers) == ("p0", "d1")
    assert chosen(*workers, hits=hits(d0=60)) == ("p0", "d0")


def test_the_pair_is_chosen_together() -> None:
    """The best prefill worker has a slow lane to the only decode worker with room."""
    near, far = {"d0": 10.0, "d1": 0.01}, {"d0": 10.0, "d1": 10.0}
    full = {"free_blocks": 0, "referenced_blocks": 1000}
    workers = prefill("p0", *near, lanes=near), prefill("p1", *far, lanes=far, waiting_tokens=100)
    assert chosen(*workers, decode("d0"), decode("d1")) == ("p0", "d0")
    assert chosen(*workers, decode("d0", **full), decode("d1")) == ("p0", "d0")  # short of blocks, yet sooner
    longer = dataclasses.replace(REQUEST, expected_output_tokens=1000)
    pair = choose_among((*workers, decode("d0", **full), decode("d1")), longer)
    assert pair is not None
    assert pair.prefill.worker_id == "p1"


def test_capacity_for_the_expected_output_counts() -> None:
    tight = decode("d0", free_blocks=64, referenced_blocks=936)
    roomy = decode("d1", running_requests=2)
    workers = prefill("p0", "d0", "d1"), tight, roomy
    assert chosen(*workers, expected_output_tokens=5) == ("p0", "d0")
    assert chosen(*workers, expected_output_tokens=900) == ("p0", "d1")


def test_where_decode_workers_compute_prompts_those_that_wait_there_count() -> None:
    """Else a burst goes to the worker of the shortest step, which computes prompts one after the other."""
    workers = prefill("p0", "d0", "d1"), decode("d0", waiting_tokens=4000), decode("d1", running_requests=2)
    assert chosen(*workers) == ("p0", "d0")
    assert chosen(*workers, computed_at_decode=True) == ("p0", "d1")
    pair = choose(*workers, computed_at_decode=True, wants_candidates=True)
    assert pair is not None
    assert [one.cost.decode_wait_s for one in pair.candidates[1:]] == pytest.approx([0.0125, 4.01])


def test_a_burst_between_two_reports_is_spread_over_decode_workers_that_compute_it() -> None:
    workers = prefill("p0", "d0", "d1"), decode("d0", running_requests=1), decode("d1", running_requests=4)
    loads, counts = LoadLedger.of(workers), Counter[str]()
    for _ in range(8):
        request = dataclasses.replace(REQUEST, computed_at_decode=True)
        pair = PrefixRouter().choose_pair(PoolSnapshot(workers), loads, request, 0.0)
        assert pair is not None
        assert pair.decode is not None
        loads.count_stream(pair.decode.key, request.prompt_tokens)
        counts[pair.decode.worker_id] += 1
    assert counts == {"d0": 4, "d1": 4}


def test_a_session_stays_while_its_home_is_not_much_busier() -> None:
    names = [f"p{n}" for n in range(8)]
    workers = {name: prefill(name, "d0") for name in names}
    home, _ = chosen(*workers.values(), decode("d0"), session_id="s1")
    for turn in range(9):
        assert chosen(*workers.values(), decode("d0"), session_id="s1", turn=turn)[0] == home
    workers[home] = prefill(home, "d0", waiting_tokens=200)
    assert chosen(*workers.values(), decode("d0"), session_id="s1")[0] == home
    workers[home] = prefill(home, "d0", waiting_tokens=300)
    assert chosen(*workers.values(), decode("d0"), session_id="s1")[0] != home


def test_sessions_spread_and_only_those_of_a_lost_worker_move() -> None:
    workers = [*(prefill(f"p{n}", "d0") for n in range(8)), decode("d0")]
    homes = {f"s{n}": chosen(*workers, session_id=f"s{n}")[0] for n in range(200)}
    assert min(Counter(homes.values()).values()) > 8
    assert len(set(homes.values())) == 8
    fewer = workers[1:]
    for session, home in homes.items():
        assert chosen(*fewer, session_id=session)[0] == home or home == "p0"


def test_a_higher_class_weighs_the_queue_less() -> None:
    workers = prefill("p0", "d0", waiting_tokens=3300), prefill("p1", "d0"), decode("d0")
    assert chosen(*workers, hits=hits(p0=50))[0] == "p1"
    assert chosen(*workers, hits=hits(p0=50), class_rank=1)[0] == "p0"


def test_excluded_draining_and_unconnected_workers_are_never_chosen() -> None:
    assert chosen(*TWO, hits=hits(p1=60), exclude=frozenset({("p1", 1)}))[0] == "p0"
    gone = dataclasses.replace(TWO[1], draining=True)
    assert chosen(TWO[0], gone, *TWO[2:], hits=hits(p1=60))[0] == "p0"
    alone = dataclasses.replace(TWO[1], connected_agents=frozenset())
    assert chosen(TWO[0], alone, *TWO[2:], hits=hits(p1=60))[0] == "p0"
    assert choose(alone, decode("d0")) is None
    assert choose(decode("d0")) is None
    assert choose(*TWO, model="other") is None


def test_one_token_needs_no_decode_worker() -> None:
    assert chosen(prefill("p0"), prefill("p1"), needs_decode=False, hits=hits(p1=60)) == ("p1", None)


def test_equals_take_turns() -> None:
    for router in (PrefixRouter(), RoundRobinRouter()):
        picks = [choose_among(TWO, dataclasses.replace(REQUEST, turn=n), router) for n in range(6)]
        assert set(Counter(pair.prefill.worker_id for pair in picks if pair).values()) == {3}
        assert set(Counter(pair.decode.worker_id for pair in picks if pair and pair.decode).values()) == {3}


def test_round_robin_skips_unconnected_workers() -> None:
    workers = prefill("p0", "d1"), prefill("p1"), decode("d0"), decode("d1")
    for turn in range(4):
        pair = choose_among(workers, dataclasses.replace(REQUEST, turn=turn), RoundRobinRouter())
        assert pair is not None
        assert pair.decode is not None
        assert (pair.prefill.worker_id, pair.decode.worker_id) == ("p0", "d1")


prefills_st = st.lists(
    st.tuples(
        st.integers(0, 3000),
        st.sampled_from([0.0, 500.0, 2000.0]),
        st.dictionaries(st.sampled_from(["d0", "d1", "d2"]), st.sampled_from([0.1, 1.0, 20.0])),
        st.integers(0, 70),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)
decodes_st = st.lists(
    st.tuples(
        st.integers(0, 1000), st.integers(0, 20), st.sampled_from([0.0, 5.0, 30.0]), st.integers(0, 70)
    ),
    min_size=1,
    max_size=3,
)
Prefills = list[tuple[int, float, dict[str, float], int, bool]]
Decodes = list[tuple[int, int, float, int]]


def pools(prefills: Prefills, decodes: Decodes) -> tuple[list[Worker], list[Worker], PrefixHits]:
    ps = [
        prefill(
            f"p{n}", *lanes, lanes=lanes, waiting_tokens=tokens, prefill_tokens_per_second=rate, draining=gone
        )
        for n, (tokens, rate, lanes, _, gone) in enumerate(prefills)
    ]
    ds = [
        decode(
            f"d{n}",
            free_blocks=free,
            running_requests=running,
            decode_step_ms=step,
            referenced_blocks=5,
            waiting_tokens=37 * running,
        )
        for n, (free, running, step, _) in enumerate(decodes)
    ]
    held = {f"p{n}": entry[3] for n, entry in enumerate(prefills)}
    held |= {f"d{n}": entry[3] for n, entry in enumerate(decodes)}
    return ps, ds, hits(**held)


def with_block_sizes(workers: Sequence[Worker], sizes: Sequence[int]) -> list[Worker]:
    """The same workers with blocks of these sizes, in turn, and as many bytes a token."""
    return [
        dataclasses.replace(one, block_size_tokens=size, block_bytes=size * 6250)
        for one, size in zip(workers, itertools.cycle(sizes), strict=False)
    ]


sizes_st = st.just([16]) | st.lists(st.sampled_from([8, 16, 32]), min_size=2, max_size=4)


Tiers = tuple[int, int, float, float, int]
"""Blocks on disk, in host memory beyond the pool, GB/s of host memory and disk, and bytes that wait."""
tier_st = st.none() | st.tuples(
    st.integers(0, 50),
    st.integers(0, 50),
    st.sampled_from([0.002, 0.01, 1.0]),
    st.sampled_from([0.001, 0.008, 0.1]),
    st.sampled_from([0, 10**6]),
)


def with_tiers(
    workers: Sequence[Worker], held: PrefixHits, tiers: Sequence[Tiers | None]
) -> tuple[list[Worker], PrefixHits]:
    """The same workers with tiers, in turn: part of what each holds is there."""
    blocks = {slot: held.blocks(slot) for slot in range(3 * len(SLOTS) + 60)}
    changed = []
    for one, tier in zip(workers, itertools.cycle(tiers), strict=False):
        if tier is None:
            changed.append(one)
            continue
        on_disk, in_host, host_gb, disk_gb, waiting = tier
        slots, whole = (one.prefix_slot + 20, one.prefix_slot + 40), blocks[one.prefix_slot]
        blocks[slots[0]] = max(0, whole - on_disk)
        blocks[slots[1]] = max(0, whole - on_disk - in_host)
        load = registry_pb2.WorkerLoad()
        load.CopyFrom(one.load)
        load.host_tier.gb_per_second, load.disk_tier.gb_per_second = host_gb, disk_gb
        load.host_tier.waiting_bytes = load.disk_tier.waiting_bytes = waiting
        changed.append(dataclasses.replace(one, near_slots=slots, load=load))
    return changed, PrefixHits.of(blocks)


def test_a_hit_on_disk_counts_the_time_of_reading() -> None:
    """960 tokens are computed in 0.96 s, and 60 blocks of 100 kB are read in 0.06 s at 0.1 GB/s, in 0.6 at 0.01."""
    two, held = [prefill("p0", "d0"), prefill("p1", "d0")], hits(p0=60)
    (fast,), on_disk = with_tiers(two[:1], held, [(60, 0, 1.0, 0.1, 0)])
    (slow,), _ = with_tiers(two[:1], held, [(60, 0, 1.0, 0.01, 0)])
    (slower,), _ = with_tiers(two[:1], held, [(60, 0, 1.0, 0.005, 0)])
    (waits,), _ = with_tiers(two[:1], held, [(60, 0, 1.0, 0.1, 5 * 10**7)])
    for holder, read_s in ((fast, 0.06), (slow, 0.6), (waits, 0.56)):
        pair = choose(holder, two[1], decode("d0"), hits=on_disk)
        assert pair is not None
        assert (pair.prefill.worker_id, pair.cost.cached_tokens) == ("p0", 960)
        assert pair.cost.read_s == pytest.approx(read_s)
    pair = choose(slower, two[1], decode("d0"), hits=on_disk, turn=1)
    assert pair is not None
    assert (pair.prefill.worker_id, pair.cost.cached_tokens) == ("p1", 0), "it is computed as soon"
    # One of two is busy: computing counts four times, for the requests behind.
    queued = with_tiers([prefill("p0", "d0", waiting_tokens=3100)], held, [(60, 0, 1.0, 0.01, 0)])[0][0]
    pair = choose(queued, two[1], decode("d0"), hits=on_disk)
    assert pair is not None
    assert pair.prefill.worker_id == "p0"
    assert pair.cost.read_s == 0, "it is read while it would wait anyway"


def test_what_decode_holds_below_its_blocks_is_read_or_transferred() -> None:
    lanes, held = {"d0": 0.05, "d1": 0.05}, hits(d0=62, d1=62)
    p0 = prefill("p0", "d0", "d1", lanes=lanes)
    two, below = with_tiers([decode("d0"), decode("d1")], held, [(62, 0, 1.0, 0.1, 0), (0, 62, 1.0, 0.1, 0)])
    pair = choose(p0, *two, hits=below)
    assert pair is not None
    assert pair.decode is not None
    assert pair.decode.worker_id == "d1"
    assert pair.cost.transfer_s == pytest.approx(62 * 1e5 / 1e9 + 1e5 / 0.05e9)
    slow, below = with_tiers([decode("d0")], held, [(62, 0, 1.0, 0.01, 0)])
    pair = choose(p0, *slow, hits=below)
    assert pair is not None
    assert pair.cost.transfer_s == pytest.approx(63 * 1e5 / 0.05e9), "the lane is faster than the disk"


def able_to_fetch(ps: list[Worker], speed: float) -> tuple[list[Worker], PrefixOffer]:
    """The same workers, neutral and connected to each other, and what the first one offers."""
    more = [registry_pb2.LaneReport(agent_id=p.agent_id, gb_per_second=speed, latency_ms=2.0) for p in ps]
    agents = frozenset(p.agent_id for p in ps)
    both = [
        dataclasses.replace(
            p, neutral=True, lanes=(*p.lanes, *more), connected_agents=p.connected_agents | agents
        )
        for p in ps
    ]
    return both, PrefixOffer(both[0], 960, 0.01, 1.5, frozenset(p.key for p in ps[3:]))


def test_a_worker_that_could_fetch_the_prefix_is_nearly_as_good_as_one_that_has_it() -> None:
    """So a hot prefix spreads as soon as its holder has a queue, and not before."""
    held = hits(p1=60)
    idle, _ = able_to_fetch([prefill("p1", "d0"), prefill("p0", "d0")], 10.0)
    queued, offer = able_to_fetch([prefill("p1", "d0", waiting_tokens=200), prefill("p0", "d0")], 10.0)
    assert chosen(*queued, decode("d0"), hits=held) == ("p1", "d0")
    assert chosen(*idle, decode("d0"), hits=held, offer=offer) == ("p1", "d0")
    pair = choose(*queued, decode("d0"), hits=held, offer=offer, wants_candidates=True)
    assert pair is not None
    assert pair.prefill.worker_id == "p0"
    assert pair.cost.cached_tokens == 0, "before it has fetched"
    assert pair.cost.fetch_s == pytest.approx(0.01 + 1.5 * (0.002 + 960 * 6250 / 10e9))
    assert pair.cost.prefill_s == pytest.approx((REQUEST.prompt_tokens - 960) / RATE)
    resting = dataclasses.replace(offer, resting=frozenset({("p0", 1)}))
    assert chosen(*queued, decode("d0"), hits=held, offer=resting) == ("p1", "d0")
    nobody = choose(*queued, decode("d0"), hits=hits(), offer=offer, wants_candidates=True)
    assert nobody is not None
    assert nobody.prefill.worker_id == "p0", "also where no hits are known"
    slow, offer = able_to_fetch(queued, 0.01)
    slow = [dataclasses.replace(p, lanes=p.lanes[:1]) for p in slow]
    slow_offer = dataclasses.replace(offer, holder=slow[0])
    assert chosen(*slow, decode("d0"), hits=held, offer=slow_offer) == ("p1", "d0")


@given(
    prefills_st,
    decodes_st,
    st.integers(0, 7),
    st.sampled_from([-1, 0, 1]),
    sizes_st,
    st.booleans(),
    st.sampled_from([None, 0.02, 10.0]),
    st.lists(tier_st, max_size=4),
)
def test_the_search_equals_trying_every_pair(
    prefills: Prefills,
    decodes: Decodes,
    turn: int,
    class_rank: int,
    sizes: list[int],
    computed_at_decode: bool,
    fetch_gb_per_s: float | None,
    tiers: list[Tiers | None],
) -> None:
    """Workers with blocks of different sizes, with tiers, and those that could fetch the prefix, included."""
    ps, ds, held = pools(prefills, decodes)
    ps, ds = with_block_sizes(ps, sizes), with_block_sizes(ds, sizes[::-1])
    if tiers:
        ps, held = with_tiers(ps, held, tiers)
        ds, held = with_tiers(ds, held, tiers[::-1])
    ps, offer = (ps, None) if fetch_gb_per_s is None else able_to_fetch(ps, fetch_gb_per_s)
    request = dataclasses.replace(
        REQUEST,
        hits=held,
        turn=turn,
        class_rank=class_rank,
        computed_at_decode=computed_at_decode,
        offer=offer,
    )
    rates = [p.load.prefill_tokens_per_second for p in ps]
    mean_rate = mean([rate for rate in rates if rate], 2000.0)
    mean_step = mean([d.load.decode_step_ms / 1e3 for d in ds if d.load.decode_step_ms], 0.02)
    speeds = {(p.agent_id, lane.agent_id): lane.gb_per_second for p in ps for lane in p.lanes}
    known = {d.agent_id for d in ds}
    mean_speed = mean([s for (_, agent), s in speeds.items() if agent in known], 0.0)
    ready = [p for p in ps if not p.draining]
    crowded = crowding(sum(p.load.waiting_tokens > 0 for p in ready), len(ready))
    loads, totals = LoadLedger.of([*ps, *ds]), []
    for p in ps:
        for d in ds:
            if p.draining or not p.reaches(d):
                continue
            speed = speeds.get((p.agent_id, d.agent_id), mean_speed)
            parts = pair_cost(
                p,
                d,
                loads,
                request,
                p.load.prefill_tokens_per_second or mean_rate,
                d.load.decode_step_ms / 1e3 or mean_step,
                1e-9 / speed,
                crowded / mean_rate,
            )
            totals.append(total_s(parts))
    pair = choose_among((*ds, *ps), request)
    assert (pair is None or pair.is_own) == (not totals), "a neutral one serves alone where there is no pair"
    if pair is not None and totals:
        assert pair.decode is not None
        assert pair.prefill.reaches(pair.decode)
        assert not pair.prefill.draining
        assert total_s(pair.cost) == pytest.approx(min(totals))


def total_s(parts: PairCost) -> float:
    return parts.wait_s + parts.others_s


def mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default


@given(
    prefills_st,
    decodes_st,
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2000)), max_size=8),
    st.booleans(),
)
def test_a_router_that_saw_other_snapshots_answers_like_a_new_one(
    prefills: Prefills, decodes: Decodes, changes: list[tuple[int, int]], keeps_log: bool
) -> None:
    ps, ds, held = pools(prefills, decodes)
    workers, seasoned = [*ds, *ps], PrefixRouter()
    request = dataclasses.replace(
        REQUEST, hits=held, session_id="s" if keeps_log else "", computed_at_decode=keeps_log
    )
    log: list[str] = []
    loads = LoadLedger.of(workers)
    for place, amount in [(0, 0), *changes]:
        at = place % len(workers)
        log.append(workers[at].worker_id)
        changed = worker(
            workers[at].worker_id,
            workers[at].pool,
            waiting_tokens=amount,
            free_blocks=amount,
            prefill_tokens_per_second=amount % 3 * 100.0,
            decode_step_ms=amount % 5,
        )
        lanes, agents = workers[at].lanes, workers[at].connected_agents
        if amount % 2:
            lanes, agents = lanes[1:], frozenset(list(agents)[1:])
        workers[at] = dataclasses.replace(
            changed, draining=amount % 7 == 1, lanes=lanes, connected_agents=agents
        )
        if place == 6:
            loads.changes = []  # a long list was replaced
        loads.on_report(workers[at].key, workers[at].load)
        if amount % 3:
            loads.count_prompt(workers[at].key, amount // 2)
            loads.count_stream(workers[at].key, amount // 2)
        if place == 7:
            workers, log = workers[1:] or workers, []
        if amount % 11 == 0:
            continue  # several changes between two decisions
        snapshot = PoolSnapshot(tuple(workers), ChangeLog(log, len(log)) if keeps_log else None)
        assert seasoned.choose_pair(snapshot, loads, request, 0.0) == PrefixRouter().choose_pair(
            snapshot, loads, request, 0.0
        )


@given(prefills_st, decodes_st, st.integers(0, 3), st.integers(1, 2000))
def test_more_load_on_a_busy_one_or_more_hits_never_turns_the_choice_away(
    prefills: Prefills, decodes: Decodes, place: int, amount: int
) -> None:
    ps, ds, held = pools(prefills, decodes)
    request = dataclasses.replace(REQUEST, hits=held)
    loads = LoadLedger.of([*ds, *ps])
    snapshot = PoolSnapshot((*ds, *ps))
    first = PrefixRouter().choose_pair(snapshot, loads, request, 0.0)
    if first is None:
        return
    other = ps[place % len(ps)]
    if other.key != first.prefill.key:
        if not other.load.waiting_tokens:
            return  # one more busy worker is another crowding
        loads.count_prompt(other.key, amount)
    else:
        more = {slot: held.blocks(slot) + amount // 100 for slot in [first.prefill.prefix_slot]}
        kept = {w.prefix_slot: held.blocks(w.prefix_slot) for w in (*ps, *ds)}
        request = dataclasses.replace(request, hits=PrefixHits.of(kept | more))
    again = PrefixRouter().choose_pair(snapshot, loads, request, 0.0)
    assert again is not None
    assert again.prefill.key == first.prefill.key
    assert again.predicted_wait_s <= first.predicted_wait_s + 1e-9


def test_the_bound_on_the_search_never_hides_the_only_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_router, "MAX_PREFILL_CANDIDATES", 1)
    lone = prefill("p0"), prefill("p1"), prefill("p2", "d0", waiting_tokens=10)
    assert chosen(*lone, decode("d0")) == ("p2", "d0")


def test_candidates_are_the_chosen_ones_and_the_next_best_with_their_costs() -> None:
    every = [f"d{number}" for number in range(6)]
    ps = [prefill(f"p{number}", *every, waiting_tokens=100 * number) for number in range(6)]
    ds = [decode(f"d{number}", running_requests=number) for number in range(6)]
    pair = choose(*ps, *ds, wants_candidates=True)
    assert pair is not None
    assert [one.worker_id for one in pair.candidates] == ["p0", "p1", "p2", "d0", "d1", "d2"]
    assert pair.candidates[0].cost == pair.candidates[3].cost == pair.cost
    for number in range(3):
        assert pair.candidates[number].cost.queue_s == pytest.approx(0.1 * number)
    waits = [one.cost.decode_wait_s for one in pair.candidates[3:]]
    assert waits == sorted(waits)
    assert choose(*ps, *ds) == dataclasses.replace(pair, candidates=())


def test_candidates_leave_out_what_cannot_be_reached_or_is_excluded() -> None:
    ps = prefill("p0", "d0"), prefill("p1", "d1", waiting_tokens=5), prefill("p2", "d0", waiting_tokens=9)
    ds = decode("d0"), decode("d1")
    pair = choose(*ps, *ds, wants_candidates=True)
    assert pair is not None
    assert [one.worker_id for one in pair.candidates] == ["p0", "p2", "d0"]
    pair = choose(*ps, *ds, wants_candidates=True, exclude=frozenset({ps[2].key}))
    assert pair is not None
    assert [one.worker_id for one in pair.candidates] == ["p0", "d0"]


def test_candidates_without_decode_and_the_home_of_a_session() -> None:
    ps = prefill("p0"), prefill("p1")
    pair = choose(*ps, needs_decode=False, session_id="s", wants_candidates=True)
    assert pair is not None
    assert [one.pool for one in pair.candidates] == ["prefill", "prefill"]
    assert [one.is_home for one in pair.candidates] == [True, False]
