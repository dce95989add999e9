"""The policy at zero in the simulator: cost falls, no request is lost, and the first token takes one cold start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from autoscaler.policies.policy_file import parse_policy
from autoscaler.simulation.evaluation.comparison import compare
from autoscaler.simulation.outcome import Outcome, Slo
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.traces.trace import Trace, TraceRequest
from splitserve.config.coordinator import AdmissionConfig
from splitserve.errors import InvalidArgumentError

COLD_START_S = 30.0
PAUSE_S = 1800.0
IDLE_S = 120.0
CAME = [*range(10), *(PAUSE_S + n / 10 for n in range(20)), 2 * PAUSE_S]
"""Ten, then twenty at almost the same moment, then one."""
SCENARIO = Scenario(
    Trace("now and then", [TraceRequest(at_s, 500, 20) for at_s in CAME]),
    slo=Slo(2.0, 0.1),
    cold_start_s=COLD_START_S,
    initial={"prefill": 1, "decode": 1},
)


def run(
    least: int, scenario: Scenario = SCENARIO, names: tuple[str, ...] = ()
) -> tuple[Outcome, list[Outcome]]:
    pool: Mapping[str, object] = {"min_replicas": least, "max_replicas": 4, "cold_start_s": COLD_START_S}
    rules = {"prefill": {"target_ms": 2000, **pool}, "decode": {"target_ms": 100, **pool}, "idle_s": IDLE_S}
    made = compare(scenario, parse_policy(rules), names)
    return made.policy, list(made.others)


@pytest.mark.slow
@pytest.mark.parametrize("admission", [None, AdmissionConfig()], ids=["at once", "queue"])
def test_cost_falls_and_the_first_token_takes_one_cold_start(admission: AdmissionConfig | None) -> None:
    scenario = replace(SCENARIO, admission=admission)
    zero, _ = run(0, scenario)
    one, _ = run(1, scenario)
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


def test_baselines_keep_one_of_each() -> None:
    _, (hpa,) = run(0, names=("hpa-p95-latency",))
    assert hpa.failed_requests == 0


@pytest.mark.parametrize("wake_s", [0.5, 4.0])
def test_what_sleeps_at_zero_joins_after_the_time_of_waking(wake_s: float) -> None:
    """Not after a cold start, and not at once."""
    pool = {"min_replicas": 0, "max_replicas": 4, "cold_start_s": COLD_START_S}
    asleep = {**pool, "warm_standby": 1, "sleep": True}
    rules = {
        "prefill": {"target_ms": 2000, **asleep},
        "decode": {"target_ms": 100, **asleep},
        "idle_s": IDLE_S,
    }
    made = compare(replace(SCENARIO, wake_s=wake_s), parse_policy(rules), ()).policy
    last = max(made.requests, key=lambda one: one.arrival_s)
    assert last.ttft_s is not None
    assert wake_s <= last.ttft_s < wake_s + 2.0
    assert made.failed_requests == 0


def test_a_time_of_waking_that_cannot_be_is_refused() -> None:
    for wake_s in (-1.0, float("inf"), float("nan")):
        with pytest.raises(InvalidArgumentError, match="wake must be at least 0"):
            replace(SCENARIO, wake_s=wake_s)
