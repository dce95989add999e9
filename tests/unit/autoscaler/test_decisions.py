"""What is kept of decisions, and what coordinators are told about them, each bounded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from autoscaler.decisions import MOST_DECISIONS, DecisionJournal, decisions_of
from autoscaler.plan import PoolPlan, ScalingPlan
from autoscaler.reconcile import Action, Activate, Drain, Rest, Start
from autoscaler.snapshot import Replica, ReplicaState, Snapshot
from splitserve.v1 import registry_pb2
from tests.support.scaling.snapshots import snapshot

PLAN = ScalingPlan(PoolPlan(3, 1, "more came", cause="gpu_budget"), PoolPlan(1, reason="enough"))


def enter(journal: DecisionJournal, at: Snapshot, *actions: Action) -> None:
    journal.enter(at, decisions_of(PLAN, {"prefill": (), "decode": ()}, actions), acted=True)


def test_a_decision_has_reasons_actions_and_inputs() -> None:
    journal = DecisionJournal()
    enter(journal, snapshot(1800.0), Start("prefill", 2), Drain("decode", ("decode-7",)))
    prefill, decode = (journal.decisions[0]["pools"][pool] for pool in ("prefill", "decode"))
    assert (prefill["cause"], prefill["reason"], prefill["next_actions"]) == (
        "gpu_budget",
        "more came",
        ["start 2"],
    )
    assert decode["next_actions"] == ["drain decode-7"]
    assert prefill["inputs"]["uncached_tokens_per_s"] == pytest.approx(10_000)


def test_it_is_bounded_and_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoscaler.decisions.MOST_DECISIONS", 3)
    assert MOST_DECISIONS > 3
    journal = DecisionJournal()
    for step in range(5):
        enter(journal, snapshot(1800.0 + 15 * step))
    page: dict[str, Any] = json.loads(json.dumps(journal.document()))
    assert [one["number"] for one in page["decisions"]] == [5, 4, 3]
    assert page["decisions"][0]["pools"]["decode"]["desired"] == 1


def test_each_pool_has_its_counts_reason_and_next_actions() -> None:
    plan = ScalingPlan(
        PoolPlan(3, 1, "queue is long", cause="policy"), PoolPlan(1, 0, "quiet", cause="bounds")
    )
    pools = {
        "prefill": (
            Replica("prefill-0", ReplicaState.READY, 0.0),
            Replica("prefill-1", ReplicaState.STARTING, 0.0),
        ),
        "decode": [Replica(f"decode-{n}", ReplicaState.READY, 0.0) for n in range(2)],
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
