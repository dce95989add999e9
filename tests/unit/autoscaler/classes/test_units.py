"""A pool of several classes as policies see it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoscaler.classes.replica_class import ReplicaClass
from autoscaler.classes.units import decode_in_units, prefill_in_units, unit_replicas
from autoscaler.classes.usable import longest_prompt_tokens, too_slow
from autoscaler.policies.policy_file import SloPool
from autoscaler.snapshot import (
    ClassSignals,
    DecodeSignals,
    PrefillSignals,
    Replica,
    ReplicaState,
    Snapshot,
    StepTimeModel,
)
from tests.support.scaling.snapshots import Load, snapshot

READY, STARTING = ReplicaState.READY, ReplicaState.STARTING
CLASSES = [
    {"name": "slow", "price_per_hour": 1},
    {"name": "fast", "price_per_hour": 2.5, "speed": 2.5},
]


def pool(**more: object) -> SloPool:
    return SloPool.model_validate({"target_ms": 1000, "classes": CLASSES, **more})


def replicas(*states: tuple[str, ReplicaState]) -> tuple[Replica, ...]:
    return tuple(
        Replica(f"r{number}", state, float(number), replica_class=kind)
        for number, (kind, state) in enumerate(states)
    )


def test_capacity_is_the_sum_of_speeds_and_a_rest_counts_once_it_is_whole() -> None:
    there = replicas(("fast", READY), ("slow", READY), ("fast", STARTING), ("slow", STARTING))
    units = unit_replicas(pool(), there)
    assert [unit.state for unit in units] == [READY] * 3 + [STARTING] * 4


def test_a_class_that_is_not_known_counts_as_the_default() -> None:
    assert len(unit_replicas(pool(), replicas(("", READY), ("gone", READY)))) == 2


def test_without_classes_nothing_changes() -> None:
    plain = SloPool.model_validate({"target_ms": 1000})
    given = snapshot()
    assert prefill_in_units(plain, given.prefill) is given.prefill
    assert decode_in_units(plain, given.decode) is given.decode


def test_a_mixed_pool_is_measured_as_a_whole() -> None:
    """The fast class makes less than its speed says: all units are slower, and their sum is what was measured."""
    signals = PrefillSignals(
        replicas(("slow", READY), ("slow", READY), ("fast", READY), ("fast", READY)),
        tokens_per_s=999.0,
        classes={"slow": ClassSignals(2, 1000.0), "fast": ClassSignals(2, 2000.0)},
    )
    units = prefill_in_units(pool(), signals)
    assert units.tokens_per_s is not None
    assert units.tokens_per_s * len(units.replicas) == pytest.approx(2 * 1000 + 2 * 2000)


@pytest.mark.parametrize("target_s", [0.03, 0.05, 0.1])
def test_a_fast_decode_replica_is_as_many_units_with_a_share_of_its_batch(target_s: float) -> None:
    fast = StepTimeModel(0.01, 0.0002, 1e-7)
    signals = DecodeSignals(
        replicas(("fast", READY)),
        kv_capacity_tokens=50_000,
        classes={"fast": ClassSignals(1, None, 50_000, 100, fast)},
    )
    unit = decode_in_units(pool(), signals)
    assert (unit.kv_capacity_tokens, unit.max_running_requests) == (20_000, 40)
    assert unit.step is not None

    def output_per_s(step: StepTimeModel) -> float:
        batch = (target_s - step.base_s) / (step.per_sequence_s + 1000 * step.per_context_token_s)
        return batch / target_s

    assert 2.5 * output_per_s(unit.step) == pytest.approx(output_per_s(fast))


def at(load: Load, **classes: ClassSignals) -> Snapshot:
    given = snapshot(load=load)
    return replace(given, prefill=replace(given.prefill, classes=classes))


def test_a_class_that_takes_too_long_for_the_longest_prompt_is_not_used() -> None:
    given = at(Load(prompt_tokens=1000), slow=ClassSignals(1, 2000.0))
    assert too_slow(pool(), "prefill", 1.0, given) == {}
    long = pool(longest_prompt_tokens=3000)
    assert too_slow(long, "prefill", 1.0, given).keys() == {"slow"}, "fast makes 5000/s by its speed"
    spot = ReplicaClass(name="spot", price_per_hour=1.0, speed=9.0, spot=True)
    floored = long.model_copy(update={"classes": (*long.classes, spot), "on_demand_floor": 1})
    assert too_slow(floored, "prefill", 0.5, given).keys() == {"slow"}, (
        "the fastest that carries the floor stays"
    )
    measured = at(Load(prompt_tokens=1000), slow=ClassSignals(1, 3500.0), fast=ClassSignals(1, 9000.0))
    assert too_slow(long, "prefill", 1.0, measured) == {}


def test_the_longest_mean_of_the_record_counts_where_no_length_is_given() -> None:
    assert longest_prompt_tokens(pool(), at(Load(prompt_tokens=7000))) == 7000
    assert too_slow(pool(), "prefill", 1.0, at(Load(prompt_tokens=7000))) == {}, "nothing is measured yet"


def test_where_all_are_too_slow_the_fastest_is_used() -> None:
    given = at(Load(prompt_tokens=100_000), slow=ClassSignals(1, 2000.0))
    assert too_slow(pool(), "prefill", 1.0, given).keys() == {"slow"}


def test_a_step_that_is_too_long_by_itself_rules_a_class_out() -> None:
    given = snapshot()
    classes = {"slow": ClassSignals(1, step=StepTimeModel(0.2, 0.001, 0.0))}
    given = replace(given, decode=replace(given.decode, classes=classes))
    assert too_slow(pool(), "decode", 0.1, given).keys() == {"slow"}
    assert too_slow(pool(), "decode", 0.3, given) == {}
