"""What `splitserve up --autoscale` starts at first, and with which options, where a policy has neutral workers of
several classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from autoscaler.local_scaling import LocalScaling
from splitserve.cluster.placement import make_inventory
from splitserve.config.cluster import ClusterConfig
from splitserve.errors import ConfigError

DEFAULT = {"name": "l40s", "gpu": "L40S", "gpus_per_replica": 2, "price_per_hour": 1, "speed": 2}
SLOW = {"name": "t4", "gpu": "T4", "gpus_per_replica": 1, "price_per_hour": 0.4}


def scaling(folder: Path, **config: object) -> LocalScaling:
    classes = [DEFAULT, {**SLOW, "worker_options": ["--threads", "1"]}]
    pool = {"target_ms": 100, "classes": classes, "drain_s": 10}
    policy = {"workers": "neutral", "prefill": pool | {"min_replicas": 3}, "decode": pool | {"drain_s": 30}}
    path = folder / "policy.yaml"
    path.write_text(yaml.safe_dump(policy))
    return LocalScaling.of(ClusterConfig.model_validate(config), path)


def test_it_starts_with_workers_of_the_default_class_for_the_least_of_both_sides(tmp_path: Path) -> None:
    """Three units of prefill are two workers of speed 2, one of decode is one."""
    made = scaling(tmp_path)
    assert (made.config.workers, made.config.worker_gpus) == (3, 2)
    assert made.gpu_kinds == {"prefill": "L40S", "decode": "L40S"}
    assert scaling(tmp_path, workers=4).config.workers == 4
    with pytest.raises(ConfigError, match="workers: 2 neutral workers and prefill at once"):
        scaling(tmp_path, workers=2, prefill=1)


def test_a_worker_has_the_options_of_its_class_wherever_it_leans(tmp_path: Path) -> None:
    made = scaling(tmp_path)

    def command(role: str, options: Sequence[str]) -> tuple[str, ...]:
        return role, *options

    place = make_inventory([0], 1, pin_cores=False).take("worker-7", "worker", 0)
    slow = made.neutral_spec(command, "decode", "worker-7", place, "t4")
    assert slow.command[-4:] == ("--replica-class", "t4", "--threads", "1")
    assert (slow.role, slow.leaning, slow.replica_class) == ("worker", "decode", "t4")
    first = made.neutral_spec(command, "prefill", "worker-0", place)
    assert first.command[-2:] == ("--replica-class", "l40s")
    assert first.replica_class == "l40s"
