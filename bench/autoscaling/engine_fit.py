"""Fits an `EngineModel` to measured latencies: the one whose simulation comes closest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize

from autoscaler.plan import Memory, PoolPlan, ScalingPlan
from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.simulator import Simulation
from autoscaler.simulation.traces.trace import Trace
from autoscaler.snapshot import Snapshot
from splitserve.latency_model import DecodeLatency, PrefillLatency

FIRST_GUESS = {
    "prefill.base_s": 2e-2,
    "prefill.token_s": 1e-3,
    "prefill.pair_s": 2e-7,
    "decode.base_s": 2e-2,
    "decode.sequence_s": 2e-3,
    "decode.context_token_s": 1e-6,
    "handoff_s": 1e-2,
    "request_s": 5e-3,
}
"""Start of the search, seconds: a small model on a few cores."""
ROUNDS = 3
EVALUATIONS = 1500
PERCENTILES = (50, 95)
LEAST_S = 1e-6
"""Latencies below this count as this much."""

Latencies = tuple[Sequence[float], Sequence[float]]
"""TTFT and TPOT of every request, in seconds, in order of arrival."""


def simulate(trace: Trace, engine: EngineModel) -> Latencies:
    """TTFT and TPOT in the simulator, with one replica in each pool."""
    scenario = Scenario(trace, engine=engine, initial={"prefill": 1, "decode": 1}, prefix_cache=False)

    def decide(memory: Memory, _snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        return ScalingPlan(PoolPlan(1), PoolPlan(1)), memory

    requests = Simulation(scenario, decide).run().requests
    return [request.ttft_s or 0.0 for request in requests], [request.tpot_s or 0.0 for request in requests]


def fitted(trace: Trace, took: Latencies, known: EngineModel, evaluations: int = EVALUATIONS) -> EngineModel:
    """The model with the least error of both latencies: the mean over all requests, and that of their median and 95th
    percentile; an error is the absolute logarithm of a ratio. What is not in `FIRST_GUESS` is taken from `known`.

    Nelder-Mead (The Computer Journal 7, 1965), restarted from its own result a few times, with a limit of
    `evaluations` each time.
    """
    names = list(FIRST_GUESS)

    def model(logs: np.ndarray) -> EngineModel:
        values = dict(zip(names, np.exp(logs).tolist(), strict=True))
        prefill, decode = (
            [value for name, value in values.items() if name.startswith(part)]
            for part in ("prefill.", "decode.")
        )
        others = {name: value for name, value in values.items() if "." not in name}
        parts = PrefillLatency(*prefill), DecodeLatency(*decode)
        return dataclasses.replace(known, prefill=parts[0], decode=parts[1], **others)

    def error(logs: np.ndarray) -> float:
        predicted = simulate(trace, model(logs))
        return sum(_error(mine, real) for mine, real in zip(predicted, took, strict=True))

    logs = np.log(list(FIRST_GUESS.values()))
    for _ in range(ROUNDS):
        logs = minimize(
            error, logs, method="Nelder-Mead", options={"maxfev": evaluations, "adaptive": True}
        ).x
    return model(logs)


def _error(predicted: Sequence[float], real: Sequence[float]) -> float:
    mine, theirs = np.log(np.maximum(predicted, LEAST_S)), np.log(np.maximum(real, LEAST_S))
    percentiles = np.percentile(mine, PERCENTILES) - np.percentile(theirs, PERCENTILES)
    return float(np.abs(mine - theirs).mean() + np.abs(percentiles).mean())
