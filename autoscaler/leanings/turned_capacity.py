"""What moves of the coordinators' planners mean for a decision. Pure.

A policy goes on from the capacity that a side has now, not from what the last plan wanted there. And its figures are
means over a window that is older than the move: for so long they neither raise the side that a worker left, which would
have it back or replaced, nor lower the one that it came to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.snapshot import POOLS, LeaningTurn, PoolName


@dataclass(frozen=True, slots=True)
class TurnedCapacity:
    """Of one side, in replicas or units; negative: what left."""

    since_decision: int = 0
    of_late: int = 0

    def wanted(self, wanted: int, current: int) -> int:
        """What a policy wants, as far as moves of late do not speak against it."""
        if self.of_late:
            return min(wanted, current) if self.of_late < 0 else max(wanted, current)
        return wanted


def turned_capacity(
    policy: ScalingPolicy, turns: Iterable[LeaningTurn], decided_s: float
) -> Mapping[PoolName, TurnedCapacity]:
    """Of both sides. `decided_s`: when the last decision looked."""
    late, new = dict.fromkeys(POOLS, 0.0), dict.fromkeys(POOLS, 0.0)
    for turn in turns:
        for pool in POOLS:
            rules = policy.pools[pool]
            speed = rules.class_named(turn.replica_class).speed if rules.classes else 1.0
            change = speed if pool == turn.pool else -speed
            late[pool] += change
            new[pool] += change if turn.at_s > decided_s else 0.0
    return {pool: TurnedCapacity(round(new[pool]), round(late[pool])) for pool in POOLS}
