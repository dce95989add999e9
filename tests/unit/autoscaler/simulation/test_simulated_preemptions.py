"""Spot machines in simulation: what is taken away, where its requests go, and what a floor changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscaler.policies.policy_file import ScalingPolicy, parse_policy
from autoscaler.simulation.cluster.cluster import Cluster
from autoscaler.simulation.cluster.replica import EventQueue, SimulatedRequest
from autoscaler.simulation.cluster_settings import ClusterSettings
from autoscaler.simulation.evaluation.class_costs import cost_of
from autoscaler.simulation.evaluation.comparison import run_policy
from autoscaler.simulation.outcome import Outcome, Slo
from autoscaler.simulation.preemptions import Preemptions
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.traces.synthetic import TraceShape, synthetic
from autoscaler.simulation.traces.trace import TraceRequest
from autoscaler.sizing.engine_model import EngineModel
from autoscaler.snapshot import POOLS, PoolName
from splitserve.cli.main import main
from splitserve.errors import InvalidArgumentError

PLAIN = {"name": "plain", "price_per_hour": 3.0, "max_replicas": 30}
SPOT = {"name": "spot", "price_per_hour": 1.0, "spot": True, "max_replicas": 30}
ENGINE = EngineModel(prefill_token_s=150e-6, step_s=0.01, sequence_s=1e-3)
TRACE = synthetic(TraceShape("constant", 6, 6, 900.0, prompt_tokens=2000, output_tokens=100, seed=1))
SCENARIO = Scenario(TRACE, ENGINE, Slo(1.0, 0.05), 20.0, preemptions=Preemptions(20.0, 0.5, 2))


def rules(**pool: Any) -> dict[str, Any]:
    both = {"max_replicas": 30, "min_replicas": 3, "cold_start_s": 20, "classes": [SPOT, PLAIN], **pool}
    return {"prefill": {"target_ms": 1000, **both}, "decode": {"target_ms": 50, **both}}


def run(scenario: Scenario = SCENARIO, **pool: Any) -> tuple[Outcome, ScalingPolicy]:
    policy = parse_policy(rules(**pool))
    return run_policy(scenario, policy), policy


@pytest.mark.slow
def test_no_request_fails_and_a_floor_costs_what_it_costs() -> None:
    bare, policy = run()
    assert bare.preempted_replicas > 10
    assert bare.resumed_requests > 0
    assert bare.failed_requests == 0
    assert all(request.finished_s is not None for request in bare.requests)
    assert all(request.ttft_s is not None and request.ttft_s > 0 for request in bare.requests)
    spans = [span for phase in bare.phases().values() for span in phase.values()]
    assert min(spans) >= -1e-6
    floored, dear = run(on_demand_floor=2)
    assert floored.attainment >= bare.attainment - 0.01
    assert floored.preempted_replicas < bare.preempted_replicas
    money, more = cost_of(bare, policy), cost_of(floored, dear)
    assert money is not None
    assert more is not None
    assert more.money > money.money
    quiet, _ = run(replace(SCENARIO, preemptions=Preemptions()))
    assert (quiet.preempted_replicas, quiet.resumed_requests) == (0, 0)
    assert run()[0].to_json() | {"cpu_ms_per_request": 0} == bare.to_json() | {"cpu_ms_per_request": 0}


def test_the_on_demand_class_is_not_taken_away() -> None:
    outcome, _ = run(on_demand_floor="100%")
    assert outcome.class_hours["prefill"].get("spot", 0.0) < 1.5, (
        "the first ones, until others take their place"
    )
    late = [moment for moment in outcome.moments if moment.at_s > 300]
    assert all(moment.replicas["decode"]["preempted"] == 0 for moment in late)


@pytest.mark.parametrize("pool", ["prefill", "decode"])
@pytest.mark.parametrize("after_s", [0.05, 0.3, 0.52, 1.0, 2.5])
def test_what_is_on_a_machine_goes_on_elsewhere_and_leaves_nothing(pool: PoolName, after_s: float) -> None:
    """A replica of one pool is lost at several moments of the lives of 12 requests."""
    events, ended, first = EventQueue(), [], []
    engine = replace(ENGINE, handoff_s=0.02)
    settings = ClusterSettings(engine, 5.0, preemptions=Preemptions(notice_s=0.0))
    cluster = Cluster(settings, events, lambda one, _: first.append(one), lambda one, _: ended.append(one))
    for each in POOLS:
        cluster.order(each, 2, 0.0, 0.0)
    requests = [SimulatedRequest(TraceRequest(0.0, 1500, 100 if n % 3 else 1)) for n in range(12)]
    for request in requests:
        cluster.arrive(request, 0.0)
    doomed = cluster.pool(pool)[0]
    events.at(after_s, lambda now_s: cluster.take_away(doomed, now_s))
    while events.next_s < 60.0:
        when_s, event = events.pop()
        event(when_s)
    assert sorted(map(id, ended)) == sorted(map(id, requests)), "each once"
    assert sorted(map(id, first)) == sorted(map(id, requests))
    assert not any(request.failed for request in requests)
    assert cluster.resumed > 0 or (pool, after_s) == ("prefill", 2.5), "all prompts are computed by then"
    assert doomed.ended_s == after_s
    for replica in (*cluster.prefill, *cluster.decode):
        assert (replica.assigned, replica.load) == (0, 0)
    decode = cluster.decode[0]
    assert (decode.context_tokens, decode.running, decode.waiting_reservations) == (0, 0, 0)
    assert all(replica.queued_tokens == 0 for replica in cluster.prefill)


def test_rates_and_notices_have_bounds() -> None:
    for values, field in (((-1.0,), "preemptions"), ((4000.0,), "preemptions"), ((1.0, -1.0), "spot_notice")):
        with pytest.raises(InvalidArgumentError) as caught:
            Preemptions(*values)
        assert caught.value.field == field
    with pytest.raises(InvalidArgumentError) as refused:
        replace(SCENARIO, steps=True)
    assert refused.value.field == "preemptions"
    drawn = [Preemptions(2.0).notice_after_s(f"decode-{n}") or 0.0 for n in range(2000)]
    assert sum(drawn) / len(drawn) == pytest.approx(1800, rel=0.1)


def test_simulate_says_what_was_taken_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(yaml.safe_dump(rules(on_demand_floor="25%")))
    command = ["simulate", "--trace", "constant", "--duration", "300", "--policy", str(file), "--no-bound"]
    command += ["--preemptions", "12", "--spot-notice", "20", "--cold-start", "10"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["preempted_replicas"] > 0
    assert found["failed_requests"] == 0
    assert main(command) == 0
    assert f"{found['preempted_replicas']} replicas preempted" in capsys.readouterr().out


def test_a_decode_replica_that_prompts_wait_for_is_taken_away() -> None:
    """They have a prefill replica by then, and are not queued there yet."""
    engine = replace(ENGINE, max_running_requests=2)
    trace = synthetic(TraceShape("constant", 6, 6, 60.0, prompt_tokens=2000, output_tokens=100, seed=1))
    few = Scenario(trace, engine, Slo(1.0, 0.05), 20.0, preemptions=Preemptions(120.0, 0.5, 2))
    outcome, _ = run(few, max_replicas=4)
    assert outcome.preempted_replicas
    assert all(one.failed or one.finished_s is not None for one in outcome.requests)
