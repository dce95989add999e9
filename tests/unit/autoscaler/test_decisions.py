"""What is kept of decisions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from autoscaler.decisions import MOST_DECISIONS, DecisionJournal, decisions_of
from autoscaler.plan import PoolPlan, ScalingPlan
from autoscaler.reconcile import Action, Drain, Start
from autoscaler.snapshot import Snapshot
from tests.support.scaling.snapshots import snapshot

PLAN = ScalingPlan(PoolPlan(3, 1, "more came", cause="gpu_budget"), PoolPlan(1, reason="enough"))


def enter(journal: DecisionJournal, at: Snapshot, *actions: Action) -> None:
    journal.enter(at, decisions_of(PLAN, {"prefill": (), "decode": ()}, actions), acted=True)


def test_a_decision_has_reasons_actions_and_inputs() -> None:
    journal = DecisionJournal()
    enter(journal, snapshot(1800.0), Start("prefill", 2), Drain("decode", ("decode-7",)))
    prefill, decode = (journal.decisions[0]["pools"][pool] for pool in ("prefill", "decode"))
    assert (prefill["cause"], prefill["reason"], prefill["actions"]) == (
        "gpu_budget",
        "more came",
        ["start 2"],
    )
    assert decode["actions"] == ["drain decode-7"]
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
