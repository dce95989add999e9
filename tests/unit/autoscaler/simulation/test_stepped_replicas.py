"""Replicas computed step by step by the engine's own core: against the closed form, by hand, and with targets."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.plan import Memory, PoolPlan, ScalingPlan
from autoscaler.simulation.cluster.cluster import Cluster
from autoscaler.simulation.cluster.replica import EventQueue, SimulatedRequest
from autoscaler.simulation.cluster_settings import ClusterSettings
from autoscaler.simulation.evaluation.baselines import static_replicas
from autoscaler.simulation.outcome import Outcome, Slo
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.simulator import Simulation
from autoscaler.simulation.traces.trace import BLOCK_TOKENS, Trace, TraceRequest
from autoscaler.sizing.engine_model import EngineModel, preset
from autoscaler.snapshot import Snapshot
from engine.pacing.token_clock import ServiceTargets
from splitserve.errors import InvalidArgumentError

PLAIN = EngineModel(
    prefill_token_s=1e-3,
    step_s=0.0,
    sequence_s=0.0,
    max_step_tokens=100_000,
    handoff_s=0.0,
    link_gb_per_s=1e9,
)
CPU = replace(
    PLAIN, step_s=12.5e-3, sequence_s=1e-3, prefill_step_s=4e-3, max_step_tokens=512, separate_steps=True
)
LOOSE = Slo(1e6, 1e6)
"""Targets that nothing misses: the engine has no reason to hold anything back."""


def run(
    trace: Trace,
    engine: EngineModel,
    prefill: int = 1,
    decode: int = 1,
    steps: bool = True,
    **changed: object,
) -> Outcome:
    counts = {"prefill": prefill, "decode": decode}
    scenario = replace(Scenario(trace, engine, slo=LOOSE, initial=counts, steps=steps), **changed)  # type: ignore[arg-type]
    return Simulation(scenario, static_replicas(counts)).run()  # type: ignore[arg-type]


def trace_of(*requests: tuple[float, int, int]) -> Trace:
    return Trace("t", [TraceRequest(*request) for request in requests])


def poisson(rate: float, count: int, seed: int, most_prompt: int = 600, most_output: int = 40) -> Trace:
    chance = random.Random(seed)
    at, requests = 0.0, []
    for _ in range(count):
        at += chance.expovariate(rate)
        requests.append((at, chance.randint(10, most_prompt), chance.randint(2, most_output)))
    return trace_of(*requests)


def test_prompts_and_steps_by_hand() -> None:
    """Two prompts of 1 s; then 0.1 s a step and sequence."""
    engine = replace(PLAIN, sequence_s=0.1)
    first, second = run(trace_of((0, 1000, 3), (0.5, 1000, 2)), engine).requests
    assert (first.ttft_s, second.ttft_s) == pytest.approx((1.0, 1.5))
    assert first.finished_s == pytest.approx(1.2)
    assert second.finished_s == pytest.approx(2.1)


def test_the_lane_carries_one_prompt_after_the_other() -> None:
    engine = replace(PLAIN, prefill_token_s=0.0, link_gb_per_s=1.0, kv_bytes_per_token=10**6)
    outcome = run(trace_of((0, 1000, 2), (0, 1000, 2)), engine)
    assert [request.joined_s for request in outcome.requests] == pytest.approx([1.0, 2.0])


def test_a_mixed_step_reads_the_weights_once() -> None:
    """It takes what the chunk does and each sequence adds, and no less than the decodes alone."""
    engine = replace(CPU, separate_steps=False)
    contexts = [100] * 6
    assert engine.step_of([(0, 104)], contexts) == pytest.approx(4e-3 + 0.104 + 6e-3)
    assert engine.step_of([(0, 2)], contexts) == engine.step_of([], contexts) == pytest.approx(18.5e-3)
    assert engine.step_of([(0, 104)], []) == pytest.approx(0.108)


def test_prompts_beside_streams_have_steps_of_their_own_only_where_that_is_said() -> None:
    """On one replica: an answer of 200 tokens is under way when ten prompts come."""
    trace = trace_of((0, 50, 200), *((1.0 + 0.2 * number, 64, 2) for number in range(10)))
    slo = Slo(10.0, 0.06)
    ends = {}
    for separate in (False, True):
        engine = replace(CPU, separate_steps=separate)
        first, *others = run(trace, engine, colocated=True, prefix_cache="off", slo=slo).requests
        assert all(each.ttft_s is not None and each.ttft_s < 10.0 for each in others)
        assert first.finished_s is not None
        ends[separate] = first.finished_s
    assert ends[False] < ends[True]


@pytest.mark.parametrize("colocated", [False, True])
def test_it_agrees_with_the_closed_form(colocated: bool) -> None:
    """Where nothing is paced both say the same, but that one can enter the closed form's steps in their middle."""
    trace = poisson(1.0, 200, seed=1, most_prompt=400)
    changed = {"colocated": colocated, "prefix_cache": "off"}
    engine = replace(CPU, separate_steps=False)
    exact, closed = (run(trace, engine, steps=steps, slo=LOOSE, **changed) for steps in (True, False))
    for phase in ("ttft", "tpot"):
        for percentile in ("p50", "p95"):
            assert exact.phases()[phase][percentile] == pytest.approx(
                closed.phases()[phase][percentile], rel=0.15
            ), (phase, percentile)


def test_prefixes_count_at_the_engine_and_at_the_router() -> None:
    """The second turn finds the first one's blocks, on the replica that has them."""
    blocks = (7, 8, 2**60)
    turns = [
        TraceRequest(0.0, 3 * BLOCK_TOKENS, 2, blocks),
        TraceRequest(100.0, 3 * BLOCK_TOKENS + 100, 2, blocks),
        TraceRequest(200.0, 3 * BLOCK_TOKENS, 2, (8, 7, 9)),
    ]
    requests = run(Trace("t", turns), PLAIN, prefill=3).requests
    assert [request.cached for request in requests] == [0, 3 * BLOCK_TOKENS, 0]
    assert requests[1].ttft_s == pytest.approx(0.1)
    assert [r.cached for r in run(Trace("t", turns), PLAIN, prefix_cache="off").requests] == [0, 0, 0]


def test_streams_keep_their_target_beside_prompts() -> None:
    """Colocated: in the closed form a long prompt makes streams late, the engine's token clock does not."""
    slo = Slo(ttft_s=10.0, tpot_s=0.05)
    trace = trace_of(*((0.1 * n, 40, 40) for n in range(4)), (0.6, 2000, 2))
    exact, closed = (run(trace, CPU, steps=steps, slo=slo, colocated=True) for steps in (True, False))
    assert exact.attainment_tpot == 1
    assert closed.attainment_tpot < 0.5


def test_triage_serves_those_who_can_be_in_time() -> None:
    """Overloaded: in order of arrival all are late soon; by triage most short prompts are not."""
    trace = poisson(2.5, 150, seed=3, most_prompt=800, most_output=4)
    slo = Slo(ttft_s=1.0, tpot_s=1.0)
    exact, closed = (run(trace, CPU, steps=steps, slo=slo).attainment for steps in (True, False))
    assert exact > closed + 0.3


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1.0, 3.0])
def test_the_pair_policy_uses_what_a_fixed_split_leaves_idle(rate: float) -> None:
    """Half of the prompts are long: prefill is the narrow pool. No stream pays for it."""
    slo, engine = Slo(1.0, 0.05), replace(CPU, prefill_token_s=1.21e-3)
    attained: dict[bool, list[float]] = {True: [], False: []}
    for seed in (1, 2, 3):
        trace = mixed_lengths(rate, 150, 0.5, seed)
        hybrid, fixed = (run(trace, engine, slo=slo, hybrid=each) for each in (True, False))
        attained[True].append(hybrid.attainment)
        attained[False].append(fixed.attainment)
        assert hybrid.attainment_tpot >= 0.99
    assert fmean(attained[True]) > fmean(attained[False]) + 0.02


@pytest.mark.parametrize("rate", [8.0, 12.0])
def test_nothing_is_lost_where_small_chunks_are_dear(rate: float) -> None:
    """The pools attain nearly all as they are. A chunk has a price of 50 tokens, and streams leave room for few."""
    engine = replace(CPU, step_s=10e-3, sequence_s=0.5e-3, prefill_step_s=10e-3, prefill_token_s=0.2e-3)
    attained: dict[bool, list[float]] = {True: [], False: []}
    for seed in (1, 2, 3):
        trace = mixed_lengths(rate, 150, 0.5, seed)
        for hybrid in (True, False):
            attained[hybrid].append(run(trace, engine, slo=Slo(1.0, 0.03), hybrid=hybrid).attainment)
    assert fmean(attained[True]) > fmean(attained[False]) - 0.005


@pytest.mark.slow
def test_neutral_replicas_decode_where_there_is_room() -> None:
    """Streams are too many for the replica that leans to them."""
    slo = Slo(1.0, 0.03)
    attained: dict[bool, list[float]] = {True: [], False: []}
    for seed in (1, 2, 3):
        chance = random.Random(seed)
        at, requests = 0.0, []
        for _ in range(150):
            at += chance.expovariate(4.0)
            requests.append((at, chance.randint(32, 128), chance.randint(96, 192)))
        for neutral in (True, False):
            outcome = run(trace_of(*requests), CPU, slo=slo, hybrid=True, neutral=neutral)
            attained[neutral].append(outcome.attainment)
    assert fmean(attained[True]) > fmean(attained[False]) + 0.1


def leanings_of(requests: list[tuple[float, int, int]], prefill: int, decode: int) -> list[tuple[float, int]]:
    """Times, and how many of so many neutral replicas lean to prefill then. All requests end."""
    events, done, found = EventQueue(), [], []
    settings = ClusterSettings(
        CPU, 0.0, steps=True, targets=ServiceTargets(0.05, 1.0), hybrid=True, neutral=True
    )
    cluster = Cluster(settings, events, lambda *_: None, lambda request, _: done.append(request))
    cluster.order("prefill", prefill, 0.0, cold_start_s=0)
    cluster.order("decode", decode, 0.0, cold_start_s=0)
    for asked in requests:
        request = SimulatedRequest(TraceRequest(*asked))
        events.at(request.arrival_s, lambda now, request=request: cluster.arrive(request, now))  # type: ignore[misc]
    while events.next_s < float("inf"):
        when, event = events.pop()
        event(when)
        found.append((when, sum(w.pool == "prefill" for w in cluster._routed.registry.snapshot.workers)))
    assert len(done) == len(requests)
    assert not any(request.failed for request in done)
    return found


@pytest.mark.parametrize("counts", [(2, 0), (0, 2)])
def test_neutral_replicas_that_all_lean_to_one_side_serve_and_divide_themselves(
    counts: tuple[int, int],
) -> None:
    found = leanings_of([(0.5 * n, 100, 20) for n in range(20)], *counts)
    assert found[-1][1] == 1


def test_neutral_replicas_follow_a_load_that_shifts() -> None:
    """40 s of long prompts, then 40 s of long answers; a replica goes back after 30 s at the earliest."""
    prompts = [(0.2 * n, 600, 4) for n in range(200)]
    tokens = [(40 + 0.1 * n, 40, 150) for n in range(400)]
    found = leanings_of([*prompts, *tokens], 2, 2)
    assert {count for when, count in found if 20 < when < 40} == {3}
    assert {count for when, count in found if 75 < when < 80} == {1}


def mixed_lengths(rate: float, count: int, long_share: float, seed: int) -> Trace:
    chance = random.Random(seed)
    at, requests = 0.0, []
    for _ in range(count):
        at += chance.expovariate(rate)
        tokens = chance.randint(400, 768) if chance.random() < long_share else chance.randint(32, 160)
        requests.append((at, tokens, chance.randint(24, 64)))
    return trace_of(*requests)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000))
def test_every_request_ends_and_nothing_is_left(seed: int) -> None:
    events = EventQueue()
    ended: list[SimulatedRequest] = []
    engine = replace(
        preset("h100-8b"), kv_capacity_tokens=6_000, context_tokens=6_000, max_running_requests=4
    )
    engine = replace(engine, separate_steps=bool(seed % 2))
    cluster = Cluster(
        ClusterSettings(
            engine,
            5.0,
            steps=True,
            targets=ServiceTargets(0.02, 0.5),
            hybrid=seed % 3 > 0,
            neutral=seed % 3 == 2,
        ),
        events,
        lambda *_: None,
        lambda request, _: ended.append(request),
    )
    cluster.order("prefill", 2, 0.0, cold_start_s=0)
    cluster.order("decode", 2, 0.0, cold_start_s=0)
    chance = random.Random(seed)
    requests = [
        SimulatedRequest(TraceRequest(n * 0.05, chance.randint(1, 5000), chance.randint(1, 60)))
        for n in range(40)
    ]
    for request in requests:
        cluster.lending = chance.random() < 0.5
        events.at(request.arrival_s, lambda now, request=request: cluster.arrive(request, now))  # type: ignore[misc]
    while events.next_s < float("inf"):
        when, event = events.pop()
        event(when)
    assert sorted(map(id, ended)) == sorted(map(id, requests))
    for request in requests:
        assert request.first_token_s is not None
        assert request.finished_s is not None
        assert request.arrival_s <= request.first_token_s <= request.finished_s
    for decode in cluster.decode:
        assert (decode.load, decode.running, decode.local_tokens, decode.context_tokens) == (0, 0, 0, 0)
    assert len(cluster._routed._book) == 0
    for prefill in cluster.prefill:
        assert (prefill.load, prefill.queued_tokens) == (0, 0)


class Restless:
    """Scales at random, so that replicas keep starting, draining and ending."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def decide(self, memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        counts = [PoolPlan(self._chance.randint(1, 4), self._chance.randint(0, 1)) for _ in range(2)]
        return ScalingPlan(counts[0], counts[1], lend_decode_to_prefill=self._chance.random() < 0.5), memory


def test_a_policy_scales_stepped_replicas_and_the_same_run_twice_is_the_same() -> None:
    trace = poisson(3.0, 200, seed=2)
    scenario = Scenario(trace, preset("h100-8b"), cold_start_s=10, steps=True)
    first, second = (Simulation(scenario, Restless(7).decide, interval_s=5).run().to_json() for _ in range(2))
    assert first["failed_requests"] == 0
    first.pop("cpu_ms_per_request")
    second.pop("cpu_ms_per_request")
    assert first == second


def test_what_the_engine_would_refuse_is_refused_at_the_start() -> None:
    with pytest.raises(InvalidArgumentError, match="a cache of its own") as caught:
        Scenario(trace_of((0, 10, 2)), PLAIN, steps=True, prefix_cache="pool")
    assert caught.value.field == "prefix_cache"
    small = replace(PLAIN, kv_capacity_tokens=100)
    with pytest.raises(InvalidArgumentError, match=r"request 1 has 90 \+ 20 tokens; a replica holds 100"):
        Scenario(trace_of((0, 10, 2), (1, 90, 20)), small, steps=True)
