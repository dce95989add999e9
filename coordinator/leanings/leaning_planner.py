"""Which neutral worker is to lean to the other side. Pure; time is an argument, in seconds on one clock.

A worker is moved if the pressure on one side is above 1 and 1.3 times that of the other in two looks a second apart; at
most one in 5 s, and none back within 30 s. Each side keeps at least one worker; a side that has none gets one.

With several coordinators there is one planner in each. They see the same reports, so they choose the same worker: what
only one of them knows plays no part in who moves. And a move that any of them has asked for is seen by all, in the
worker's reports, and counts as one's own: nobody takes the worker back within 30 s, or moves another within 5 s.
An order ends when the worker has followed, so that none stands against what another asks for later.

Under a plan of an autoscaler only those are moved that it leaves to the planner, and for 30 s after a plan has moved a
worker nobody goes the other way, so that plans and planner do not take turns.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coordinator.leanings.pressure import Pressure, WorkerWork
from coordinator.workers.snapshot import PoolName, WorkerKey

LOOK_EVERY_S = 1.0
MOVE_EVERY_S = 5.0
RETURN_AFTER_S = 30.0
ORDER_LASTS_S = 30.0
"""How long a worker is asked: by then it has prepared for the other side, or given up."""
CLEARLY = 1.3
"""How many times the pressure of the other side one must have."""
_EARLY_S = 0.05
"""Looks may be this much less than a second apart: timers are not exact."""


@dataclass(frozen=True, slots=True)
class LeaningOrder:
    """A worker that is asked to lean somewhere, since when."""

    key: WorkerKey
    pool: PoolName
    since_s: float


@dataclass(frozen=True, slots=True)
class LeaningMemory:
    """What a planner keeps between two looks. Losing it costs hysteresis, nothing else."""

    leaned: Mapping[WorkerKey, PoolName] = field(default_factory=dict)
    """As the workers reported at the last look."""
    changed_s: Mapping[WorkerKey, float] = field(default_factory=dict)
    """When workers last changed, or were last asked to, whoever asked."""
    moved_s: float = float("-inf")
    """When any of them did."""
    wanted: PoolName | None = None
    """The side that lacked workers at the last look."""
    wanted_s: float = 0.0
    """Since when it does."""
    order: LeaningOrder | None = None
    told: PoolName | None = None
    """Where the last worker turned that had no order of this planner."""
    told_s: float = float("-inf")
    """When it did."""


def plan_leanings(
    memory: LeaningMemory,
    works: Sequence[WorkerWork],
    pressure: Pressure | None,
    now: float,
    movable: Collection[WorkerKey] | None = None,
) -> LeaningMemory:
    """One look: the memory with the order in force, if any. `works`: all workers of a model that take requests;
    `pressure`: None while somebody else decides, or nothing is known; `movable`: those that the plan of an autoscaler
    leaves to this planner, None where there is no such plan."""
    memory = _seen(memory, works, now)
    wanted = _wanted(works, pressure)
    since_s = memory.wanted_s if wanted == memory.wanted else now
    memory = replace(memory, wanted=wanted, wanted_s=since_s)
    if pressure is None or movable == frozenset():
        return replace(memory, order=None)
    if movable is not None and memory.order is not None and memory.order.key not in movable:
        memory = replace(memory, order=None)
    if memory.order is not None or wanted is None:
        return memory
    if now - since_s < LOOK_EVERY_S - _EARLY_S or now - memory.moved_s < MOVE_EVERY_S:
        return memory
    if movable is not None and memory.told not in (None, wanted) and now - memory.told_s < RETURN_AFTER_S:
        return memory
    able = [
        work
        for work in works
        if work.neutral
        and work.pool != wanted
        and (movable is None or work.key in movable)
        and now - memory.changed_s.get(work.key, float("-inf")) >= RETURN_AFTER_S
    ]
    if not able:
        return memory
    chosen = min(able, key=lambda work: (_times_faster(work, able), _left_behind(work), work.key))
    return replace(
        memory,
        order=LeaningOrder(chosen.key, wanted, now),
        changed_s={**memory.changed_s, chosen.key: now},
        moved_s=now,
    )


def _seen(memory: LeaningMemory, works: Sequence[WorkerWork], now: float) -> LeaningMemory:
    """Takes note of who leans where, and of what has become of the order."""
    leaned = {work.key: work.pool for work in works}
    changed = [key for key, pool in leaned.items() if memory.leaned.get(key, pool) != pool]
    kept = {
        key: at_s for key, at_s in memory.changed_s.items() if key in leaned or now - at_s < RETURN_AFTER_S
    }
    order = memory.order
    told = [leaned[key] for key in changed if order is None or key != order.key]
    if order is not None and (
        leaned.get(order.key, order.pool) == order.pool or now - order.since_s >= ORDER_LASTS_S
    ):
        order = None
    return replace(
        memory,
        leaned={**{key: pool for key, pool in memory.leaned.items() if key in kept}, **leaned},
        changed_s={**kept, **dict.fromkeys(changed, now)},
        moved_s=now if changed else memory.moved_s,
        order=order,
        told=told[-1] if told else memory.told,
        told_s=now if told else memory.told_s,
    )


def _wanted(works: Sequence[WorkerWork], pressure: Pressure | None) -> PoolName | None:
    """The side that another worker is to lean to, if the other one can do without one."""
    counts: dict[PoolName, int] = {
        "prefill": sum(work.pool == "prefill" for work in works),
        "decode": sum(work.pool == "decode" for work in works),
    }
    sides: tuple[tuple[PoolName, PoolName], ...] = (("prefill", "decode"), ("decode", "prefill"))
    for side, other in sides:
        if counts[other] < 2 or pressure is None:
            continue
        if not counts[side]:
            return side
        if pressure.of(side) > 1 and pressure.of(side) > CLEARLY * pressure.of(other):
            return side
    return None


def _times_faster(work: WorkerWork, able: Sequence[WorkerWork]) -> int:
    """Of workers of several classes a slow one goes first: a fast one would leave more behind than is missing. By its
    rate of prompts, in doublings of the slowest one's: workers of one class measure nearly the same."""
    rates = [one.prompt_tokens_per_s for one in able if one.prompt_tokens_per_s]
    if not rates or not work.prompt_tokens_per_s:
        return 0
    return round(math.log2(work.prompt_tokens_per_s / min(rates)))


def _left_behind(work: WorkerWork) -> float:
    """The work of the kind that a worker turns away from."""
    return work.prompt_s if work.pool == "prefill" else float(work.streams)
