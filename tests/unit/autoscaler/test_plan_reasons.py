"""What coordinators are told about a decision: counts, reason and what follows, each bounded."""

from __future__ import annotations

from autoscaler.decisions import decisions_of
from autoscaler.plan import PoolPlan, ScalingPlan
from autoscaler.reconcile import Activate, Drain, ReplicaView, Rest, Start
from autoscaler.snapshot import ReplicaState
from splitserve.v1 import registry_pb2


def view(name: str, state: ReplicaState) -> ReplicaView:
    return ReplicaView(name, state, 0.0, 0.0)


def test_each_pool_has_its_counts_reason_and_next_actions() -> None:
    plan = ScalingPlan(
        PoolPlan(3, 1, "queue is long", cause="policy"), PoolPlan(1, 0, "quiet", cause="bounds")
    )
    pools = {
        "prefill": (view("prefill-0", ReplicaState.READY), view("prefill-1", ReplicaState.STARTING)),
        "decode": (view("decode-0", ReplicaState.READY), view("decode-1", ReplicaState.READY)),
    }
    actions = [
        Start("prefill", 2),
        Activate("prefill", "prefill-9"),
        Rest("decode", "decode-7"),
        Drain("decode", ("decode-1",)),
    ]
    prefill, decode = decisions_of(plan, pools, actions)  # type: ignore[arg-type]
    assert (prefill.pool, prefill.desired, prefill.standby) == (registry_pb2.ROLE_PREFILL, 3, 1)
    assert (prefill.ready, prefill.starting, prefill.cause) == (1, 1, "policy")
    assert (prefill.reason, list(prefill.next_actions)) == (
        "queue is long",
        ["start 2", "activate prefill-9"],
    )
    assert (decode.pool, decode.desired, decode.cause) == (registry_pb2.ROLE_DECODE, 1, "bounds")
    assert list(decode.next_actions) == ["rest decode-7", "drain decode-1"]


def test_texts_are_bounded() -> None:
    plan = ScalingPlan(PoolPlan(0, reason="x" * 5000), PoolPlan(0))
    names = tuple(f"prefill-{number}-{'n' * 300}" for number in range(40))
    prefill, _ = decisions_of(plan, {"prefill": (), "decode": ()}, [Drain("prefill", names)])
    assert len(prefill.reason) == 1024
    assert len(prefill.next_actions) == 16
    assert all(len(text) == 200 for text in prefill.next_actions)
