"""The parts of `bench.autoscaling.trace_slice`: what is replayed, what the policy says, and what counts as met."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest

from autoscaler.policies.policy_file import parse_policy
from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.scenario import Slo
from autoscaler.simulation.traces.trace import Trace, TraceRequest
from bench.asking import AskedAnswer
from bench.autoscaling.trace_slice.run import BURSTS, forecast_of, outcome_of, parts_of, rules_of
from splitserve.errors import UnavailableError

SLO = Slo(1.0, 0.1)


@pytest.fixture
def options(tmp_path: Path) -> Namespace:
    lines = [f"2023-11-16 18:{at // 60:02}:{at % 60:02}.0000000,800,80" for at in range(300)]
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    return Namespace(
        trace=trace,
        minutes=2.0,
        prompt_share=0.125,
        output_share=0.125,
        fit_requests=60,
        fit_rate=0.5,
        max_prefill=3,
        max_decode=2,
        ttft_ms=1000.0,
        tpot_ms=100.0,
        cold_start_s=30.0,
    )


def test_the_part_to_fit_is_stretched_and_the_minutes_after_it_are_not(options: Namespace) -> None:
    to_fit, rest = parts_of(options)
    spread = to_fit.requests[: -sum(BURSTS)]
    assert len(spread) == 60
    assert spread[-1].arrival_s == pytest.approx(60 / 0.5, rel=0.05)
    assert {(one.prompt_tokens, one.output_tokens) for one in rest.requests} == {(100, 10)}
    assert len(rest.requests) == 120
    assert rest.requests[0].arrival_s == 0


def test_a_fixed_pool_has_no_room(options: Namespace) -> None:
    fixed, free = (parse_policy(rules_of(options, 2, 1, fixed=fixed)) for fixed in (True, False))
    assert [(p.min_replicas, p.max_replicas) for p in (fixed.prefill, fixed.decode)] == [(2, 2), (1, 1)]
    assert [(p.min_replicas, p.max_replicas) for p in (free.prefill, free.decode)] == [(2, 3), (1, 2)]


def test_failures_count_as_missed_and_break_the_bar(options: Namespace) -> None:
    trace = Trace("few", [TraceRequest(float(at), 100, 10) for at in range(4)])
    forecast = forecast_of(trace, EngineModel(), SLO, rules_of(options, 1, 1), 30.0)
    assert forecast.attainment == 1.0
    good = AskedAnswer("a", (0.5, 0.55))
    late, slow = AskedAnswer("b", (1.5, 1.55)), AskedAnswer("c", (0.5, 0.7))
    most = Counter({"prefill": 2, "decode": 1})

    def of(*answers: AskedAnswer | UnavailableError) -> dict[str, object]:
        found = outcome_of(answers, SLO, most, EngineModel(), trace, forecast, options)
        return found | {"real": found["rows"][0]}

    assert of(good, good)["holds"]
    missed = of(good, good, late, slow)
    assert not missed["holds"]
    assert missed["real"]["attained"] == 0.5  # type: ignore[index]
    failed = of(*[good] * 99, UnavailableError("gone"))
    assert failed["real"]["attained"] == 0.99  # type: ignore[index]
    assert not failed["holds"]
    options.max_prefill = 1
    assert not of(good)["holds"], "more replicas than the policy allows"
