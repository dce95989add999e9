"""GPUs that several models share: what a model without classes claims, and what it may have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autoscaler.plan import Proposal, Proposals
from autoscaler.policies.policy_file import ScalingPolicy, parse_policy
from autoscaler.sharing.claims.gpu_shares import gpu_claims, gpu_share
from autoscaler.sharing.claims.shared_view import SharedView
from autoscaler.sharing.claims.shares import GPUS
from autoscaler.snapshot import Snapshot
from tests.support.scaling.snapshots import snapshot


def rules(**more: Any) -> ScalingPolicy:
    pool = {"target_ms": 1000, "min_replicas": 1, "max_replicas": 9, **more}
    return parse_policy({"prefill": pool, "decode": pool})


def wants(count: int, **changes: Any) -> tuple[Snapshot, Proposals]:
    """Each pool has four and wants `count`; of eight GPUs it has them all."""
    view = SharedView("a", {GPUS: 8.0}, {"a": {GPUS: 8.0}})
    proposal = Proposal(count, float(count), 4, 4, "")
    return replace(snapshot(shared=view), **changes), Proposals(proposal, proposal)


def test_replicas_of_classes_claim_no_gpus() -> None:
    """Their units are none: the actuator's GPUs must not limit them."""
    seen, proposals = wants(9)
    classed = rules(classes=[{"name": "only", "price_per_hour": 1.0}])
    assert gpu_claims(classed, seen, proposals) == {}
    assert gpu_share(classed, seen, {}) is None
    assert gpu_claims(rules(), seen, proposals)


def test_workers_of_others_cost_nothing_of_the_shared_gpus() -> None:
    seen, proposals = wants(4)
    others = tuple(replace(one, ours=False) for one in seen.decode.replicas[:3])
    seen = replace(seen, decode=replace(seen.decode, replicas=(*others, seen.decode.replicas[3])))
    view = SharedView(
        "a",
        {GPUS: 5.0},
        {"a": {GPUS: 5.0}},
        {("a", "prefill"): {GPUS: 4.0}, ("a", "decode"): {GPUS: 1.0}},
    )
    seen = replace(seen, shared=view)
    claims = gpu_claims(rules(), seen, proposals)
    assert claims["decode"].rungs[-1].uses == {GPUS: 1.0}
    share = gpu_share(rules(), seen, claims)
    assert share is not None
    assert share.gpus == 8, "five shared ones, and three of others"
