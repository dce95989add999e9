"""The verdict on opponents: who is chosen as best, who beats whom, and a quick run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autoscaler.simulation.engine_model import preset
from autoscaler.simulation.simulator import NO_BOUNDS
from bench.autoscaling.cases import CASES
from bench.autoscaling.opponents.baselines import BASELINES, STATIC, RuleInputs, baseline
from bench.autoscaling.replays import BOUND, ReplayRow
from bench.autoscaling.tuning import GRIDS, TUNED, best_of, tuning_replays
from bench.autoscaling.verdict import bars_of, bound_of, by_case, main

ROW = ReplayRow("conv", "60s", "policy", {}, 100, 0.98, 1.0, 0.98, 11.0, 3, 0, 8, 1.0)
KNOWN = RuleInputs(CASES[0].slo, preset(CASES[0].preset), NO_BOUNDS, {"prefill": 0.1, "decode": 0.1})


def test_the_best_is_the_cheapest_that_attains_or_who_attains_most() -> None:
    rows = [
        replace(ROW, name="keda-rate", knobs={"use": 1}, attainment=0.99, replica_hours=14.0),
        replace(ROW, name="keda-rate", knobs={"use": 2}, attainment=0.971, replica_hours=12.0),
        replace(ROW, name="keda-rate", knobs={"use": 3}, attainment=0.96, replica_hours=10.0),
        replace(ROW, name="dynamo-sla", knobs={"interval_s": 1}, attainment=0.4, replica_hours=10.0),
        replace(ROW, name="dynamo-sla", knobs={"interval_s": 2}, attainment=0.6, replica_hours=20.0),
    ]
    best = best_of(rows)
    assert best["keda-rate"].knobs == {"use": 2}
    assert best["dynamo-sla"].knobs == {"interval_s": 2}


def test_bars_name_who_is_better_on_both() -> None:
    rows = [
        ROW,
        replace(ROW, name="keda-rate", attainment=0.99, replica_hours=10.5),
        replace(ROW, name="llm-d-slo", attainment=0.99, replica_hours=12.0),
        replace(ROW, name=BOUND, attainment=0.97, replica_hours=10.0),
    ]
    bars = {bar.what: bar for bar in bars_of(by_case(rows), False)}
    assert bars["conv, 60s: better on both"].value == "keda-rate"
    assert not bars["conv, 60s: better on both"].holds
    assert bars["conv, 60s: attained"].holds
    assert (bars["conv, 60s: x bound"].value, bars["conv, 60s: x bound"].holds) == ("1.100", True)


def test_the_bound_is_the_cheapest_that_knows_all_and_attains() -> None:
    schedule = replace(ROW, name=BOUND, attainment=0.98, replica_hours=10.0)
    static = replace(ROW, name="static-best", attainment=0.98, replica_hours=9.0)
    assert bound_of([ROW, schedule, static]) == static
    assert bound_of([ROW, schedule, replace(static, attainment=0.96)]) == schedule
    assert bound_of([ROW, static]) is None


def test_nothing_is_tuned_on_what_it_is_judged_on() -> None:
    judged = {case.trace for case in CASES if case.judged}
    assert not judged & {replay.case.trace for replay in tuning_replays()}


@pytest.mark.parametrize("name", sorted(GRIDS))
def test_every_point_of_a_grid_is_a_rule_and_the_chosen_one_is_among_them(name: str) -> None:
    assert name in BASELINES
    assert name not in STATIC
    for knobs in GRIDS[name]:
        assert baseline(name, KNOWN, knobs).name == name
    assert TUNED[name] in GRIDS[name]


def test_a_quick_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--starts", "60s", "--no-baselines", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in found["runs"]] == ["policy"]
    assert found["bars"][0]["holds"]
    assert found["tuned_on"] == ["code-70b"]
