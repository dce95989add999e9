"""The clairvoyant bound: fewest replica-hours found that meet the SLO in this simulator, with all arrivals known.

What a pool needs over time follows from the known arrivals: W(t), the replicas that they keep fully busy. Prefill:
seconds of compute that arrive a second, over a sliding window as long as the TTFT target, since a prompt may be
computed any time within its target. Decode: sequences, each with its share of a replica for as long as it runs, where
replicas are as full as the TPOT target, their KV pool and their batch allow (`scaling.decode_claim`). A schedule is

    n(t) = ceil(min(W(t) + b sqrt(W(t)), c max W)),   at least 1,

with b and c constants of the pool: b is the head-room for randomness (square-root staffing; negative where requests
may be given up), c gives up the tops of bursts. Replicas are ordered one cold start before they are needed and paid for
from then on, as for every policy; so one is kept through any trough shorter than a cold start, which is cheaper than
starting another: desired(t) = max of n over [t, t + cold start]. Drains and decisions are those of all policies.

The search runs the simulator itself: for each c the least b with which enough requests meet their targets, then the
cheapest of these. Its schedule is then a decider like any other (`scheduled`), so its attainment is observed, not
computed. A cheaper schedule of another form may exist: this is no proof of optimality. But the bound is achievable,
in the same simulator under the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoscaler.plan import Decide, Memory, PoolPlan, ScalingPlan
from autoscaler.simulation.outcome import Outcome
from autoscaler.simulation.scenario import Scenario, StartTimes
from autoscaler.simulation.simulator import Simulation
from autoscaler.simulation.traces.scaling import decode_claim
from autoscaler.snapshot import Snapshot
from splitserve.roles import PoolName

GRID_S = 5.0
"""Time grid of schedules, seconds."""
CAPS = (1.0, 0.8, 0.65, 0.5)
MOST_HEADROOM = 4.0
LEAST_HEADROOM = -3.0
HEADROOM_STEP = 0.1
_PREFILL_MISSES = 0.95
"""Share of the permitted misses that prefill may use up; decode gets the rest."""

Needs = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bound:
    """The cheapest schedule found, and its run."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    """Desired replicas for each `GRID_S`."""
    outcome: Outcome

    @property
    def replica_hours(self) -> float:
        """Replica-hours of both pools."""
        return self.outcome.total_replica_hours


def needs(scenario: Scenario) -> dict[PoolName, Needs]:
    """W(t) of both pools on a grid of `GRID_S`."""
    bins = int(scenario.trace.duration_s // GRID_S) + 1
    engine, slo = scenario.engine, scenario.slo
    prefill = np.zeros(bins)
    changes = np.zeros(bins + 1)
    for request in scenario.trace.requests:
        prefill[int(request.arrival_s // GRID_S)] += engine.prompt_s(request.prompt_tokens)
        share, busy_s = decode_claim(engine, request, slo.tpot_s)
        begin = request.arrival_s + engine.prompt_s(request.prompt_tokens)
        end = begin + busy_s
        changes[min(bins, int(begin // GRID_S))] += share
        changes[min(bins, int(end // GRID_S) + 1)] -= share
    width = max(1, round(slo.ttft_s / GRID_S))
    spread = np.convolve(prefill / GRID_S, np.ones(width) / width)[:bins]
    return {"prefill": spread, "decode": np.maximum(0.0, np.cumsum(changes)[:bins])}


def schedule(need: Needs, headroom: float, cap: float, cold_start_s: float) -> tuple[int, ...]:
    """Desired replicas, pending ones counted, for each `GRID_S`."""
    wanted = np.minimum(need + headroom * np.sqrt(need), cap * need.max())
    count = np.maximum(1, np.ceil(wanted - 1e-9)).astype(int)
    # One more grid step: a replica must be ready when the step in which it is needed begins.
    ahead = int(np.ceil(cold_start_s / GRID_S)) + 1
    padded = np.concatenate([count, np.repeat(count[-1:], ahead)])
    return tuple(int(n) for n in np.lib.stride_tricks.sliding_window_view(padded, ahead + 1).max(axis=1))


def scheduled(prefill: Sequence[int], decode: Sequence[int]) -> Decide:
    """A decider that follows two schedules."""

    def decide(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        index = int((snapshot.now_s + 1e-9) // GRID_S)
        at = [pool[min(index, len(pool) - 1)] for pool in (prefill, decode)]
        return ScalingPlan(PoolPlan(at[0]), PoolPlan(at[1])), memory

    return decide


def clairvoyant_bound(scenario: Scenario, share: float = 0.97) -> Bound:
    """The cheapest schedule found with which at least `share` of all requests meet both targets.

    If none attains it (prompts that miss the target even alone), the one with the most head-room. Where starts take
    their time by chance, it knows how long each will take, which comes to this: all take the mean, and none fails.
    """
    scenario = replace(scenario, starts=StartTimes(scenario.starts.mean_s))
    both, cold_s = needs(scenario), scenario.starts.median_s

    def run(prefill: tuple[int, ...], decode: tuple[int, ...]) -> Bound:
        return _run(scenario, prefill, decode)

    ample = schedule(both["decode"], MOST_HEADROOM, 1.0, cold_s)
    allowed = 1 - _PREFILL_MISSES * (1 - share)
    for_prefill = _search(
        lambda headroom, cap: run(schedule(both["prefill"], headroom, cap, cold_s), ample),
        lambda bound: bound.outcome.attainment_ttft >= allowed,
        CAPS,
    )
    return _search(
        lambda headroom, cap: run(for_prefill.prefill, schedule(both["decode"], headroom, cap, cold_s)),
        lambda bound: bound.outcome.attainment >= share,
        CAPS[:1],
    )


def _search(
    run: Callable[[float, float], Bound], attains: Callable[[Bound], bool], caps: Sequence[float]
) -> Bound:
    """The cheapest over all caps, each with the least head-room that attains, found by bisection."""
    best = fallback = run(MOST_HEADROOM, caps[0])
    if not attains(fallback):
        return fallback
    for cap in caps:
        low, high = 0, round((MOST_HEADROOM - LEAST_HEADROOM) / HEADROOM_STEP)
        cheapest = run(MOST_HEADROOM, cap)
        if not attains(cheapest):
            break
        while high - low > 1:
            middle = (low + high) // 2
            tried = run(LEAST_HEADROOM + middle * HEADROOM_STEP, cap)
            if attains(tried):
                high, cheapest = middle, tried
            else:
                low = middle
        if cheapest.replica_hours < best.replica_hours:
            best = cheapest
    return best


def _run(scenario: Scenario, prefill: tuple[int, ...], decode: tuple[int, ...]) -> Bound:
    started = replace(scenario, initial={"prefill": prefill[0], "decode": decode[0]})
    simulation = Simulation(started, scheduled(prefill, decode), GRID_S, name="clairvoyant")
    return Bound(prefill, decode, simulation.run())
