"""Replicas of two classes in simulation: how fast they are, what runs, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscaler.policies.policy_file import ScalingPolicy, parse_policy
from autoscaler.simulation.evaluation.class_costs import RunCost, cost_of
from autoscaler.simulation.evaluation.comparison import run_policy
from autoscaler.simulation.outcome import Outcome, Slo
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.traces.synthetic import TraceShape, synthetic
from autoscaler.sizing.engine_model import EngineModel
from splitserve.cli.main import main

SMALL = {"name": "small", "price_per_hour": 1.0}
LARGE = {"name": "large", "price_per_hour": 3.0, "speed": 4}
SLO = Slo(1.0, 0.05)
TRACE = synthetic(TraceShape("ramp", 1, 12, 900.0, prompt_tokens=2000, output_tokens=50, seed=1))


def rules(*classes: dict[str, Any], **more: Any) -> dict[str, Any]:
    pool = {"max_replicas": 30, "cold_start_s": 20, "classes": list(classes)}
    return {"prefill": {"target_ms": 1000, **pool}, "decode": {"target_ms": 50, **pool}, **more}


def run(policy: ScalingPolicy) -> tuple[Outcome, RunCost]:
    engine = EngineModel(prefill_token_s=150e-6, step_s=0.01, sequence_s=1e-3)
    outcome = run_policy(Scenario(TRACE, engine, SLO, 20.0), policy)
    cost = cost_of(outcome, policy)
    assert cost is not None
    return outcome, cost


def test_a_class_is_as_fast_as_it_says() -> None:
    engine = EngineModel(step_s=0.004, context_token_s=1e-7)
    fast = engine.at_speed("prefill", 4)
    assert fast.prompt_s(5000) == pytest.approx(engine.prompt_s(5000) / 4)
    wide = engine.at_speed("decode", 4)
    assert wide.decode_step_s(40, 4000) == pytest.approx(engine.decode_step_s(10, 1000))
    assert wide.kv_capacity_tokens == 4 * engine.kv_capacity_tokens
    assert engine.at_speed("decode", 1) is engine


@pytest.mark.slow
def test_a_mix_costs_less_than_small_ones_alone_and_attains_as_much() -> None:
    mixed, cost = run(parse_policy(rules(SMALL, LARGE)))
    alone, dear = run(parse_policy(rules(SMALL)))
    used = {(one.pool, one.name): one.replica_hours for one in cost.classes}
    assert used["prefill", "small"] > 0
    assert used["prefill", "large"] > 0
    assert cost.money < dear.money
    assert mixed.attainment >= alone.attainment - 0.02
    assert mixed.attainment > 0.9
    assert sum(used.values()) == pytest.approx(mixed.total_replica_hours)


@pytest.mark.parametrize("workers", ["pinned", "neutral"])
def test_a_budget_is_kept_over_the_whole_run(workers: str) -> None:
    limit = 6.0
    outcome, cost = run(parse_policy(rules(SMALL, LARGE, budget_per_hour=limit, workers=workers)))
    assert outcome.failed_requests == 0
    assert cost.money <= limit * cost.hours


@pytest.mark.slow
def test_a_budget_of_gpus_is_kept_with_standbys_over_the_whole_run() -> None:
    """A large one has two GPUs: for a unit it takes half of what a small one takes."""
    large, limit = LARGE | {"price_per_hour": 6.0, "gpus_per_replica": 2}, 9
    plain = rules(SMALL, large, gpu_budget=limit)
    outcome, cost = run(parse_policy(plain))
    plain["decode"] |= {"warm_standby": 1}
    rested, dear = run(parse_policy(plain))
    assert outcome.failed_requests == rested.failed_requests == 0
    for moment in (*outcome.moments, *rested.moments):
        assert sum(sum(states.values()) for states in moment.replicas.values()) <= limit
    assert cost.gpu_hours < dear.gpu_hours <= limit * dear.hours
    assert any(moment.replicas["decode"]["standby"] for moment in rested.moments)
    assert not any(moment.replicas["decode"]["standby"] for moment in outcome.moments)


def test_the_bill_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump(rules(SMALL, LARGE)))
    command = ["simulate", "--trace", "constant", "--duration", "60", "--rate", "1", "--no-bound"]
    assert main([*command, "--policy", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["cost"]
    assert told["money"] == pytest.approx(sum(one["money"] for one in told["classes"]), abs=1e-3)
    assert told["money_per_hour"] == pytest.approx(2.0), "one small one in each pool"
    assert main([*command, "--policy", str(path)]) == 0
    text = capsys.readouterr().out
    assert "bill: 0.03, 2.00 an hour\nprefill: 0.02 h of small at 1 = 0.02\n" in text
    assert "GPU-hours: 0.03, 2.00 GPUs on average" in text
