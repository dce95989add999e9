"""The simulated cluster: conservation, determinism, and cases that can be computed by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.plan import Decide, Memory, PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import parse_policy
from autoscaler.simulation.cluster.cluster import Cluster
from autoscaler.simulation.cluster.replica import EventQueue, SimulatedRequest
from autoscaler.simulation.engine_model import PRESETS, EngineModel, preset
from autoscaler.simulation.outcome import Outcome
from autoscaler.simulation.scenario import Scenario, Slo, StartTimes
from autoscaler.simulation.simulator import Simulation, run_policy, static_replicas
from autoscaler.simulation.traces.synthetic import TraceShape, synthetic
from autoscaler.simulation.traces.trace import Trace, TraceRequest
from autoscaler.snapshot import ReplicaState, Snapshot
from splitserve.config.coordinator import LocalPrefill
from splitserve.config.engine import EngineConfig
from splitserve.errors import InvalidArgumentError
from splitserve.roles import PoolName
from tests.support.scaling.engine_models import changed, engine_model

PLAIN = engine_model(
    prefill_token_s=1e-3,
    step_s=0.0,
    sequence_s=0.0,
    max_step_tokens=100_000,
    handoff_s=0.0,
    link_gb_per_s=1e9,
)


def run(trace: Trace, engine: EngineModel, prefill: int = 1, decode: int = 1, **changed: object) -> Outcome:
    counts = {"prefill": prefill, "decode": decode}
    scenario = Scenario(trace, engine, initial=counts, local_prefill="never")  # type: ignore[arg-type]
    scenario = replace(scenario, **changed)  # type: ignore[arg-type]
    return Simulation(scenario, static_replicas(counts)).run()  # type: ignore[arg-type]


def trace_of(*requests: tuple[float, int, int]) -> Trace:
    return Trace("t", [TraceRequest(*request) for request in requests])


def test_prompts_queue_in_order() -> None:
    outcome = run(trace_of((0, 1000, 1), (0.5, 1000, 1), (5, 2000, 1)), PLAIN)
    assert [request.ttft_s for request in outcome.requests] == pytest.approx([1.0, 1.5, 2.0])
    assert outcome.phases()["prefill_queue"]["p99"] == pytest.approx(0.5, rel=0.1)


def test_a_prompt_costs_the_same_however_it_is_cut() -> None:
    whole = changed(PLAIN, prefill_pair_s=2e-6)
    cut = replace(whole, max_step_tokens=64)
    times = [run(trace_of((0, 3000, 1)), engine).requests[0].ttft_s for engine in (whole, cut)]
    assert times == pytest.approx([3.0 + 9.0, 12.0])


def test_a_short_prompt_gets_through_beside_a_long_one() -> None:
    engine = changed(PLAIN, max_step_tokens=1000)
    outcome = run(trace_of((0, 100_000, 1), (0.5, 100, 1)), engine)
    assert outcome.requests[1].ttft_s == pytest.approx(0.5 + 1.0)


def test_decode_steps_by_hand() -> None:
    """A batch that grows and shrinks: 10 steps of 0.1 s alone, then 0.1 + 0.1 a step for both."""
    engine = changed(PLAIN, prefill_token_s=0.0, sequence_s=0.1)
    outcome = run(trace_of((0, 100, 21), (1.0, 100, 11)), engine)
    first, second = outcome.requests
    assert second.finished_s == pytest.approx(1.0 + 10 * 0.2)
    assert first.finished_s == pytest.approx(1.0 + 10 * 0.2)
    assert (first.tpot_s, second.tpot_s) == pytest.approx((3.0 / 20, 0.2))


def test_context_slows_decode_down() -> None:
    """k steps over a context that grows by one each: k c C + c k (k - 1) / 2."""
    engine = changed(PLAIN, prefill_token_s=0.0, context_token_s=1e-3)
    request = run(trace_of((0, 100, 51)), engine).requests[0]
    assert request.finished_s == pytest.approx(sum(1e-3 * (101 + k) for k in range(50)))


def test_a_colocated_replica_decodes_beside_a_prompt() -> None:
    """Steps of 0.1 s and 1 ms a prompt token. The second prompt comes in the middle of the batch's fourth step."""
    engine = changed(PLAIN, step_s=0.1)
    outcome = run(trace_of((0, 100, 21), (0.5, 1000, 11)), engine, local_prefill="always")
    first, second = outcome.requests
    assert first.first_token_s == pytest.approx(0.2)
    # Its step has the prompt's 1000 tokens, and one token of the first sequence.
    assert second.first_token_s == pytest.approx(0.5 + 0.1 + 1.0)
    assert second.finished_s == pytest.approx(1.6 + 10 * 0.1)
    assert first.finished_s == pytest.approx(1.6 + (20 - 3 - 1) * 0.1)
    assert outcome.replica_hours["decode"] > 0


def test_a_colocated_replica_cuts_prompts_into_steps() -> None:
    """3,000 tokens in steps of 1,000, the second half of each step for what comes behind."""
    engine = changed(PLAIN, step_s=0.1, max_step_tokens=1000)
    alone = run(trace_of((0, 3000, 2)), engine, local_prefill="always").requests[0]
    assert alone.first_token_s == pytest.approx(3 * 0.1 + 3.0)
    both = run(trace_of((0, 100_000, 2), (0.5, 100, 2)), engine, local_prefill="always").requests
    assert both[1].ttft_s == pytest.approx((1.1 - 0.5) + 1.1)


def colocated(trace: Trace, engine: EngineModel, workers: int = 1) -> Outcome:
    none: dict[PoolName, int] = {"prefill": 0, "decode": 0}
    scenario = Scenario(trace, engine, initial=none, both=workers)
    return Simulation(scenario, static_replicas(none)).run()


def test_a_replica_of_both_roles_computes_prompts_and_decodes_on_one_engine() -> None:
    """As where decode replicas compute all prompts, but without a prefill replica that idles beside it."""
    engine = changed(PLAIN, step_s=0.1)
    outcome = colocated(trace_of((0, 100, 21), (0.5, 1000, 11)), engine)
    first, second = outcome.requests
    assert second.first_token_s == pytest.approx(0.5 + 0.1 + 1.0)
    assert first.finished_s == pytest.approx(1.6 + (20 - 3 - 1) * 0.1)
    assert outcome.replica_hours["both"] == outcome.total_replica_hours > 0
    assert not outcome.actions


def test_short_prompts_are_computed_on_decode_where_that_is_sooner() -> None:
    """Prefill is busy with a long prompt, as the coordinator knows; a short one does not wait for it."""
    engine = changed(PLAIN, step_s=1e-3, max_step_tokens=1000)
    warm, long = (0.0, 200, 5), (2.0, 100_000, 5)
    never, auto = (
        run(trace_of(warm, long, (3.0, 100, 5), (3.0, 500, 5)), engine, local_prefill=mode)
        for mode in ("never", "auto")
    )
    assert (auto.requests[2].ttft_s or 9.0) < 0.2 < (never.requests[2].ttft_s or 0.0)
    # A longer one would hold streams up for too long: it is handed off.
    assert (auto.requests[3].ttft_s or 0.0) > 0.9


@pytest.mark.parametrize(("mode", "settled"), [("always", 1), ("auto", 3), ("never", 3)])
def test_the_prefill_pool_is_as_large_as_what_decode_replicas_leave_to_it(
    mode: LocalPrefill, settled: int
) -> None:
    """And stays so: what decode replicas take over because prompts wait, half of all with `auto`, is demand, too."""
    engine = changed(PLAIN, step_s=1e-3, sequence_s=1e-5, max_step_tokens=1000)
    trace = trace_of(*((at / 10, 200, 5) for at in range(1, 4000)))
    pool = {"target_ms": 2000, "cold_start_s": 5, "slo": {"settle_s": 60, "history_s": 120}}
    policy = parse_policy({"prefill": pool, "decode": {**pool, "min_replicas": 4}})
    counts: dict[PoolName, int] = {"prefill": 4, "decode": 4}
    scenario = Scenario(trace, engine, Slo(2.0, 2.0), StartTimes(5.0), initial=counts, local_prefill=mode)
    outcome = run_policy(scenario, policy)
    assert outcome.attainment == 1.0
    assert {moment.desired["prefill"] for moment in outcome.moments if moment.at_s > 150} == {settled}


def test_a_moved_replica_serves_its_new_pool_at_once() -> None:
    """Nobody asks for answers, and prompts queue: a decode replica takes the other role, which costs no cold start."""

    def decide(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        turned = snapshot.now_s >= 20
        return ScalingPlan(PoolPlan(1 + turned), PoolPlan(2 - turned), one_shape=True), memory

    trace = trace_of(*((at / 10, 100, 3) for at in range(600)))
    scenario = Scenario(
        trace, PLAIN, initial={"prefill": 1, "decode": 2}, changes_role=True, local_prefill="never"
    )
    outcome = Simulation(scenario, decide, interval_s=10).run()
    assert outcome.actions == {"change_role": 1}
    assert outcome.failed_requests == 0
    assert outcome.replica_hours["prefill"] * 3600 == pytest.approx(60 + 40)
    assert outcome.replica_hours["decode"] * 3600 == pytest.approx(60 + 20)
    later = [request.ttft_s or 9.0 for request in outcome.requests if request.arrival_s > 30]
    assert max(later) < 0.3


def test_a_full_decode_pool_holds_prefill_back() -> None:
    engine = changed(PLAIN, sequence_s=0.1, kv_capacity_tokens=150)
    outcome = run(trace_of((0, 100, 11), (0, 100, 11)), engine)
    first, second = outcome.requests
    assert second.reserved_s == pytest.approx(first.finished_s)
    assert second.started_s == pytest.approx(first.finished_s)


def test_the_last_sequence_gives_way_when_the_pool_is_full() -> None:
    """Two sequences of 100 tokens in 240: after 19 more each the second is preempted, and waits for the first."""
    engine = changed(PLAIN, prefill_token_s=1e-3, sequence_s=0.0, step_s=0.1, kv_capacity_tokens=240)
    outcome = run(trace_of((0, 100, 61), (0, 100, 61)), engine)
    first, second = outcome.requests
    assert first.finished_s is not None
    assert second.finished_s is not None
    assert first.finished_s < second.finished_s
    assert second.decoded == pytest.approx(19, abs=1)
    assert (first.computed, second.computed) == (first.kv_tokens, second.kv_tokens)
    # It is computed again when the first one has ended, and then decodes what is left.
    expected = first.finished_s + 0.1 + (100 + second.decoded) * 1e-3 + (60 - second.decoded) * 0.1
    assert second.finished_s == pytest.approx(expected, abs=0.01)


def test_the_lane_carries_one_prompt_after_the_other() -> None:
    engine = changed(PLAIN, prefill_token_s=0.0, link_gb_per_s=1.0, kv_bytes_per_token=10**6)
    outcome = run(trace_of((0, 1000, 2), (0, 1000, 2)), engine)
    assert [request.joined_s for request in outcome.requests] == pytest.approx([1.0, 2.0])
    assert [request.first_token_s for request in outcome.requests] == [0, 0]


def test_waiting_agrees_with_md1() -> None:
    """Poisson arrivals, equal prompts, one server: mean wait = rho / (2 (1 - rho)) services (Pollaczek-Khinchine)."""
    chance = random.Random(5)
    at, requests = 0.0, []
    for _ in range(8_000):
        at += chance.expovariate(0.7)
        requests.append((at, 1000, 1))
    # One prompt a step, as in M/D/1: a step takes 1 s whatever waits.
    outcome = run(trace_of(*requests), changed(PLAIN, max_step_tokens=1000))
    waits = [
        request.started_s - request.arrival_s for request in outcome.requests if request.started_s is not None
    ]
    assert sum(waits) / len(waits) == pytest.approx(0.7 / (2 * 0.3), rel=0.1)


class Restless:
    """Scales at random, so that replicas keep starting, draining and ending."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def decide(self, memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        counts = [PoolPlan(self._chance.randint(1, 4), self._chance.randint(0, 1)) for _ in range(2)]
        return ScalingPlan(counts[0], counts[1]), memory


def restless(seed: int) -> Decide:
    return Restless(seed).decide


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_every_request_ends_exactly_once(seed: int) -> None:
    trace = synthetic(
        TraceShape("burst", rate=1, peak_rate=8, duration_s=200, burst_s=50, output_tokens=40, seed=seed)
    )
    engine = replace(preset("h100-8b"), kv_capacity_tokens=8_000, max_running_requests=6)
    scenario = Scenario(trace, engine, starts=StartTimes(20), initial={"prefill": 1, "decode": 1})
    outcome = Simulation(scenario, restless(seed), interval_s=5).run()
    assert len(outcome.requests) == len(trace.requests)
    for request in outcome.requests:
        assert request.failed or (request.finished_s is not None and request.computed == request.kv_tokens)
        stamps = (
            request.arrival_s,
            request.reserved_s,
            request.started_s,
            request.first_token_s,
            request.finished_s,
        )
        known = [stamp for stamp in stamps if stamp is not None]
        assert known == sorted(known)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000))
def test_nothing_stays_reserved(seed: int) -> None:
    events = EventQueue()
    ended: list[SimulatedRequest] = []
    engine = replace(preset("h100-8b"), kv_capacity_tokens=6_000, max_running_requests=4)
    cluster = Cluster(
        Scenario(trace_of(), engine, starts=StartTimes(5.0)),
        events,
        lambda *_: None,
        lambda request, _: ended.append(request),
    )
    cluster.order("prefill", 2, 0.0, cold_start_s=0)
    cluster.order("decode", 2, 0.0, cold_start_s=0)
    chance = random.Random(seed)
    requests = [
        SimulatedRequest.of(TraceRequest(n * 0.05, chance.randint(1, 5000), chance.randint(1, 60)))
        for n in range(60)
    ]
    for request in requests:
        events.at(request.arrival_s, lambda now, request=request: cluster.arrive(request, now))  # type: ignore[misc]
    events.run_until(math.inf)
    assert sorted(map(id, ended)) == sorted(map(id, requests))
    for decode in cluster.pool("decode"):
        assert (decode.held, decode.reserved_tokens, decode.prompts.tokens) == (0, 0, 0)
        assert (decode.running, decode.waiting_reservations, decode.assigned) == (0, 0, 0)
        assert decode.context_tokens == pytest.approx(0, abs=1e-6)
    assert all(r.prompts.tokens == r.assigned == r.load == 0 for r in cluster.pool("prefill"))


def test_the_same_run_twice_is_the_same() -> None:
    trace = synthetic(TraceShape("diurnal", rate=1, peak_rate=4, duration_s=300, seed=2))
    scenario = Scenario(trace, preset("h100-8b"), starts=StartTimes(30))
    first, second = (Simulation(scenario, restless(7), interval_s=5).run().to_json() for _ in range(2))
    first.pop("cpu_ms_per_request")
    second.pop("cpu_ms_per_request")
    assert first == second


def test_a_pool_without_replicas_fails_requests_after_a_while() -> None:
    outcome = run(trace_of((0, 10, 2), (9, 10, 2)), PLAIN, prefill=0)
    # The bounds start one at the first decision; it is ready a minute later.
    assert outcome.failed_requests == 2
    assert outcome.attainment == 0
    assert outcome.phases()["ttft"] == {}


class OneMoreThenOneLess:
    """Two prefill replicas from 10 s, one again from 200 s."""

    def decide(self, memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        return ScalingPlan(PoolPlan(2 if 10 <= snapshot.now_s < 200 else 1), PoolPlan(1)), memory


def test_replica_hours_count_from_the_order_to_the_end() -> None:
    trace = trace_of(*((float(at), 100, 2) for at in range(0, 301, 2)))
    scenario = Scenario(trace, PLAIN, starts=StartTimes(50), initial={"prefill": 1, "decode": 1})
    outcome = Simulation(scenario, OneMoreThenOneLess().decide, interval_s=10).run()
    assert outcome.duration_s == 300
    assert outcome.replica_hours["decode"] * 3600 == pytest.approx(300)
    assert outcome.replica_hours["prefill"] * 3600 == pytest.approx(300 + 190, abs=1)
    assert outcome.actions == {"start": 1, "drain": 1}
    assert outcome.failed_requests == 0
    ready = [m.at_s for m in outcome.moments if m.replicas["prefill"]["ready"] == 2]
    assert (ready[0], ready[-1]) == (60, 200)


def test_standby_is_loaded_and_joins_at_once() -> None:
    def decide(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        return ScalingPlan(PoolPlan(1 if snapshot.now_s < 150 else 2, standby=1), PoolPlan(1)), memory

    trace = trace_of(*((float(at), 100, 2) for at in range(0, 301, 2)))
    scenario = Scenario(trace, PLAIN, starts=StartTimes(50), initial={"prefill": 1, "decode": 1})
    outcome = Simulation(scenario, decide, interval_s=10).run()
    at_100, at_160 = (next(m for m in outcome.moments if m.at_s == at) for at in (100, 160))
    there = {state: count for state, count in at_100.replicas["prefill"].items() if count}
    assert there == {"standby": 1, "ready": 1}
    assert at_160.replicas["prefill"]["ready"] == 2


def test_a_draining_replica_ends_what_it_has_and_gets_nothing_new() -> None:
    events = EventQueue()
    cluster = Cluster(
        Scenario(trace_of(), PLAIN, starts=StartTimes(5.0)), events, lambda *_: None, lambda *_: None
    )
    cluster.order("prefill", 2, 0.0, cold_start_s=0)
    cluster.order("decode", 1, 0.0, cold_start_s=0)
    requests = [SimulatedRequest.of(TraceRequest(0.0, 1000, 2)) for _ in range(2)]
    for request in requests:
        cluster.arrive(request, 0.0)
    from autoscaler.reconcile import Drain

    leaving = requests[0].prefill
    assert leaving is not None
    cluster.act(Drain("prefill", (leaving.name,)), 0.1)
    late = SimulatedRequest.of(TraceRequest(0.2, 1000, 2))
    cluster.arrive(late, 0.2)
    assert late.prefill is not leaving
    assert leaving.state is ReplicaState.DRAINING
    events.run_until(math.inf)
    assert leaving.ended_s == pytest.approx(1.0)
    assert requests[0].finished_s is not None


def test_presets() -> None:
    simulated = preset("simulated")
    config = EngineConfig(kind="simulated")
    assert simulated.prefill.token_s == config.simulated_prefill_token_s
    assert simulated.decode.base_s == config.simulated_step_s
    assert simulated == EngineModel.of(config)
    assert all(engine.prompt_s(1000) < 1 for engine in PRESETS.values())
    with pytest.raises(InvalidArgumentError, match="h100-8b"):
        preset("abacus")


def test_cost_of_a_request() -> None:
    """64 replicas and 8,000 requests cost well below a millisecond of CPU each."""
    trace = synthetic(TraceShape("constant", rate=400, peak_rate=400, duration_s=20, prompt_tokens=1500))
    outcome = run(trace, preset("h100-8b"), prefill=40, decode=24, slo=Slo(2, 0.1))
    assert len(outcome.requests) > 7_600
    assert outcome.attainment > 0.95
    assert outcome.to_json()["cpu_ms_per_request"] < 1.0
