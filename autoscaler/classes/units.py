"""A pool of several classes as policies see it: so many replicas of speed 1. Pure.

A replica of speed s counts as s replicas ("units") that share its work: each computes a prompt token at 1/s of its
rate, and has 1/s of its batch and of its KV, with steps as long as its own. So a pool's capacity in units is the sum
over all that serve, and a policy that knows nothing of classes sizes a mixed pool.

Signals of a unit are means over the replicas that serve, weighted by units: a class whose speed is given too high makes
all units slower, so that the sum is what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoscaler.classes.replica_class import ClassedPool
from autoscaler.snapshot import (
    ClassSignals,
    DecodeSignals,
    PrefillSignals,
    Replica,
    ReplicaState,
    StepTimeModel,
)

_ORDER = (
    ReplicaState.READY,
    ReplicaState.STARTING,
    ReplicaState.STANDBY,
    ReplicaState.DRAINING,
    ReplicaState.OVERDUE,
    ReplicaState.PREEMPTED,
)


def prefill_in_units(pool: ClassedPool, signals: PrefillSignals) -> PrefillSignals:
    """The pool's signals by units; as they are without classes."""
    if not pool.classes:
        return signals
    rates = [(s, n, one.tokens_per_s) for s, n, one in _measured(pool, signals.classes) if one.tokens_per_s]
    units = sum(speed * count for speed, count, _ in rates)
    unit_rate = sum(count * rate for _, count, rate in rates) / units if units else None
    return replace(signals, replicas=unit_replicas(pool, signals.replicas), tokens_per_s=unit_rate)


def decode_in_units(pool: ClassedPool, signals: DecodeSignals) -> DecodeSignals:
    """The pool's signals by units; as they are without classes."""
    if not pool.classes:
        return signals
    found = _measured(pool, signals.classes)
    room = [(n * s, one.kv_capacity_tokens / s) for s, n, one in found if one.kv_capacity_tokens]
    batches = [(n * s, one.max_running_requests / s) for s, n, one in found if one.max_running_requests]
    kv_tokens, batch = _mean(room), _mean(batches)
    return replace(
        signals,
        replicas=unit_replicas(pool, signals.replicas),
        kv_capacity_tokens=None if kv_tokens is None else round(kv_tokens),
        max_running_requests=None if batch is None else max(1, round(batch)),
        step=_unit_step(found),
    )


def unit_replicas(pool: ClassedPool, replicas: Sequence[Replica]) -> tuple[Replica, ...]:
    """One entry a unit, in the states of those that it is made of. A rest counts with the next state: it is whole once
    those are up."""
    units: list[Replica] = []
    reached = 0.0
    for state in _ORDER:
        for one in sorted((r for r in replicas if r.state is state), key=lambda r: (r.since_s, r.name)):
            reached += pool.class_named(one.replica_class).speed
            while len(units) + 1 <= reached + 1e-9:
                units.append(replace(one, name=f"{one.name}/{len(units)}"))
    return tuple(units)


def mean_speed(pool: ClassedPool, signals: PrefillSignals) -> float:
    """Units of a replica that serves, on average: so many share its lane."""
    speeds = _measured(pool, signals.classes) if pool.classes else []
    replicas = sum(count for _, count, _ in speeds)
    return sum(speed * count for speed, count, _ in speeds) / replicas if replicas else 1.0


def _measured(
    pool: ClassedPool, classes: Mapping[str, ClassSignals]
) -> list[tuple[float, int, ClassSignals]]:
    """(speed, replicas, their signals) of each class that serves."""
    return [
        (pool.class_named(name).speed, max(1, one.replicas), one) for name, one in sorted(classes.items())
    ]


def _unit_step(found: Sequence[tuple[float, int, ClassSignals]]) -> StepTimeModel | None:
    fits = [(count * speed, speed, one.step) for speed, count, one in found if one.step is not None]
    base = _mean([(weight, step.base_s) for weight, _, step in fits])
    each = _mean([(weight, step.per_sequence_s * speed) for weight, speed, step in fits])
    token = _mean([(weight, step.per_context_token_s * speed) for weight, speed, step in fits])
    if base is None or each is None or token is None:
        return None
    return StepTimeModel(base, each, token)


def _mean(weighted: Sequence[tuple[float, float]]) -> float | None:
    total = sum(weight for weight, _ in weighted)
    return sum(weight * value for weight, value in weighted) / total if total else None
