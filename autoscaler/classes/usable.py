"""Which classes may be used: those that can meet the pool's latency target at all. Pure.

More replicas shorten queues. They shorten neither the time in which one replica computes one prompt, nor a step of one
sequence alone: a class that is too slow for these misses the target however many of it there are.
"""

from __future__ import annotations

from autoscaler.classes.on_demand_floor import NO_FLOOR
from autoscaler.classes.replica_class import ClassedPool, ReplicaClass
from autoscaler.snapshot import ClassSignals, PoolName, Snapshot


def too_slow(pool: ClassedPool, name: PoolName, target_s: float | None, snapshot: Snapshot) -> dict[str, str]:
    """Classes that must not be used now, with one line that says why. `snapshot` is not in units.

    A class that has not been measured is judged by those that were, and its speed; before any measurement all may be
    used. If all are too slow the fastest is used: none does better. If all are that carry a floor, so is the fastest of
    them.
    """
    if target_s is None:
        return {}
    judge = _slow_prefill if name == "prefill" else _slow_decode
    found = {one.name: why for one in pool.classes if (why := judge(pool, one, target_s, snapshot))}
    if len(found) == len(pool.classes):
        found.pop(max(pool.classes, key=lambda one: one.speed).name)
    plain = [one for one in pool.classes if not one.spot]
    if pool.floor != NO_FLOOR and plain and all(one.name in found for one in plain):
        found.pop(max(plain, key=lambda one: one.speed).name)
    return found


def longest_prompt_tokens(pool: ClassedPool, snapshot: Snapshot) -> float:
    """The prompt that each class must compute in time, tokens."""
    if pool.longest_prompt_tokens is not None:
        return pool.longest_prompt_tokens
    means = [bucket.uncached_tokens / bucket.requests for bucket in snapshot.arrivals if bucket.requests]
    return max(means, default=0.0)


def _slow_prefill(pool: ClassedPool, one: ReplicaClass, target_s: float, snapshot: Snapshot) -> str:
    rate = _rate(pool, one, snapshot)
    tokens = longest_prompt_tokens(pool, snapshot)
    if not rate or tokens / rate <= target_s:
        return ""
    return f"{one.name} computes {tokens:.0f} tokens in {tokens / rate:.2f} s, beyond {target_s:.2f} s"


def _rate(pool: ClassedPool, one: ReplicaClass, snapshot: Snapshot) -> float | None:
    """Tokens per second of a replica of this class."""
    # What says its class goes before what only counts as the default.
    known = sorted(snapshot.prefill.classes.items(), key=lambda named: named[0] in pool.speeds)
    rates = {pool.class_named(name): signals.tokens_per_s for name, signals in known if signals.tokens_per_s}
    if one in rates:
        return rates[one]
    by_unit = [rate / known.speed for known, rate in rates.items()]
    return one.speed * sum(by_unit) / len(by_unit) if by_unit else None


def _slow_decode(pool: ClassedPool, one: ReplicaClass, target_s: float, snapshot: Snapshot) -> str:
    """By measurement alone: `speed` of decode does not say how long its steps are."""
    signals = _of_class(pool, one, snapshot)
    if signals is None or signals.step is None:
        return ""
    running = snapshot.decode.running_requests
    context = snapshot.decode.context_tokens / running if running else 0.0
    step_s = signals.step.step_s(1, context)
    if step_s <= target_s:
        return ""
    return (
        f"a step of {one.name} takes {step_s * 1e3:.0f} ms for one sequence, beyond {target_s * 1e3:.0f} ms"
    )


def _of_class(pool: ClassedPool, one: ReplicaClass, snapshot: Snapshot) -> ClassSignals | None:
    for name, signals in snapshot.decode.classes.items():
        if pool.class_named(name) is one:
            return signals
    return None
