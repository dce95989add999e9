"""The policy at zero in the simulator: cost falls, no request is lost, and the first token takes one cold start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from autoscaler.policies.policy_file import ScalingPolicy, parse_policy
from autoscaler.simulation.scenario import Scenario, Slo, StartTimes
from autoscaler.simulation.simulator import run_policy
from autoscaler.simulation.traces.trace import Trace, TraceRequest
from bench.autoscaling.opponents.runs import run_baseline
from splitserve.config.coordinator import AdmissionConfig

COLD_START_S = 30.0
PAUSE_S = 1800.0
IDLE_S = 120.0
CAME = [*range(10), *(PAUSE_S + n / 10 for n in range(20)), 2 * PAUSE_S]
"""Ten, then twenty at almost the same moment, then one."""
SCENARIO = Scenario(
    Trace("now and then", [TraceRequest(at_s, 500, 20) for at_s in CAME]),
    slo=Slo(2.0, 0.1),
    starts=StartTimes(COLD_START_S),
    initial={"prefill": 1, "decode": 1},
)


def policy(least: int) -> ScalingPolicy:
    pool: Mapping[str, object] = {"min_replicas": least, "max_replicas": 4, "cold_start_s": COLD_START_S}
    rules = {"prefill": {"target_ms": 2000, **pool}, "decode": {"target_ms": 100, **pool}, "idle_s": IDLE_S}
    return parse_policy(rules)


@pytest.mark.slow
@pytest.mark.parametrize("admission", [None, AdmissionConfig()], ids=["at once", "queue"])
def test_cost_falls_and_the_first_token_takes_one_cold_start(admission: AdmissionConfig | None) -> None:
    scenario = replace(SCENARIO, admission=admission)
    zero, one = run_policy(scenario, policy(0)), run_policy(scenario, policy(1))
    assert zero.failed_requests == one.failed_requests == 0
    assert zero.total_replica_hours < 0.3 * one.total_replica_hours
    waited = [request.first_token_s - request.arrival_s for request in zero.requests if request.first_token_s]
    assert len(waited) == len(CAME)
    assert max(waited[:10]) < COLD_START_S / 10
    for first in (10, 30):
        assert COLD_START_S <= waited[first] < 1.1 * COLD_START_S, "no interval is waited for"
    assert max(waited) < 1.1 * COLD_START_S
    zeroes = [
        moment.at_s for moment in zero.moments if not moment.desired["prefill"] + moment.desired["decode"]
    ]
    assert any(IDLE_S <= at_s < PAUSE_S for at_s in zeroes)


def test_a_gap_of_weeks_takes_hardly_more_decisions_than_one_of_hours() -> None:
    decisions, least = {}, int(3600 / policy(1).interval_s) - 1
    for days in (0.25, 25):
        times = [*range(20), *(days * 86_400 + at for at in range(20))]
        trace = Trace("gap", [TraceRequest(at_s, 500, 20) for at_s in times])
        outcome = run_policy(replace(SCENARIO, trace=trace), policy(1))
        assert outcome.attainment == 1
        assert outcome.total_replica_hours == pytest.approx(2 * 24 * days, rel=0.02)
        moments = [moment.at_s for moment in outcome.moments]
        decisions[days] = len(moments)
        # As dense as ever in the hour before the next request.
        assert len([at_s for at_s in moments if times[20] - 3600 < at_s < times[20]]) >= least
    assert decisions[25] < decisions[0.25] + 25 * 24 + 10


def test_baselines_keep_one_of_each() -> None:
    hpa = run_baseline(SCENARIO, "hpa-p95-latency", policy(0).pools)
    assert hpa.failed_requests == 0
