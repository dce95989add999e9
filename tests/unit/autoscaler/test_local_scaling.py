"""What `splitserve up --autoscale` starts at first, and with which options, where a policy has neutral workers of
several classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscaler.local_scaling import LocalScaling
from splitserve.cluster.placement import GpuWish, make_inventory
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
    assert made.seats == {f"worker-{n}": GpuWish(2, "L40S") for n in range(3)}
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


BIG = {
    "name": "big",
    "gpu": "H100",
    "gpus_per_replica": 2,
    "price_per_hour": 10,
    "speed": 4,
    "max_replicas": 1,
}
LITTLE = {"name": "little", "price_per_hour": 1, "max_replicas": 20}
DEAR: dict[str, Any] = {"budget_per_hour": 5}


def limited(
    folder: Path, workers: str, given: dict[str, int] | None = None, pool: Any = None, **limits: Any
) -> LocalScaling:
    both = {"target_ms": 100, "classes": [BIG, LITTLE], "max_replicas": 40, **(pool or {})}
    path = folder / "policy.yaml"
    path.write_text(yaml.safe_dump({"workers": workers, "prefill": both, "decode": both, **limits}))
    return LocalScaling.of(ClusterConfig.model_validate(given or {}), path)


@pytest.mark.parametrize("limits", [DEAR, {"gpu_budget": 2}, {"gpu_budget": 2, **DEAR}])
def test_where_the_first_class_does_not_fit_the_first_workers_are_the_cheapest_that_do(
    tmp_path: Path, limits: dict[str, Any]
) -> None:
    made = limited(tmp_path, "neutral", **limits)
    assert made.first == {"worker-0": "little", "worker-1": "little"}
    assert made.config.workers == 2
    made = limited(tmp_path, "pinned", **limits)
    assert made.first == {"prefill-0": "little", "decode-0": "little"}
    assert (made.config.prefill, made.config.decode) == (1, 1)
    assert made.seats["decode-0"] == GpuWish(1)


def test_first_workers_are_no_more_of_a_class_than_there_may_be(tmp_path: Path) -> None:
    """Five units on each side: one big one, of both sides together where they are neutral, and little ones."""
    made = limited(tmp_path, "neutral", pool={"min_replicas": 5})
    assert sorted(made.first.values()) == ["little"] * 10, "these are cheaper than the big one"
    few = [BIG, {**LITTLE, "max_replicas": 6}]
    made = limited(tmp_path, "neutral", pool={"min_replicas": 5, "classes": few})
    assert sorted(made.first.values()) == ["big", *["little"] * 6]
    made = limited(
        tmp_path, "pinned", pool={"min_replicas": 6, "classes": [BIG, {**LITTLE, "max_replicas": 2}]}
    )
    assert [made.first[name] for name in ("prefill-0", "prefill-1", "prefill-2")] == [
        "big",
        "little",
        "little",
    ]
    assert (made.config.prefill, made.config.decode) == (3, 3)
    assert (made.seats["decode-0"], made.seats["decode-1"]) == (GpuWish(2, "H100"), GpuWish(1))


def test_the_first_workers_hold_the_floor(tmp_path: Path) -> None:
    spot = {"name": "spot", "price_per_hour": 0.1, "spot": True, "max_replicas": 20}
    pool = {"classes": [BIG, LITTLE, spot], "on_demand_floor": "50%", "min_replicas": 4}
    for workers in ("neutral", "pinned"):
        found = sorted(limited(tmp_path, workers, pool=pool, **DEAR).first.values())
        assert found == [*["little"] * 4, *["spot"] * 4]


@pytest.mark.parametrize(
    ("workers", "given", "limits", "field", "error"),
    [
        (
            "neutral",
            {"workers": 2},
            {},
            "workers",
            "2 of the first class are more than max_replicas of class big",
        ),
        ("pinned", {"prefill": 1}, DEAR, "prefill", r"11 an hour, more than budget_per_hour \(5\)"),
        ("pinned", {"decode": 2}, {}, "decode", r"more than max_replicas of class big \(1\)"),
        ("pinned", {"prefill": 1, "decode": 1}, {"gpu_budget": 3}, "prefill", "4 GPUs, more than gpu_budget"),
    ],
)
def test_given_numbers_that_do_not_fit_end_the_start(
    tmp_path: Path, workers: str, given: dict[str, int], limits: dict[str, Any], field: str, error: str
) -> None:
    with pytest.raises(ConfigError, match=error) as caught:
        limited(tmp_path, workers, given, **limits)
    assert caught.value.field == field
    fitting = limited(tmp_path, "pinned", {"prefill": 1}, budget_per_hour=11)
    assert fitting.first == {"prefill-0": "big", "decode-0": "little"}


def test_given_numbers_of_workers_without_classes_are_within_the_gpus(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prefill: 3 .* 4 GPUs, more than gpu_budget \(2\)"):
        limited(tmp_path, "pinned", {"prefill": 3}, {"classes": []}, gpu_budget=2)
    made = limited(tmp_path, "pinned", {"prefill": 3}, {"classes": []}, gpu_budget=4)
    assert (made.first, made.config.prefill, made.config.decode) == ({}, 3, 1)
