"""The best static cluster: the fewest replicas that meet the SLO with constant counts.

They are found by running the trace itself: it knows all that will arrive, as no operator does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from autoscaler.simulation.outcome import Outcome
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.simulator import Simulation, static_replicas
from bench.autoscaling.opponents.baselines import STATIC_BEST
from bench.autoscaling.opponents.clairvoyant import GRID_S
from splitserve.roles import PoolName

Counts = Mapping[PoolName, int]


def best_static(scenario: Scenario, share: float, most: Counts) -> Outcome:
    """The run with the fewest replicas of both pools with which at least `share` of the requests meet both targets.

    `most` bounds each pool and is the answer where nothing attains. With decode at its bound the least prefill is found
    by bisection; from there on, each more prefill, the least decode, as long as that could be fewer in all.
    """
    runs: dict[tuple[int, int], Outcome] = {}

    def run(prefill: int, decode: int) -> Outcome:
        if (prefill, decode) not in runs:
            counts: dict[PoolName, int] = {"prefill": prefill, "decode": decode}
            started = replace(scenario, initial=counts)
            runs[prefill, decode] = Simulation(
                started, static_replicas(counts), GRID_S, name=STATIC_BEST
            ).run()
        return runs[prefill, decode]

    ample = most["decode"]
    least = _least(most["prefill"], lambda prefill: run(prefill, ample).attainment >= share)
    best = run(most["prefill"], ample) if least is None else run(least, ample)
    if least is None:
        return best
    fewest, prefill = least + ample, least
    while prefill <= most["prefill"] and prefill + 1 < fewest:
        within, now = min(ample, fewest - 1 - prefill), prefill
        decode = _least(within, lambda count, now=now: run(now, count).attainment >= share)  # type: ignore[misc]
        if decode is not None:
            best, fewest = run(prefill, decode), prefill + decode
        prefill += 1
    return best


def _least(most: int, attains: Callable[[int], bool]) -> int | None:
    """The least of 1 to `most` that attains, by bisection; None where `most` does not."""
    if most < 1 or not attains(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if attains(middle):
            high = middle
        else:
            low = middle
    return high
