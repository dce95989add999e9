"""The pair policy on registered workers: what it reads of them, and the book of prompts behind it."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest

from coordinator.peer_fetch.prefix_offer import PrefixOffer
from coordinator.request.caller import ANYONE, Caller, RequestTargets
from coordinator.request.inference_request import InferenceRequest
from coordinator.request.observer import RequestEvents
from coordinator.request.state import RequestEstimate, RequestState
from coordinator.routing.prompt_book import PromptBook, PromptBookkeeper, due_of
from coordinator.routing.prompt_placement import PromptPlacement
from coordinator.routing.router import NO_COST, Pair, RoutingRequest
from coordinator.workers.catalog import Model
from coordinator.workers.load import Flight
from coordinator.workers.load_ledger import LoadLedger
from coordinator.workers.prefix_index.hits import PrefixHits
from coordinator.workers.snapshot import PoolName, PoolSnapshot, Worker
from engine.pacing.lending import MIN_LENT_TOKENS
from engine.pacing.step_time_fit import PromptFit
from splitserve.errors import UnavailableError
from splitserve.v1 import decode_pb2, generation_pb2, prefill_pb2, registry_pb2

MODEL = Model("m", "m", 100_000, 100)
FIT = registry_pb2.PromptFit(token_ms=1.0)
SECONDS = PromptFit(0.0, 1e-3, 0.0)
STEP = registry_pb2.DecodeStepFit(base_ms=20, sequence_ms=1)
FULL_STEPS = registry_pb2.DecodeStepFit(base_ms=12, sequence_ms=6)
TARGETS = RequestTargets(1.0, 0.05)


class Clock:
    now_s = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now_s)
    return clock


def worker(name: str, pool: PoolName, *, fit: bool = True, **load: Any) -> Worker:
    report = registry_pb2.WorkerLoad(**({"total_blocks": 1000, "free_blocks": 1000} | load))
    if fit:
        report.prompt_fit.CopyFrom(FIT)
    return Worker(
        worker_id=name,
        epoch=1,
        pool=pool,
        address="h:1",
        model=MODEL,
        agent_id=f"agent-{name}",
        transport="memory",
        block_size_tokens=16,
        max_running_requests=8,
        load=report,
        reported=True,
        output_open=pool == "decode",
        paces_prompts=True,
        connected_agents=frozenset({"agent-d0", "agent-d1"}) if pool == "prefill" else frozenset(),
    )


P0, D0, D1 = worker("p0", "prefill"), worker("d0", "decode"), worker("d1", "decode")


class Bench:
    """A coordinator's account of some workers, on a clock that stands still."""

    def __init__(self, clock: Clock, *workers: Worker) -> None:
        self.clock, self.workers = clock, workers
        self.book = PromptBook()
        self.keeper = PromptBookkeeper(self.book)
        self.loads = LoadLedger.of(workers)
        self.placement = PromptPlacement(self.loads, self.book)

    def request(
        self, tokens: int, targets: RequestTargets | None = TARGETS, caller: Caller = ANYONE
    ) -> RequestEvents:
        request = InferenceRequest(
            "r",
            MODEL,
            (1,) * tokens,
            generation_pb2.SamplingParams(),
            generation_pb2.StopParams(max_tokens=8),
            0,
            self.clock.now_s + 60,
            self.clock.now_s,
            caller,
            targets=targets,
        )
        return RequestEvents(RequestState(request, RequestEstimate(8.0, float(tokens))), (self.keeper,))

    def pair(self, events: RequestEvents, *, cached: int = 0, **changed: Any) -> Pair:
        prefill, *decodes = self.workers
        state = events.state
        pair = Pair(prefill, decodes[0], 0.0, cost=replace(NO_COST, cached_tokens=cached))
        request = replace(RoutingRequest("m", len(state.request.prompt)), **changed)
        now, targets = self.clock.now_s, state.request.targets
        tpot_s = targets.tpot_s if targets is not None else None
        due_s = due_of(state, now)
        return self.placement.placed(pair, request, PoolSnapshot(self.workers), due_s, tpot_s, now)

    def pair_of(self, tokens: int, *, cached: int = 0, **changed: Any) -> Pair:
        """Of a prompt of so many tokens, of which the prefill worker has `cached`."""
        return self.pair(self.request(tokens), cached=cached, **changed)

    def queue(self, where: Worker, tokens: int, **fields: Any) -> RequestEvents:
        """A request whose prompt is at a worker."""
        events = self.request(tokens, **fields)
        local = where.pool == "decode"
        prefill, decode = (self.workers[0], where) if local else (where, self.workers[1])
        events.routed(prefill, decode, 0, self.clock.now_s)
        if local:
            self.keeper.expected_locally(events.state, 0)
        return events


def test_an_idle_prefill_worker_computes(clock: Clock) -> None:
    bench = Bench(clock, P0, D0)
    pair = bench.pair(bench.request(250))
    assert (pair.decode, pair.local_tokens) == (D0, 0)


def test_a_busy_one_leaves_the_prompt_to_the_decode_worker_that_is_ready_first(clock: Clock) -> None:
    bench = Bench(clock, P0, D0, D1)
    bench.queue(P0, 300)
    bench.queue(D0, 100)
    pair = bench.pair(bench.request(100))
    assert pair.decode == D1
    assert pair.local_tokens == pytest.approx(900, abs=1)
    assert pair.prefill == P0


LENT = replace(worker("p0", "prefill", lent_speedup=1.0), host_id="h")
LENDS = replace(worker("d0", "decode", lent_speedup=1.0), host_id="h")
"""Workers on one host that share their cores."""
THIRD = replace(worker("x0", "prefill", lent_speedup=1.0), host_id="h")
"""A third one there, so that the other two are no host pair; see `test_host_pairs.py`."""
FAST_BY_LENT_CORES = worker("d0", "decode", lent_speedup=1.9).load


def test_of_workers_that_share_cores_the_decode_worker_computes_where_no_prompt_waits(clock: Clock) -> None:
    """An idle prefill worker elsewhere would compute the prompt itself."""
    elsewhere, alone = replace(LENDS, host_id="i"), replace(worker("d0", "decode"), host_id="h")
    for decode, is_local in ((LENDS, True), (elsewhere, False), (alone, False)):
        assert bool(Bench(clock, LENT, decode, THIRD).pair_of(100).local_tokens) is is_local, decode
    assert not Bench(clock, LENT, LENDS, THIRD).pair_of(MIN_LENT_TOKENS - 1).local_tokens, (
        "too short for two cores"
    )


def test_what_it_could_not_have_in_time_alone_goes_to_the_prefill_worker(clock: Clock) -> None:
    """A later prompt may take that one's cores back."""
    bench = Bench(clock, LENT, replace(LENDS, load=FAST_BY_LENT_CORES), THIRD)
    bench.queue(LENDS, 700)
    assert bench.pair_of(100).local_tokens
    bench.queue(LENDS, 200)
    assert not bench.pair_of(100).local_tokens


def test_while_the_prefill_worker_has_a_prompt_all_long_ones_go_there(clock: Clock) -> None:
    """One elsewhere would end the rests in which cores are lent for it."""
    bench = Bench(clock, LENT, LENDS, THIRD)
    bench.queue(LENT, 100)
    assert not bench.pair_of(100).local_tokens
    bench.queue(LENT, 950)
    assert not bench.pair_of(100).local_tokens


def test_a_worker_that_shares_cores_and_has_many_streams_computes_no_prompts(clock: Clock) -> None:
    """It lends its cores to the prefill worker, whose prompts a prompt there would slow down."""
    few, many = (
        replace(worker("d0", "decode", lent_speedup=1.0, streams=n, step_fit=FULL_STEPS), host_id="h")
        for n in (2, 5)
    )
    assert Bench(clock, LENT, few, THIRD).pair_of(100).local_tokens
    assert not Bench(clock, LENT, many, THIRD).pair_of(100).local_tokens


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_no_neighbour_loses_lent_cores_to_a_prompt_elsewhere(clock: Clock, pool: PoolName) -> None:
    """Any worker on the host may compute on them."""
    third = replace(worker("x0", pool, lent_speedup=1.0), host_id="h")
    bench = Bench(clock, LENT, LENDS, third)
    assert bench.pair_of(100).local_tokens
    bench.queue(third, 300)
    assert not bench.pair_of(100).local_tokens
    elsewhere = Bench(clock, LENT, LENDS, replace(third, host_id="i"))
    elsewhere.queue(third, 300)
    assert elsewhere.pair_of(100).local_tokens


def test_what_other_coordinators_have_sent_counts(clock: Clock) -> None:
    full = replace(worker("d0", "decode", lent_speedup=1.0, waiting_tokens=850), host_id="h")
    assert not Bench(clock, LENT, full, THIRD).pair_of(100).local_tokens
    waits = replace(worker("p0", "prefill", lent_speedup=1.0, waiting_tokens=50), host_id="h")
    assert not Bench(clock, waits, LENDS, THIRD).pair_of(100).local_tokens


def test_neutral_workers_lend_as_before(clock: Clock) -> None:
    """The streams of one that leans to prefill may take its cores."""
    prefill, decode = (replace(each, neutral=True, output_open=True) for each in (LENT, LENDS))
    assert not Bench(clock, prefill, decode, THIRD).pair_of(100).local_tokens


def test_beside_a_stream_without_a_target_nobody_rests(clock: Clock) -> None:
    bench = Bench(clock, LENT, LENDS, THIRD)
    bench.loads.decode[LENDS.key].add_flight(
        Flight(prompt_tokens=10, uncached_tokens=10, expected_output=10, max_output=10)
    )
    assert not bench.pair_of(100).local_tokens


def test_what_the_prefill_worker_has_in_its_cache_is_not_computed_anew(clock: Clock) -> None:
    bench, hits = Bench(clock, replace(LENT, prefix_slot=0), LENDS), PrefixHits.of({0: 20})
    assert not bench.pair_of(400, cached=320, hits=hits).local_tokens
    assert bench.pair_of(400, cached=16, hits=PrefixHits.of({0: 1})).local_tokens


def test_lent_cores_make_a_prefill_worker_ready_sooner(clock: Clock) -> None:
    for speedup, is_local in ((0.0, True), (2.0, False)):
        lent = replace(worker("p0", "prefill", lent_speedup=speedup), host_id="h")
        bench = Bench(clock, lent, replace(D0, host_id="i"))
        bench.queue(lent, 400)
        assert bool(bench.pair(bench.request(100)).local_tokens) is is_local


def test_a_worker_that_could_fetch_the_prefix_is_ready_sooner(clock: Clock) -> None:
    """Than the one that has it, and a queue."""
    agents = frozenset({"agent-d0", "agent-p1", "agent-p0"})
    lane = registry_pb2.LaneReport(agent_id="agent-p1", gb_per_second=10.0)
    p0 = replace(P0, prefix_slot=0, lanes=(lane,), connected_agents=agents)
    p1 = replace(worker("p1", "prefill"), neutral=True, output_open=True, connected_agents=agents)
    bench = Bench(clock, p1, D0, p0)
    queued = bench.request(500)
    queued.routed(p0, D0, 0, clock.now_s)
    hits, offer = PrefixHits.of({0: 124}), PrefixOffer(p0, 1984, 0.005, 1.0)
    assert bench.pair(bench.request(2000), hits=hits).prefill.key == p0.key
    assert bench.pair(bench.request(2000), hits=hits, offer=offer).prefill.key == p1.key
    tired = replace(offer, resting=frozenset({p1.key}))
    assert bench.pair(bench.request(2000), hits=hits, offer=tired).prefill.key == p0.key


def test_what_is_urgent_elsewhere_counts_and_what_is_not_does_not(clock: Clock) -> None:
    bench = Bench(clock, P0, D0)
    bench.queue(P0, 900, targets=RequestTargets(30.0, None))  # due long after
    bench.queue(P0, 900, targets=None)
    bench.queue(P0, 900, caller=replace(ANYONE, priority_class="batch"))
    assert bench.pair(bench.request(250)).local_tokens == 0
    bench.queue(P0, 900, targets=None, caller=replace(ANYONE, priority_class="interactive"))
    assert bench.pair(bench.request(250)).local_tokens


def test_streams_that_join_before_the_prompt_is_due_leave_less(clock: Clock) -> None:
    decoding = worker("d0", "decode", running_requests=3, streams=3)
    decoding.load.step_fit.CopyFrom(STEP)
    bench = Bench(clock, P0, decoding)
    bench.queue(P0, 500)
    assert bench.pair(bench.request(100)).local_tokens
    for _ in range(8):  # a step of 20 + 3 + 9 ms and one more is above 0.72 * 0.9 * 50 ms
        bench.queue(P0, 10)
    assert bench.book.promised_before(decoding.key, clock.now_s + 1, 0, clock.now_s) == 9
    assert bench.pair(bench.request(100)).local_tokens == 0
    clock.now_s += 2.0  # all of those are late, and come after who can be in time
    assert bench.book.promised_before(decoding.key, clock.now_s + 1, 0, clock.now_s) == 0
    bench.queue(P0, 500)
    bench.queue(P0, 500)
    assert bench.pair(bench.request(100)).local_tokens


def test_the_strictest_target_on_a_worker_counts(clock: Clock) -> None:
    decoding = worker("d0", "decode", running_requests=3, streams=3)
    decoding.load.step_fit.CopyFrom(STEP)
    bench = Bench(clock, P0, decoding)
    bench.queue(P0, 500)
    lax = RequestTargets(1.0, 0.2)
    assert bench.pair(bench.request(100, lax)).local_tokens
    flight = Flight(
        prompt_tokens=16, uncached_tokens=16.0, expected_output=8.0, max_output=8, tpot_slo_s=0.025
    )
    bench.loads.decode[decoding.key].add_flight(flight)
    assert bench.pair(bench.request(100, lax)).local_tokens == 0
    bench.loads.decode[decoding.key].remove_flight(flight)
    assert bench.pair(bench.request(100, lax)).local_tokens


def test_a_decode_worker_whose_streams_leave_no_time_is_spared(clock: Clock) -> None:
    busy = worker("d0", "decode", running_requests=20)
    busy.load.step_fit.CopyFrom(STEP)
    bench = Bench(clock, P0, busy)
    bench.queue(P0, 500)
    assert bench.pair(bench.request(250)).local_tokens == 0
    # Without a target for tokens nothing is lost.
    events = bench.request(250, targets=RequestTargets(1.0, None))
    assert bench.pair(events).local_tokens


def test_streams_on_their_way_to_a_decode_worker_count_before_it_reports_them(clock: Clock) -> None:
    quiet = worker("d0", "decode", running_requests=1)
    quiet.load.step_fit.CopyFrom(STEP)
    bench = Bench(clock, P0, quiet)
    bench.queue(P0, 500)
    assert bench.pair(bench.request(250)).local_tokens
    for _ in range(20):
        flight = Flight(
            prompt_tokens=10, uncached_tokens=10, expected_output=10, max_output=10, computed=True
        )
        bench.loads.decode[quiet.key].add_flight(flight)
    assert bench.pair(bench.request(250)).local_tokens == 0


def test_an_engine_that_does_not_pace_prompts_gets_none_beside_streams_that_are_promised_their_time(
    clock: Clock,
) -> None:
    unpaced = replace(D0, paces_prompts=False)
    bench = Bench(clock, P0, unpaced)
    bench.queue(P0, 900)
    pair = bench.pair(bench.request(250))
    assert (pair.decode, pair.local_tokens) == (unpaced, 0)
    without_pace = bench.request(250, targets=RequestTargets(1.0, None))
    assert bench.pair(without_pace).local_tokens
    stream = Flight(prompt_tokens=10, uncached_tokens=10, expected_output=10, max_output=10, tpot_slo_s=0.05)
    bench.loads.decode[unpaced.key].add_flight(stream)
    assert bench.pair(without_pace).local_tokens == 0, "a stream there has a pace, if not this request"


def test_a_decode_worker_that_has_failed_the_request_computes_no_prompt_for_it(clock: Clock) -> None:
    bench = Bench(clock, P0, D0, D1)
    bench.queue(P0, 900)
    bench.queue(D0, 400)
    assert bench.pair(bench.request(200)).decode == D1
    assert bench.pair(bench.request(200), exclude=frozenset({D1.key})).decode == D0
    neither = bench.pair(bench.request(200), exclude=frozenset({D0.key, D1.key}))
    assert (neither.decode, neither.local_tokens) == (D0, 0)


def test_workers_without_room_or_excluded_ones_are_no_places(clock: Clock) -> None:
    full = worker("d1", "decode", free_blocks=3)
    bench = Bench(clock, P0, D0, full)
    bench.queue(P0, 400)
    bench.queue(D0, 400)
    assert bench.pair(bench.request(200)).decode == D0
    bench = Bench(clock, P0, D0, D1)
    bench.queue(P0, 400)
    bench.queue(D0, 400)
    assert bench.pair(bench.request(200), exclude=frozenset({D1.key})).decode == D0
    unreached = replace(P0, connected_agents=frozenset({"agent-d0"}))
    bench = Bench(clock, unreached, D0, D1)
    bench.queue(unreached, 400)
    bench.queue(D0, 400)
    assert bench.pair(bench.request(200)).decode == D0


def test_nothing_is_decided_without_target_or_fit(clock: Clock) -> None:
    bench = Bench(clock, P0, D0)
    assert bench.pair(bench.request(250, targets=None)).local_tokens is None
    assert bench.pair(bench.request(250, targets=RequestTargets(None, 0.05))).local_tokens is None
    bench = Bench(clock, worker("p0", "prefill", fit=False), D0)
    assert bench.pair(bench.request(250)).local_tokens is None
    unmeasured = worker("d0", "decode", fit=False)
    bench = Bench(clock, P0, unmeasured)
    bench.queue(P0, 400)
    assert bench.pair(bench.request(250)).local_tokens  # taken for as fast as the prefill worker


def test_time_that_has_passed_is_work_that_is_done(clock: Clock) -> None:
    bench = Bench(clock, P0, D0)
    first = bench.queue(P0, 400)
    bench.queue(P0, 200)

    def ahead_s() -> float:
        return bench.book.ahead_s(P0.key, clock.now_s + 1, 0, SECONDS, clock.now_s)

    assert ahead_s() == pytest.approx(0.6)
    clock.now_s += 0.3
    assert ahead_s() == pytest.approx(0.3)
    clock.now_s += 0.3  # the long one is overdue by now, and takes as long as it takes
    assert ahead_s() == pytest.approx(0.2)
    first.prefilled(prefill_pb2.FirstToken())
    assert ahead_s() == pytest.approx(0.2)
    clock.now_s += 0.1
    assert ahead_s() == pytest.approx(0.1)


@pytest.mark.parametrize("seed", range(20))
def test_the_book_is_empty_when_all_attempts_have_ended(clock: Clock, seed: int) -> None:
    """However they end, in whatever order."""
    chance = random.Random(seed)
    bench = Bench(clock, P0, D0)
    live: list[RequestEvents] = []
    for _ in range(200):
        clock.now_s += chance.random() / 10
        if len(live) < 5 or chance.random() < 0.3:
            live.append(bench.queue(chance.choice((P0, D0)), chance.randint(1, 500)))
            continue
        events = chance.choice(live)
        match chance.randrange(6):
            case 0:
                events.prefilling(clock.now_s)
            case 1:
                events.prefilling_locally()
            case 2:
                events.prefilled(prefill_pb2.FirstToken())
            case 3:
                events.prefilled_locally(decode_pb2.LocalPrefill())
            case _:
                if chance.random() < 0.5:
                    events.attempt_failed(UnavailableError("gone"))
                events.attempt_ended()
                live.remove(events)
        for key in (P0.key, D0.key):
            assert bench.book.ahead_s(key, clock.now_s + 9, 0, SECONDS, clock.now_s) >= 0
    for events in live:
        events.attempt_ended()
    assert len(bench.book) == 0
    assert not bench.book._pages
