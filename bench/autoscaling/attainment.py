"""The default policy at constant load on a scaling boundary, and after a burst; synthetic traces, so no files."""

from __future__ import annotations

from dataclasses import dataclass

from autoscaler.simulation.engine_model import preset
from autoscaler.simulation.outcome import Outcome
from autoscaler.simulation.scenario import Scenario, Slo, StartTimes
from autoscaler.simulation.simulator import run_policy
from autoscaler.simulation.traces.synthetic import TraceShape, synthetic
from bench.autoscaling.cases import default_policy

COLD_STARTS_S = (60.0, 180.0)
ACTIONS_AT_CONSTANT_LOAD = 1
RECOVERY_S = 30.0
CONSTANT_S = 1800.0
SETTLE_S = 900.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A condition that must hold."""

    what: str
    value: str
    holds: bool


def constant_at_a_boundary(cold_start_s: float) -> Outcome:
    """Half an hour of constant load on a scaling boundary (two prefill, one decode replicas), after a quarter of an
    hour for the policy to settle."""
    engine, slo = preset("h100-8b"), Slo(2.0, 0.1)
    rate = 2.0 / engine.prompt_s(2000)
    shape = TraceShape(
        "constant", rate, rate, SETTLE_S + CONSTANT_S, prompt_tokens=2000, output_tokens=100, seed=1
    )
    scenario = Scenario(synthetic(shape), engine, slo, StartTimes(cold_start_s))
    return run_policy(scenario, default_policy(slo, cold_start_s))


def burst(cold_start_s: float) -> tuple[Outcome, float]:
    """Load that triples at once and stays; the run, and seconds from the step until targets are met for good
    (`recovery_s`)."""
    engine, slo = preset("h100-8b"), Slo(2.0, 0.1)
    rate = 3.0 / engine.prompt_s(2000) * 0.7
    shape = TraceShape(
        "burst", rate, 3 * rate, 2400.0, burst_s=1200.0, prompt_tokens=2000, output_tokens=100, seed=1
    )
    scenario = Scenario(synthetic(shape), engine, slo, StartTimes(cold_start_s))
    outcome = run_policy(scenario, default_policy(slo, cold_start_s))
    return outcome, recovery_s(outcome, shape.duration_s / 2)


def recovery_s(outcome: Outcome, since_s: float) -> float:
    """Seconds from `since_s` until 95% of the arrivals of every later 10 s window meet both targets."""
    windows: dict[int, list[bool]] = {}
    for request in outcome.requests:
        if request.arrival_s >= since_s:
            met = outcome.ttft_met(request) and outcome.tpot_met(request)
            windows.setdefault(int((request.arrival_s - since_s) // 10), []).append(met)
    late = [index for index, met in windows.items() if sum(met) < 0.95 * len(met)]
    return (max(late) + 1) * 10.0 if late else 0.0


def actions_after(outcome: Outcome, since_s: float) -> int:
    """Number of actions from `since_s` on."""
    return sum(at >= since_s for at, _ in outcome.action_times)


def synthetic_bars() -> list[Bar]:
    """Conditions at constant load and after a burst."""
    bars = []
    for cold_s in COLD_STARTS_S:
        constant = constant_at_a_boundary(cold_s)
        actions = actions_after(constant, SETTLE_S)
        what = f"constant load at a boundary, cold start {cold_s:g} s: actions in 30 min"
        bars.append(Bar(what, str(actions), actions <= ACTIONS_AT_CONSTANT_LOAD))
        _, took_s = burst(cold_s)
        what = f"burst, cold start {cold_s:g} s: recovered after s"
        bars.append(Bar(what, f"{took_s:g}", took_s <= cold_s + RECOVERY_S))
    return bars
