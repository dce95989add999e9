"""Policy files: defaults, and errors that name the field and its bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoscaler.policies.policy_file import PredictivePool, SloPool, TargetPool, load_policy, parse_policy
from splitserve.errors import ConfigError

GOOD: dict[str, Any] = {"prefill": {"target_ms": 1000}, "decode": {"target_ms": 50}}


def test_a_short_file_has_defaults(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(
        "gpu_budget: 4\nprefill: {target_ms: 1000}\ndecode: {kind: target, metric: tpot, target: 50}\n"
    )
    policy = load_policy(path)
    assert isinstance(policy.prefill, SloPool)
    assert isinstance(policy.decode, TargetPool)
    assert (policy.prefill.min_replicas, policy.prefill.percentile, policy.gpu_budget) == (1, 95, 4)


def test_the_example_is_valid() -> None:
    assert load_policy(Path(__file__).parents[4] / "compose" / "policy.yaml").prefill.kind == "slo"


def test_slo_grows_in_one_go_and_keeps_replicas_for_half_a_cold_start() -> None:
    pool = parse_policy(GOOD).prefill
    assert pool.limits(90.0).down.window_s == 45
    assert pool.limits(90.0).up.policies[0].value >= pool.max_replicas
    given = parse_policy(
        {**GOOD, "prefill": {"target_ms": 1, "behavior": {"scaleDown": {"stabilizationWindowSeconds": 7}}}}
    )
    assert given.prefill.limits(90.0).down.window_s == 7


def test_other_kinds_have_the_defaults_of_an_hpa() -> None:
    pool = parse_policy({**GOOD, "decode": {"kind": "schedule"}}).decode
    assert pool.limits(90.0).down.window_s == 300


def test_predictive_is_its_own_kind() -> None:
    assert isinstance(
        parse_policy({**GOOD, "prefill": {"kind": "predictive", "target_ms": 1}}).prefill, PredictivePool
    )


RULE = {"type": "Pods", "value": 0, "periodSeconds": 15}
PERCENT = {"type": "Percent", "value": 10**310, "periodSeconds": 15}
WINDOW = {"start": "08:00", "end": "18:00", "replicas": 2}


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"prefill": {"target_ms": 0}}, "prefill.target_ms", "greater than 0"),
        (
            {"prefill": {"target_ms": 1, "percentile": 0.95}},
            "prefill.percentile",
            "95 is the 95th percentile",
        ),
        (
            {"decode": {"kind": "target", "metric": "tpot", "target": 50, "percentile": 0.999}},
            "decode.percentile",
            "99.9 is the 99.9th percentile",
        ),
        (
            {"prefill": {"kind": "predictive", "target_ms": 1, "forecast_percentile": 0.8}},
            "prefill.forecast_percentile",
            "80 is the 80th percentile",
        ),
        ({"prefill": {"target_ms": 1, "percentile": 0}}, "prefill.percentile", "greater than or equal to 1"),
        ({"prefill": {}}, "prefill.target_ms", "required"),
        ({"prefill": {"target_ms": 1, "targt": 1}}, "prefill.targt", "no such setting"),
        ({"prefill": {"target_ms": 1, "percentile": 100}}, "prefill.percentile", "less than 100"),
        (
            {"prefill": {"target_ms": 1, "min_replicas": 9}},
            "prefill.max_replicas",
            "at least min_replicas (9)",
        ),
        (
            {"prefill": {"target_ms": 1, "min_replicas": -1}},
            "prefill.min_replicas",
            "greater than or equal to 0",
        ),
        ({"idle_s": 0}, "idle_s", "greater than 0"),
        ({"prefill": {"kind": "magic"}}, "prefill", "slo, target, schedule, predictive or custom"),
        ({"prefill": 3}, "prefill", "dictionary"),
        ({"decode": {"kind": "target", "metric": "tpot"}}, "decode.target", "required"),
        (
            {"prefill": {"target_ms": 1, "behavior": {"scaleUp": {"policies": [RULE]}}}},
            "prefill.behavior.scaleUp.policies.0.value",
            "greater than or equal to 1",
        ),
        (
            {"prefill": {"target_ms": 1, "behavior": {"scaleDown": {"stabilizationWindowSeconds": 3601}}}},
            "prefill.behavior.scaleDown.stabilizationWindowSeconds",
            "3600",
        ),
        (
            {"prefill": {"target_ms": 1, "behavior": {"scaleUp": {"policies": []}}}},
            "prefill.behavior.scaleUp.policies",
            "at least 1",
        ),
        (
            {"prefill": {"kind": "schedule", "schedule": [{**WINDOW, "timezone": "Mars/Base"}]}},
            "prefill.schedule.0.timezone",
            "unknown time zone 'Mars/Base'",
        ),
        (
            {"prefill": {"target_ms": 1, "slo": {"miss_share": 5}}},
            "prefill.slo.miss_share",
            "less than or equal to 4",
        ),
        (
            {"prefill": {"kind": "predictive", "target_ms": 1, "season_s": 100, "interval_s": 50}},
            "prefill.interval_s",
            "at most season_s / 4 (25)",
        ),
        ({"gpu_budget": 1}, "gpu_budget", "of both pools: 2"),
        ({"interval_s": float("nan")}, "interval_s", "finite"),
        ({"prefill": {"target_ms": 1, "slo": {"history_s": 1}}}, "prefill.slo.history_s", "equal to 2"),
        (
            {"prefill": {"target_ms": 1, "behavior": {"scaleUp": {"policies": [PERCENT]}}}},
            "prefill.behavior.scaleUp.policies.0.value",
            "less than or equal to 1000000",
        ),
    ],
)
def test_errors_name_the_field_and_the_bound(changes: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_policy({**GOOD, **changes})
    assert caught.value.field == field
    assert caught.value.message.startswith(field)
    assert words in caught.value.message


def test_a_value_that_anchors_make_large_is_not_told_in_full(tmp_path: Path) -> None:
    """Nine levels of eleven are two thousand million values in a few hundred bytes."""
    lines = ["&a [" + "x, " * 10 + "x]"]
    lines += [f"&{chr(98 + n)} [" + f"*{chr(97 + n)}, " * 10 + f"*{chr(97 + n)}]" for n in range(8)]
    path = tmp_path / "policy.yaml"
    path.write_text("interval_s:\n" + "".join(f"- {line}\n" for line in lines))
    with pytest.raises(ConfigError) as caught:
        load_policy(path)
    assert caught.value.field == "interval_s"
    assert len(caught.value.message) < 1000


def test_a_policy_file_is_no_larger_than_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("x: [" + "1," * (1 << 19) + "1]")
    with pytest.raises(ConfigError, match="policy"):
        load_policy(path)
