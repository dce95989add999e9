"""Which candidate is advised, and what is kept of a prediction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoscaler.advisor.achieved import achieved, load_advice, save_advice
from autoscaler.advisor.advice import Advice, AdviceTerms, Prediction, advise, ranked
from autoscaler.advisor.candidates import ClusterShape, policy_values
from autoscaler.advisor.recorded_traffic import MeasuredRequest, RecordedTraffic
from autoscaler.policies.policy_file import parse_policy
from autoscaler.simulation.outcome import Slo
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.traces.synthetic import TraceShape, synthetic
from autoscaler.simulation.traces.trace import Trace
from autoscaler.sizing.engine_model import EngineModel
from dev.docs.flags import splitserve_flags
from splitserve.errors import InvalidArgumentError

ENGINE = EngineModel(prefill_token_s=1e-4, step_s=5e-3, sequence_s=1e-3, max_running_requests=32)
"""10,000 prompt tokens a second; a batch of 45 keeps to 50 ms."""
SLO = Slo(0.5, 0.05)
pytestmark = pytest.mark.timeout(60)


def scenario(rate: float, prompt: int, output: int) -> Scenario:
    shape = TraceShape("constant", rate=rate, duration_s=60, prompt_tokens=prompt, output_tokens=output)
    return Scenario(synthetic(shape), ENGINE, SLO)


def prediction(
    name: str, attainment: float, hours: float, strain: float = 0.5, kind: str = "split"
) -> Prediction:
    candidate = ClusterShape(kind, len(name), 1)  # type: ignore[arg-type]
    return Prediction(candidate, attainment, 1.0, 1.0, 0.1, 0.01, hours, 0, strain)


def test_long_prompts_get_prefill_workers_and_long_answers_decode_workers() -> None:
    terms = AdviceTerms(4, fewer_workers=False)
    prefill = advise(scenario(8, 2500, 20), terms)
    decode = advise(scenario(10, 100, 1000), terms)
    assert prefill.best.candidate == ClusterShape("split", 3, 1)
    assert decode.best.candidate in (ClusterShape("split", 1, 3), ClusterShape("colocated", 0, 4))
    for advice in (prefill, decode):
        assert {one.candidate.kind for one in advice.predictions} == {"split", "colocated", "adaptive"}
        assert len(advice.predictions) == 5
        assert advice.best.candidate.name in advice.reason
        json.dumps(advice.to_json())


def test_no_more_workers_than_the_goal_needs() -> None:
    found = advise(scenario(1, 500, 20), AdviceTerms(4))
    assert found.best.attainment >= 0.95
    assert found.best.candidate.workers <= 2
    assert found.best.worker_hours < max(one.worker_hours for one in found.predictions)


def test_candidates_are_left_out_when_time_is_over() -> None:
    found = advise(scenario(1, 500, 20), AdviceTerms(4, limit_s=0.0, fewer_workers=False))
    assert (len(found.predictions), found.left_out) == (1, 4)


def test_the_order_of_candidates() -> None:
    cheap, dear = prediction("cheap", 0.96, 1.0), prediction("dear", 1.0, 2.0)
    weak, weaker = prediction("weak", 0.9, 1.0), prediction("weaker", 0.5, 0.5)
    assert ranked([weaker, dear, weak, cheap], 0.95) == [cheap, dear, weak, weaker]
    quick, slow = prediction("quick", 1.0, 1.0, 0.2), prediction("slow", 1.0, 1.001, 0.4)
    restless = prediction("restless", 1.0, 0.999, 0.1, kind="adaptive")
    assert ranked([restless, slow, quick], 0.95) == [quick, slow, restless]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ((0.9, 1.0), (0.8, 1.0), "no candidate keeps 95%"),
        ((0.99, 1.0), (0.8, 1.0), "it alone"),
        ((0.99, 1.0), (0.99, 2.0), "50% fewer worker-hours"),
        ((0.99, 1.0), (0.96, 1.0), "keeps most requests"),
        ((0.99, 1.0), (0.99, 1.0), "is as good"),
    ],
)
def test_the_reason(first: tuple[float, float], second: tuple[float, float], words: str) -> None:
    advice = Advice(AdviceTerms(2), [prediction("first", *first), prediction("second", *second)])
    assert words in advice.reason
    assert advice.margin == pytest.approx(first[0] - second[0])


@pytest.mark.parametrize(("budget", "goal"), [(1, 0.9), (65, 0.9), (2, 0.0), (2, 1.1)])
def test_terms_have_bounds(budget: int, goal: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"budget|goal"):
        AdviceTerms(budget, goal)


@pytest.mark.parametrize("kind", ["split", "colocated", "adaptive"])
def test_the_commands_have_options_that_there_are(kind: str) -> None:
    words = ClusterShape(kind, 1, 3, 4).apply.split()  # type: ignore[arg-type]
    assert words[:2] == ["splitserve", "up"]
    assert {word for word in words if word.startswith("--")} <= splitserve_flags("up")


@pytest.mark.parametrize("budget", [2, 5, 64])
def test_the_adaptive_policy_is_a_valid_file(budget: int) -> None:
    policy = parse_policy(policy_values(budget, SLO))
    assert policy.gpu_budget == budget


def test_predicted_against_achieved(tmp_path: Path) -> None:
    path, before = tmp_path / "advice.json", scenario(2, 500, 20)
    advice = advise(before, AdviceTerms(2))
    save_advice(path, advice, before)
    saved = load_advice(path)
    assert saved.candidate == advice.best.candidate
    assert (saved.attainment, saved.engine, saved.slo) == (advice.best.attainment, ENGINE, SLO)

    def measured(ttft_s: float) -> MeasuredRequest:
        return MeasuredRequest(500, 20, True, ttft_s, 0.02, 0.0, 0.0, 0.05, 1, 0, 0.0)

    good = RecordedTraffic(before.trace, [measured(0.1)] * 40)
    assert "achieves what was predicted" in achieved(saved, good, before).verdict
    bad = RecordedTraffic(before.trace, [measured(9.0)] * 40)
    found = achieved(saved, bad, before)
    assert found.attainment == 0.0
    assert "less than its model says" in found.verdict
    more = scenario(200, 500, 20)
    crowded = achieved(saved, RecordedTraffic(more.trace, [measured(9.0)] * 40), more)
    assert "traffic has changed" in crowded.verdict
    with pytest.raises(InvalidArgumentError, match="only a recording"):
        achieved(saved, RecordedTraffic(Trace("t", [])), before)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"advice": 2}', '{"advice": 1, "candidate": {}}'])
def test_other_files_are_no_saved_advice(tmp_path: Path, text: str) -> None:
    path = tmp_path / "advice.json"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match="was not written by"):
        load_advice(path)
    with pytest.raises(InvalidArgumentError, match="check: cannot read"):
        load_advice(tmp_path / "none.json")
