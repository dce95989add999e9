"""What `splitserve up --autoscale` starts at first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscaler.actuators.actuator import ReplicaShape
from launcher.cluster.local_scaling import LocalScaling
from splitserve.config.cluster import ClusterConfig
from splitserve.errors import ConfigError


def scaling(
    folder: Path, given: dict[str, int] | None = None, pool: dict[str, Any] | None = None, **limits: Any
) -> LocalScaling:
    both = {"target_ms": 100, **(pool or {})}
    path = folder / "policy.yaml"
    path.write_text(yaml.safe_dump({"prefill": both, "decode": both, **limits}))
    return LocalScaling.of(ClusterConfig.model_validate(given or {}), path)


def test_it_starts_with_the_least_that_serves(tmp_path: Path) -> None:
    made = scaling(tmp_path, pool={"min_replicas": 3, "gpus_per_replica": 2, "gpu": "L40S"})
    assert (made.config.prefill, made.config.decode, made.config.prefill_gpus) == (3, 3, 2)
    assert made.seats == {
        f"{pool}-{n}": ReplicaShape(2, "L40S") for pool in ("prefill", "decode") for n in range(3)
    }
    assert scaling(tmp_path, pool={"min_replicas": 0}).config.prefill == 1
    assert scaling(tmp_path, {"prefill": 4}).config.prefill == 4


def test_workers_of_role_both_are_not_scaled(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="workers: an autoscaler scales pools"):
        scaling(tmp_path, {"workers": 2})


def test_given_numbers_are_within_the_gpus(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prefill: .* 4 GPUs, more than gpu_budget \(2\)") as caught:
        scaling(tmp_path, {"prefill": 3}, gpu_budget=2)
    assert caught.value.field == "prefill"
    made = scaling(tmp_path, {"prefill": 3}, gpu_budget=4)
    assert (made.config.prefill, made.config.decode) == (3, 1)
