"""A plan's pools as mixes of classes: with a floor, without spot machines, and by the token."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaler.advisor.advice import Prediction, predicted
from autoscaler.advisor.candidates import ClusterShape, replay
from autoscaler.policies.policy_file import ScalingPolicy, parse_policy
from autoscaler.simulation.outcome import Slo
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.traces.trace import Trace, TraceRequest
from autoscaler.sizing.engine_model import EngineModel
from autoscaler.sizing.mix_bill import mix_bill
from splitserve.errors import FailedPreconditionError

ENGINE = EngineModel(prefill_token_s=1e-4, step_s=5e-3, sequence_s=1e-3, max_running_requests=32)
TRACE = Trace("even", [TraceRequest(float(at), 900, 100) for at in range(101)])
OWN = {"name": "own", "price_per_hour": 2.0, "max_replicas": 20}
SPOT = {"name": "spot", "price_per_hour": 0.5, "spot": True, "max_replicas": 20}
FAST = {"name": "fast", "price_per_hour": 5.0, "speed": 4, "max_replicas": 20}


@pytest.fixture(scope="module")
def split() -> Prediction:
    shape = ClusterShape("split", 4, 8)
    return predicted(shape, replay(shape, Scenario(TRACE, ENGINE, Slo(0.6, 0.05))))


def policy(classes: list[dict[str, Any]], floor: int | str = 0, **more: Any) -> ScalingPolicy:
    pool = {"target_ms": 100, "max_replicas": 40, "classes": classes, "on_demand_floor": floor}
    return parse_policy({"prefill": pool, "decode": pool, **more})


def test_spot_machines_stand_above_the_floor(split: Prediction) -> None:
    bill = mix_bill(policy([OWN, SPOT], "25%"), split, TRACE)
    assert (bill.prefill.classes, bill.decode.classes) == ({"own": 1, "spot": 3}, {"own": 2, "spot": 6})
    assert (bill.prefill.on_demand_units, bill.decode.on_demand_units) == (1, 2)
    assert (bill.cost_per_hour, bill.on_demand_cost_per_hour) == (3 * 2.0 + 9 * 0.5, 24.0)
    tokens_per_hour = 101 * 1000 / 100 * 3600
    assert bill.cost_per_million_tokens == pytest.approx(10.5 / tokens_per_hour * 1e6)
    assert bill.on_demand_cost_per_million_tokens == pytest.approx(24 / tokens_per_hour * 1e6)


def test_classes_are_mixed_by_their_speed(split: Prediction) -> None:
    bill = mix_bill(policy([OWN, FAST]), split, TRACE)
    assert (bill.prefill.classes, bill.decode.classes) == ({"own": 0, "fast": 1}, {"own": 0, "fast": 2})
    assert bill.cost_per_hour == bill.on_demand_cost_per_hour == 15.0


def test_neutral_workers_are_of_one_price_list(split: Prediction) -> None:
    few = {**OWN, "name": "few", "price_per_hour": 1.0, "max_replicas": 5}
    bill = mix_bill(policy([OWN, few], workers="neutral"), split, TRACE)
    assert bill.prefill.classes["few"] + bill.decode.classes["few"] == 5
    assert bill.cost_per_hour == 5 * 1.0 + 7 * 2.0
    with pytest.raises(FailedPreconditionError, match="units, the plan has"):
        mix_bill(policy([{**OWN, "max_replicas": 8}], workers="neutral"), split, TRACE)


def test_without_machines_of_ones_own_there_is_nothing_to_compare(split: Prediction) -> None:
    bill = mix_bill(policy([{**OWN, "max_replicas": 2}, SPOT]), split, TRACE)
    assert bill.on_demand_cost_per_hour is bill.on_demand_cost_per_million_tokens is None


def test_what_the_classes_do_not_give(split: Prediction) -> None:
    with pytest.raises(FailedPreconditionError, match="the classes of decode give 5 units, the plan has 8"):
        mix_bill(policy([{**OWN, "max_replicas": 5}]), split, TRACE)
    with pytest.raises(FailedPreconditionError, match="costs 24 an hour, the budget is 20"):
        mix_bill(policy([OWN], budget_per_hour=20), split, TRACE)
    assert mix_bill(policy([OWN], gpu_budget=12), split, TRACE).decode.gpus == 8
    with pytest.raises(FailedPreconditionError, match="takes 12 GPUs, the budget is 11"):
        mix_bill(policy([OWN], gpu_budget=11), split, TRACE)
