"""Plans that are not carried out: a dry run, no GPU left. The next decision is judged by what exists."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoscaler.decide import PlanMemory, make_decide
from autoscaler.policies.policy_file import parse_policy
from tests.support.scaling.snapshots import Load, snapshot

SLO = {"trim_after_s": 30, "settle_s": 0}
POOL = {"max_replicas": 50, "gpus_per_replica": 0, "slo": SLO}
POLICY = parse_policy({"prefill": POOL | {"target_ms": 1000}, "decode": POOL | {"target_ms": 50}})


def wanted_over(minutes: int, acting: bool) -> list[int]:
    """Prefill replicas wanted while three, which are all that ever exist, miss their target though demand calls for no
    more."""
    decide, memory, seen = make_decide(POLICY), None, []
    for tick in range(minutes * 6):
        given = snapshot(1800.0 + 10 * tick, Load(), prefill=3, prefill_latency_s=3.0, acting=acting)
        plan, memory = decide(memory, given)
        seen.append(plan.prefill.desired)
    return seen


@pytest.mark.parametrize("acting", [True, False])
def test_latency_asks_for_one_more_than_exist_and_not_for_one_more_than_was_asked_for(acting: bool) -> None:
    wanted = wanted_over(20, acting)
    assert wanted[0] == 3
    assert max(wanted) == 4


def test_a_dry_run_forgets_what_it_would_have_done() -> None:
    decide = make_decide(POLICY)
    first = replace(snapshot(1800.0, Load(requests_per_s=100.0)), acting=False)
    plan, memory = decide(None, first)
    assert plan.prefill.desired > 10
    assert isinstance(memory, PlanMemory)
    idle = replace(snapshot(1900.0), arrivals=(), acting=False)
    plan, _ = decide(memory, idle)
    assert plan.prefill.desired == 4, "no measurement keeps the count: that of the replicas which are there"


def test_the_replacement_of_what_died_is_not_forgotten() -> None:
    decide = make_decide(POLICY)
    _, memory = decide(None, snapshot(1800.0, prefill=4))
    after = replace(snapshot(1810.0, prefill=3), arrivals=())
    plan, _ = decide(memory, after)
    assert plan.prefill.desired == 4
