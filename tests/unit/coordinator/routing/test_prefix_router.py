"""The prefix router: the least predicted cost over all pairs, and the properties that users rely on."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.request.state import PairCost
from coordinator.routing import prefix_router
from coordinator.routing.prefix_router import PrefixRouter
from coordinator.routing.router import Pair, RoutingRequest, no_pair
from coordinator.routing.worker_columns import crowding
from coordinator.workers.load import WorkerLoads
from coordinator.workers.prefix_index import PrefixHits
from coordinator.workers.snapshot import Model, PoolSnapshot, Worker
from splitserve.latency_model import LatencyModel
from splitserve.roles import PoolName
from splitserve.v1 import registry_pb2
from tests.support.clients import admission_parts
from tests.support.clients.inference_requests import hits_of

MODEL = Model("m", "source", context_tokens=100_000, vocabulary_size=100, block_size_tokens=16)
REQUEST = RoutingRequest("m", prompt_tokens=1000, expected_output_tokens=50)
RATE, STEP_MS, LANE = 1000.0, 10.0, 10.0
SLOTS = {f"{pool}{n}": 10 * (pool == "d") + n for pool in "pd" for n in range(8)}


def worker(name: str, pool: PoolName, **changed: Any) -> Worker:
    usual: dict[str, Any] = {
        "model": MODEL,
        "agent_id": f"agent-{name}",
        "tokens_per_s": RATE,
        "step_ms": STEP_MS,
        "total_blocks": 1000,
        "free_blocks": 1000,
        "block_bytes": 100_000,
        "prefix_slot": SLOTS[name],
    }
    return admission_parts.worker(name, pool, 8, **(usual | changed))


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


def choose_among(workers: Sequence[Worker], request: RoutingRequest) -> Pair | None:
    return PrefixRouter().choose_pair(PoolSnapshot(tuple(workers)), WorkerLoads.of(workers), request)


def chosen(*workers: Worker, **changed: Any) -> tuple[str, str | None]:
    pair = choose(*workers, **changed)
    assert pair is not None
    return pair.prefill.worker_id, pair.decode.worker_id if pair.decode else None


def hits(**blocks: int) -> PrefixHits:
    return hits_of({SLOTS[name]: count for name, count in blocks.items()})


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


def test_the_shorter_queue_wins() -> None:
    workers = prefill("p0", "d0", waiting_tokens=5000), prefill("p1", "d0", waiting_tokens=10), decode("d0")
    assert chosen(*workers) == ("p1", "d0")


def test_a_faster_worker_may_have_the_longer_queue() -> None:
    slow = prefill("p0", "d0", waiting_tokens=1000, tokens_per_s=500)
    fast = prefill("p1", "d0", waiting_tokens=3000, tokens_per_s=9000)
    assert chosen(slow, fast, decode("d0")) == ("p1", "d0")


def test_what_was_sent_since_the_last_report_counts() -> None:
    workers = prefill("p0", "d0"), prefill("p1", "d0"), decode("d0")
    loads = WorkerLoads.of(workers)
    loads.count_prompt(("p0", 1), 500)
    pair = PrefixRouter().choose_pair(PoolSnapshot(workers), loads, REQUEST)
    assert pair is not None
    assert pair.prefill.worker_id == "p1"


def test_an_unmeasured_worker_counts_as_average() -> None:
    fresh = prefill("p0", "d0", tokens_per_s=0)
    measured = prefill("p1", "d0", tokens_per_s=50_000, waiting_tokens=100)
    assert chosen(fresh, measured, decode("d0")) == ("p0", "d0")


def test_a_full_decode_worker_is_avoided() -> None:
    full = decode("d0", free_blocks=2, referenced_blocks=98, running_requests=2)
    busy = decode("d1", running_requests=6)
    assert chosen(prefill("p0", "d0", "d1"), full, busy) == ("p0", "d1")


def test_what_is_missing_is_named() -> None:
    cases: list[tuple[tuple[Worker, ...], str]] = [
        ((), "no prefill and no decode"),
        ((prefill("p0"),), "no decode worker"),
        ((decode("d0"),), "no prefill worker"),
        ((prefill("p0"), decode("d0")), "is connected"),
    ]
    for workers, expected in cases:
        error = no_pair(PoolSnapshot(workers), REQUEST, 1.0)
        assert expected in error.message
        assert (error.reason, error.retry_after_s) == ("NO_WORKER", 1.0)


def test_a_refused_lane_is_named() -> None:
    problem = "0.30 GB/s over tcp, at least 1 GB/s expected"
    lane = registry_pb2.LaneReport(agent_id="agent-d0", problem=problem, refused=True)
    snapshot = PoolSnapshot((decode("d0"), dataclasses.replace(prefill("p0"), lanes=(lane,))))
    error = no_pair(snapshot, REQUEST, 1.0)
    assert error.reason == "SLOW_LANE"
    assert f"p0 to d0: {problem}" in error.message


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


def test_excluded_and_draining_workers_are_never_chosen_whatever_they_hold() -> None:
    assert chosen(*TWO, hits=hits(p1=60), exclude=frozenset({("p1", 1)}))[0] == "p0"
    gone = dataclasses.replace(TWO[1], draining=True)
    assert chosen(TWO[0], gone, *TWO[2:], hits=hits(p1=60))[0] == "p0"


def test_prompts_that_wait_on_decode_workers_count_where_those_compute_them() -> None:
    workers = prefill("p0", "d0", "d1"), decode("d0", waiting_tokens=900), decode("d1", running_requests=2)
    assert chosen(*workers) == ("p0", "d0")
    pair = choose(*workers, is_local=True, wants_candidates=True)
    assert pair is not None
    assert pair.decode is not None
    assert pair.decode.worker_id == "d1"
    other = pair.candidates[-1]
    assert other.worker_id == "d0"
    assert other.cost.decode_wait_s > pair.cost.decode_wait_s + 0.4


def test_equals_take_turns() -> None:
    picks = [choose_among(TWO, dataclasses.replace(REQUEST, turn=n)) for n in range(6)]
    assert set(Counter(pair.prefill.worker_id for pair in picks if pair).values()) == {3}
    assert set(Counter(pair.decode.worker_id for pair in picks if pair and pair.decode).values()) == {3}


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
        prefill(f"p{n}", *lanes, lanes=lanes, waiting_tokens=tokens, tokens_per_s=rate, draining=gone)
        for n, (tokens, rate, lanes, _, gone) in enumerate(prefills)
    ]
    ds = [
        decode(
            f"d{n}",
            free_blocks=free,
            running_requests=running,
            step_ms=step,
            referenced_blocks=5,
            waiting_tokens=37 * running,
        )
        for n, (free, running, step, _) in enumerate(decodes)
    ]
    held = {f"p{n}": entry[3] for n, entry in enumerate(prefills)}
    held |= {f"d{n}": entry[3] for n, entry in enumerate(decodes)}
    return ps, ds, hits(**held)


@given(
    prefills_st,
    decodes_st,
    st.integers(0, 7),
    st.sampled_from([-1, 0, 1]),
)
def test_the_search_equals_trying_every_pair(
    prefills: Prefills,
    decodes: Decodes,
    turn: int,
    class_rank: int,
) -> None:
    ps, ds, held = pools(prefills, decodes)
    request = dataclasses.replace(
        REQUEST,
        hits=held,
        turn=turn,
        class_rank=class_rank,
    )
    rates = [LatencyModel.from_proto(p.load.latency).prefill_tokens_per_s for p in ps]
    mean_rate = mean([rate for rate in rates if rate], 2000.0)
    steps = [LatencyModel.from_proto(d.load.latency).decode_step_s(1, 0) or 0.0 for d in ds]
    mean_step = mean([step_s for step_s in steps if step_s], 0.02)
    speeds = {(p.agent_id, lane.agent_id): lane.gb_per_second for p in ps for lane in p.lanes}
    known = {d.agent_id for d in ds}
    mean_speed = mean([s for (_, agent), s in speeds.items() if agent in known], 0.0)
    ready = [p for p in ps if not p.draining]
    crowded = crowding(sum(p.load.waiting_tokens > 0 for p in ready), len(ready))
    loads, totals = WorkerLoads.of([*ps, *ds]), []
    for p, rate in zip(ps, rates, strict=True):
        for d, step_s in zip(ds, steps, strict=True):
            if p.draining or not p.reaches(d):
                continue
            speed = speeds.get((p.agent_id, d.agent_id), mean_speed)
            computing = rate or mean_rate, crowded / mean_rate
            totals.append(pair_s(p, d, loads, request, *computing, step_s or mean_step, 1e-9 / speed))
    pair = choose_among((*ds, *ps), request)
    assert (pair is None or pair.is_own) == (not totals), (
        "a worker of role both serves alone where there is no pair"
    )
    if pair is not None and totals:
        assert pair.decode is not None
        assert pair.prefill.reaches(pair.decode)
        assert not pair.prefill.draining
        assert total_s(pair.cost) == pytest.approx(min(totals))


def pair_s(
    p: Worker,
    d: Worker,
    loads: WorkerLoads,
    request: RoutingRequest,
    rate: float,
    others_token_s: float,
    step_s: float,
    byte_s: float,
) -> float:
    """The predicted cost of one pair, term by term."""
    load, size = loads.decode[d.key], d.block_size_tokens
    uncached = request.prompt_tokens - min(
        request.hits.blocks(p.prefix_slot) * size, request.prompt_tokens - 1
    )
    queue_s = loads.prefill[p.key].queued_tokens / rate * 2.0**-request.class_rank
    blocks = -(-request.prompt_tokens // size)
    transfer_s = (blocks - min(request.hits.blocks(d.prefix_slot), blocks)) * d.block_bytes * byte_s
    needed = (request.prompt_tokens + 1 + request.expected_output_tokens) // size + 1
    missing = max(0, needed - load.free_blocks)
    room_s = missing / max(1, load.held_blocks) * request.expected_output_tokens * step_s
    batch_s = step_s * (1 + load.batch_requests / d.max_running_requests)
    return queue_s + uncached * (1 / rate + others_token_s) + transfer_s + room_s + batch_s


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
    prefills: Prefills, decodes: Decodes, changes: list[tuple[int, int]], has_session: bool
) -> None:
    ps, ds, held = pools(prefills, decodes)
    workers, seasoned = [*ds, *ps], PrefixRouter()
    request = dataclasses.replace(REQUEST, hits=held, session_id="s" if has_session else "")
    loads = WorkerLoads.of(workers)
    for place, amount in [(0, 0), *changes]:
        at = place % len(workers)
        changed = worker(
            workers[at].worker_id,
            workers[at].role,
            waiting_tokens=amount,
            free_blocks=amount,
            tokens_per_s=amount % 3 * 100.0,
            step_ms=amount % 5,
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
            workers = workers[1:] or workers
        if amount % 11 == 0:
            continue  # several changes between two decisions
        snapshot = PoolSnapshot(tuple(workers))
        assert seasoned.choose_pair(snapshot, loads, request) == PrefixRouter().choose_pair(
            snapshot, loads, request
        )


@given(prefills_st, decodes_st, st.integers(0, 3), st.integers(1, 2000))
def test_more_load_on_a_busy_one_or_more_hits_never_turns_the_choice_away(
    prefills: Prefills, decodes: Decodes, place: int, amount: int
) -> None:
    ps, ds, held = pools(prefills, decodes)
    request = dataclasses.replace(REQUEST, hits=held)
    loads = WorkerLoads.of([*ds, *ps])
    snapshot = PoolSnapshot((*ds, *ps))
    first = PrefixRouter().choose_pair(snapshot, loads, request)
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
        request = dataclasses.replace(request, hits=hits_of(kept | more))
    again = PrefixRouter().choose_pair(snapshot, loads, request)
    assert again is not None
    assert again.prefill.key == first.prefill.key
    assert again.cost.wait_s <= first.cost.wait_s + 1e-9


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


def both(name: str, *peers: str, **changed: Any) -> Worker:
    """A worker of role `both`."""
    return prefill(name, *peers, **({"role": "both"} | changed))


def test_a_worker_of_role_both_is_a_pair_with_itself_where_a_handoff_takes_longer() -> None:
    slow = {"d0": 0.01, "d1": 0.01}
    assert chosen(both("p0", "d0", "d1", lanes=slow), decode("d0"), decode("d1")) == ("p0", "p0")
    assert chosen(both("p0"), decode("d0")) == ("p0", "p0"), "no lane is up"
    pair = choose(both("p0"))
    assert pair is not None
    assert pair.is_own
    assert pair.cost.transfer_s == 0.0


def test_a_worker_of_role_both_hands_off_where_its_batch_is_full() -> None:
    full = both("p0", "p1", running_requests=8, free_blocks=0, referenced_blocks=1000)
    assert chosen(full, both("p1", "p0", waiting_tokens=5000)) == ("p0", "p1")
