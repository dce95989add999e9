"""`true` where a file wants a number is an error that names the field; pydantic alone takes it for 1."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from autoscaler.policies.policy_file import ScalingPolicy
from coordinator.tenants.policy_file import TenantPolicy
from splitserve.config.base import ConfigModel
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.config.worker import WorkerConfig


@pytest.mark.parametrize(
    ("kind", "values", "place"),
    [
        (
            ScalingPolicy,
            {"prefill": {"policy": "slo", "min_replicas": True}},
            ("prefill", "slo", "min_replicas"),
        ),
        (ScalingPolicy, {"gpu_budget": False}, ("gpu_budget",)),
        (TenantPolicy, {"name": "a", "requests_per_second": True}, ("requests_per_second",)),
        (CoordinatorConfig, {"admission": {"max_queue_s": True}}, ("admission", "max_queue_s")),
        (CoordinatorConfig, {"admission": {"ttft_slo_s": True}}, ("admission", "ttft_slo_s")),
        (WorkerConfig, {"engine": {"kv_memory_bytes": True}}, ("engine", "kv_memory_bytes")),
    ],
)
def test_a_number_is_no_boolean(
    kind: type[ConfigModel], values: dict[str, Any], place: tuple[str, ...]
) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(values)
    problems = {error["loc"]: error["msg"] for error in refused.value.errors()}
    assert problems[place] == "Value error, must be a number, not true or false"


def test_booleans_stay_booleans() -> None:
    assert not CoordinatorConfig.model_validate(
        {"circuit_breaker": {"enabled": False}}
    ).circuit_breaker.enabled
