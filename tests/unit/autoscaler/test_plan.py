"""The joint plan: budget, link, standby, shapes; and plans that are not carried out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.decide import PlanMemory, make_decide
from autoscaler.policies.joint_plan import Proposal, gpu_budget, joint_plan
from autoscaler.policies.policy_file import ScalingPolicy, parse_policy
from autoscaler.snapshot import Replica, ReplicaState
from tests.support.scaling.snapshots import Load, snapshot


def policy(
    prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **top: Any
) -> ScalingPolicy:
    pools = {
        "prefill": {"target_ms": 1000, "max_replicas": 20, **(prefill or {})},
        "decode": {"target_ms": 50, "max_replicas": 20, **(decode or {})},
    }
    return parse_policy({**pools, **top})


def proposal(count: int, need: float | None = None, current: int | None = None) -> Proposal:
    return Proposal(count, count if need is None else need, count if current is None else current, "why")


def counts(rules: ScalingPolicy, p: Proposal, d: Proposal) -> tuple[int, int]:
    plan = joint_plan(rules, snapshot(), p, d)
    return plan.prefill.desired, plan.decode.desired


def test_without_a_budget_both_have_their_way() -> None:
    assert counts(policy(), proposal(9), proposal(7)) == (9, 7)


def test_a_budget_is_shared_by_harm() -> None:
    # 12 GPUs for needs of 12 and 6: both are overloaded by the same share.
    assert counts(policy(gpu_budget=12), proposal(12, current=1), proposal(6, current=1)) == (8, 4)


def test_replicas_of_several_gpus_count_as_such() -> None:
    rules = policy(decode={"gpus_per_replica": 4}, gpu_budget=12)
    assert counts(rules, proposal(8, current=1), proposal(2, current=1)) == (4, 2)


def test_gpus_move_only_when_it_is_worth_it() -> None:
    rules = policy(gpu_budget=10)
    assert counts(rules, proposal(6, 5.6, 5), proposal(5, 5.0, 5)) == (5, 5)
    assert counts(rules, proposal(9, 9.0, 5), proposal(5, 3.0, 5)) == (7, 3)


def test_standby_gives_way_to_rotation() -> None:
    rules = policy({"warm_standby": 2}, gpu_budget=8)
    plan = joint_plan(rules, snapshot(), proposal(4), proposal(3))
    assert (plan.prefill.desired, plan.prefill.standby, plan.decode.desired) == (4, 1, 3)


def test_the_reason_says_what_the_budget_took() -> None:
    plan = joint_plan(policy(gpu_budget=4), snapshot(), proposal(4, current=2), proposal(4, current=2))
    assert "within a budget of 4 GPUs" in plan.prefill.reason
    assert plan.prefill.cause == plan.decode.cause == "gpu_budget"


@pytest.mark.parametrize(
    ("decode", "same"), [({}, True), ({"gpus_per_replica": 2}, False), ({"gpu": "H100"}, False)]
)
def test_a_replica_may_take_the_other_role_where_it_has_the_same_gpus(
    decode: dict[str, Any], same: bool
) -> None:
    assert joint_plan(policy({}, decode), snapshot(), proposal(1), proposal(1)).one_shape is same


def test_a_worker_with_both_roles_counts_twice_and_takes_its_gpus_once() -> None:
    seen = snapshot()
    both = Replica("b", ReplicaState.READY, 0.0, both=True)
    pools = {
        name: replace(seen.pool(name), replicas=(*seen.pool(name).replicas, both))  # type: ignore[arg-type]
        for name in ("prefill", "decode")
    }
    seen = replace(seen, **pools, gpu_inventory=9)  # type: ignore[arg-type]
    assert gpu_budget(policy(), seen) == 10
    assert gpu_budget(policy(gpu_budget=6), seen) == 7


COUNT = st.integers(1, 20)


@settings(max_examples=50, deadline=None)
@given(COUNT, COUNT, COUNT, COUNT, st.integers(2, 40), st.integers(0, 3))
def test_the_budget_holds_and_no_pool_gets_more_than_it_wants(
    p: int, d: int, now_p: int, now_d: int, budget: int, standby: int
) -> None:
    rules = policy({"warm_standby": min(standby, budget - 2)}, gpu_budget=budget)
    plan = joint_plan(rules, snapshot(), proposal(p, current=now_p), proposal(d, current=now_d))
    assert plan.prefill.desired + plan.prefill.standby + plan.decode.desired + plan.decode.standby <= budget
    assert 1 <= plan.prefill.desired <= max(p, now_p)
    assert 1 <= plan.decode.desired <= max(d, now_d)
    assert plan == joint_plan(rules, snapshot(), proposal(p, current=now_p), proposal(d, current=now_d))


def far(count: int, pool: str) -> tuple[Replica, ...]:
    """Ready workers that the actuator does not have."""
    return tuple(Replica(f"far-{pool}-{n}", ReplicaState.READY, 0.0, ours=False) for n in range(count))


def test_without_a_budget_in_the_file_the_actuators_inventory_is_shared_by_harm() -> None:
    seen = replace(snapshot(), gpu_inventory=12)
    plan = joint_plan(policy(), seen, proposal(12, current=1), proposal(6, current=1))
    assert (plan.prefill.desired, plan.decode.desired) == (8, 4)
    assert "within a budget of 12 GPUs" in plan.prefill.reason


def test_the_inventory_of_one_host_does_not_bound_the_workers_of_others() -> None:
    seen = replace(snapshot(), gpu_inventory=4)
    seen = replace(seen, prefill=replace(seen.prefill, replicas=far(5, "p")))
    seen = replace(seen, decode=replace(seen.decode, replicas=far(1, "d")))
    assert gpu_budget(policy(decode={"gpus_per_replica": 2}), seen) == 4 + 5 + 2
    assert gpu_budget(policy(gpu_budget=3), seen) == 3, "what the file says wins"
    assert gpu_budget(policy(), snapshot()) is None


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
