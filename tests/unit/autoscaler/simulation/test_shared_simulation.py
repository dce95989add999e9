"""Several models on one budget, on the virtual clock: the budget holds at each moment, and replicas follow the load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from autoscaler.decide import make_decide
from autoscaler.policies.policy_file import ScalingPolicy, parse_policy
from autoscaler.sharing.claims.shares import GPUS, MONEY, of_class
from autoscaler.simulation.evaluation.comparison import bounds_of, run_policy
from autoscaler.simulation.outcome import Slo
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.shared_simulation import (
    SharedOutcome,
    SimulatedModel,
    first_replicas,
    simulate_shared,
)
from autoscaler.simulation.simulator import Simulation, run_together
from autoscaler.simulation.traces.scaling import shifted
from autoscaler.simulation.traces.synthetic import TraceShape, synthetic
from autoscaler.sizing.engine_model import EngineModel

ONLY = {"name": "only", "price_per_hour": 2.0}
ENGINE = EngineModel(prefill_token_s=150e-6, step_s=0.01, sequence_s=1e-3)
BURST = synthetic(TraceShape("burst", 1, 6, 480.0, 160.0, prompt_tokens=2000, output_tokens=40, seed=1))
FLAT = synthetic(TraceShape("constant", 1, duration_s=60.0, prompt_tokens=1000, output_tokens=20, seed=1))


def policy(*classes: Mapping[str, Any], **more: Any) -> ScalingPolicy:
    slo = {"scale_down_cold_starts": 1}
    pool = {
        "max_replicas": 8,
        "cold_start_s": 20,
        "drain_s": 20,
        "classes": list(classes),
        "slo": slo,
        **more,
    }
    return parse_policy(
        {"interval_s": 10, "prefill": {"target_ms": 1000, **pool}, "decode": {"target_ms": 60, **pool}}
    )


def two_bursts(*classes: Mapping[str, Any]) -> dict[str, SimulatedModel]:
    """The second comes as the first is over."""
    traces = {"a": BURST, "b": shifted(BURST, 200.0)}
    return {
        name: SimulatedModel(Scenario(trace, ENGINE, Slo(1.0, 0.06), 20.0), policy(*classes))
        for name, trace in traces.items()
    }


def most_at(found: SharedOutcome, model: str, since_s: float, until_s: float) -> int:
    """Most replicas in rotation or on their way."""
    return max(
        sum(one.replicas[pool]["ready"] + one.replicas[pool]["starting"] for pool in one.replicas)
        for one in found.models[model].moments
        if since_s <= one.at_s < until_s
    )


@pytest.mark.parametrize(
    ("name", "limit", "classes"),
    [(MONEY, 14.5, [ONLY]), (GPUS, 7.0, []), (GPUS, 7.0, [ONLY])],
)
def test_replicas_follow_the_load_within_the_budget(
    name: str, limit: float, classes: list[Mapping[str, Any]]
) -> None:
    models = two_bursts(*classes)
    found = simulate_shared({name: limit}, models, 10.0)
    assert limit - 2 <= found.peaks[name] <= limit, "it is used, and never exceeded"
    first, second = most_at(found, "a", 260, 400), most_at(found, "b", 260, 400)
    assert first > second
    assert most_at(found, "b", 0, 160) >= 2
    assert sum(one.failed_requests for one in found.models.values()) == 0
    told = found.to_json()
    assert told["total"]["requests"] == sum(len(one.scenario.trace.requests) for one in models.values())
    assert told["shared"][name]["limit"] == limit
    assert (told["total"]["money"] is None) == (not classes)
    if classes:
        bills = [told["models"][model]["cost"]["money"] for model in models]
        assert told["total"]["money"] == pytest.approx(sum(bills), abs=1e-3)


def test_what_is_not_limited_is_as_alone() -> None:
    one = SimulatedModel(Scenario(FLAT, ENGINE, Slo(1.0, 0.06), 20.0), policy())
    alone = run_policy(one.scenario, one.policy)
    found = simulate_shared({}, {"a": one, "b": one})
    for each in found.models.values():
        assert each.attainment == alone.attainment
        assert each.total_replica_hours == pytest.approx(alone.total_replica_hours)
        assert each.phases() == alone.phases()
    assert found.peaks == {}
    assert found.attainment == alone.attainment


THREE = [{"start": "00:00", "end": "00:00", "replicas": 3}]


def at_first(count: int, **more: Any) -> SimulatedModel:
    """So many replicas in each pool."""
    scenario = Scenario(FLAT, ENGINE, Slo(1.0, 0.06), 20.0, {"prefill": count, "decode": count})
    return SimulatedModel(scenario, policy(ONLY, **more))


def test_the_first_decision_knows_what_others_have() -> None:
    found = simulate_shared({MONEY: 12.0}, {"a": at_first(1, schedule=THREE), "b": at_first(2)})
    assert sum(found.models["a"].moments[0].desired.values()) == 2, "the other has the rest"


def test_who_waits_for_the_first_decision_of_others_is_not_refused_for_want_of_room() -> None:
    models = {name: at_first(1, schedule=THREE) for name in ("a", "b")}
    found = simulate_shared({MONEY: 100.0}, models)
    assert found.peaks[MONEY] == 24.0
    assert found.refused == 0


def test_runs_on_one_clock_end_together() -> None:
    long = synthetic(TraceShape("constant", 0.5, duration_s=120.0, output_tokens=10, seed=2))
    rules = policy()
    runs = [
        Simulation(Scenario(trace, ENGINE), make_decide(rules), 10.0, bounds_of(rules))
        for trace in (FLAT, long)
    ]
    short, longer = run_together(runs)
    assert short.duration_s == longer.duration_s == 120.0
    assert len(short.moments) == len(longer.moments) == 12, "also of the one whose trace is over"


def test_the_first_replicas_fit() -> None:
    fast = {"name": "fast", "price_per_hour": 4.0, "speed": 2}
    models = two_bursts(ONLY, fast)
    found = first_replicas({MONEY: 12.0, of_class("only"): 3.0}, models)
    kinds = [kind for pools in found.values() for each in pools.values() for kind in each]
    assert sorted(kinds) == ["fast", "only", "only", "only"], "the least of each, of what has room"
    assert all(each for pools in found.values() for each in pools.values())
