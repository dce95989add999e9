"""What is kept of decisions: expectations by the policy's own model, and what came of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from autoscaler.decisions.attainment import AttainmentModel
from autoscaler.decisions.decisions_page import decisions_document
from autoscaler.decisions.journal import MOST_DECISIONS, DecisionJournal
from autoscaler.plan import PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import parse_policy
from autoscaler.reconcile import Action, Drain, Start
from autoscaler.snapshot import PoolName, Snapshot
from splitserve.histograms import Histogram
from tests.support.scaling.snapshots import Load, snapshot

RULES = parse_policy({"prefill": {"target_ms": 500}, "decode": {"target_ms": 50}})
PLAN = ScalingPlan(PoolPlan(3, 1, "more came", cause="gpu_budget"), PoolPlan(1, reason="enough"))


def enter(journal: DecisionJournal, at: Snapshot, plan: ScalingPlan = PLAN, *actions: Action) -> None:
    journal.enter(at, plan, {"prefill": (), "decode": ()}, actions, acted=True)


def shares(name: PoolName, at: Snapshot, counts: Sequence[int]) -> list[float]:
    found = [one.attainment for one in AttainmentModel(RULES).expected(name, at, counts)]
    return [share for share in found if share is not None]


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_more_replicas_never_attain_less(name: PoolName) -> None:
    found = shares(name, snapshot(), range(16))
    assert len(found) == 16
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] > 0.99
    assert shares(name, snapshot(load=Load(80.0)), range(16))[8] < found[8]


def test_prefill_expects_what_sizes_it() -> None:
    """10,000 tokens a second, 5000 a replica: two are busy all the time, so that nothing is ever in time."""
    two, three = shares("prefill", snapshot(), (2, 3))
    assert two == 0
    assert 0.5 < three < 1


def test_nothing_is_expected_of_what_is_not_measured_or_has_no_target() -> None:
    blind = replace(snapshot(), arrivals=())
    assert shares("prefill", blind, (1, 2)) == shares("decode", blind, (1, 2)) == []
    journal = DecisionJournal()
    enter(journal, snapshot())
    pool = journal.decisions[0].pools["prefill"]
    assert (pool.target_s, pool.planned.attainment, pool.more.attainment) == (None, None, None)


def test_a_decision_is_filled_in_once_its_window_is_over() -> None:
    journal = DecisionJournal(AttainmentModel(RULES))
    enter(journal, snapshot(1800.0), PLAN, Start("prefill", 2), Drain("decode", ("decode-7",)))
    enter(journal, snapshot(1859.0))
    assert journal.decisions[0].pools["prefill"].achieved is None
    late = replace(snapshot(1861.0, prefill=3).prefill, latency=Histogram.of([0.2] * 30 + [3.0] * 10))
    enter(journal, replace(snapshot(1861.0, tpot_s=None), prefill=late))
    enter(journal, snapshot(1875.0))
    prefill, decode = (journal.decisions[0].pools[pool] for pool in ("prefill", "decode"))
    assert (prefill.cause, prefill.reason, prefill.actions) == ("gpu_budget", "more came", ("start 2",))
    assert decode.actions == ("drain decode-7",)
    assert prefill.fewer is not None
    assert (prefill.fewer.replicas, prefill.planned.replicas, prefill.more.replicas) == (2, 3, 4)
    assert decode.fewer is None, "there is no pool of none"
    assert prefill.inputs["uncached_tokens_per_s"] == pytest.approx(10_000)
    assert prefill.achieved is not None
    assert decode.achieved is not None
    assert (prefill.achieved.after_s, prefill.achieved.ready, prefill.achieved.samples) == (61.0, 3, 40)
    assert prefill.achieved.attainment == pytest.approx(0.75, abs=0.01)
    assert (decode.achieved.samples, decode.achieved.attainment) == (0, None)


def test_what_was_looked_at_too_late_says_nothing() -> None:
    journal = DecisionJournal(AttainmentModel(RULES))
    for now_s in (1800.0, 2000.0, 2060.0):
        enter(journal, snapshot(now_s))
    assert journal.decisions[0].pools["prefill"].achieved is None
    assert journal.decisions[1].pools["prefill"].achieved is not None


def test_it_is_bounded_and_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoscaler.decisions.journal.MOST_DECISIONS", 3)
    assert MOST_DECISIONS > 3
    journal = DecisionJournal(AttainmentModel(RULES))
    for step in range(5):
        enter(journal, snapshot(1800.0 + 15 * step))
    page: dict[str, Any] = json.loads(json.dumps(decisions_document(journal.decisions)))
    assert [one["number"] for one in page["decisions"]] == [5, 4, 3]
    assert page["decisions"][0]["pools"]["decode"]["planned"]["replicas"] == 1
