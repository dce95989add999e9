"""What each side must keep, and may have at most, while coordinators move leanings between two plans. Pure.

What a policy recommends is guidance: the total holds, but where the load turns workers may change sides before the
next decision. What an operator has given is binding: `min_replicas` and `max_replicas`, windows and counts of a
schedule, the bounds on the ratio, and what the shared link carries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autoscaler.policies.policy_file import ScalingPolicy, SchedulePool
from autoscaler.snapshot import POOLS, PoolName


@dataclass(frozen=True, slots=True)
class SideRoom:
    """Of one side, in replicas; in units where there are classes."""

    least: float
    most: float


def side_rooms(
    policy: ScalingPolicy,
    wanted: Mapping[PoolName, int],
    floors: Mapping[PoolName, int],
    carried: int | None,
) -> Mapping[PoolName, SideRoom]:
    """For a plan that wants these capacities; empty: nobody is moved. `floors` are the least that there may be as of
    now, `carried` the prefill replicas that the link carries."""
    if policy.workers != "neutral" or not all(wanted.values()):
        return {}
    total, ratio = sum(wanted.values()), policy.ratio
    least = {pool: float(min(floors[pool], wanted[pool])) for pool in POOLS}
    most = {pool: float(max(policy.pools[pool].max_replicas, wanted[pool])) for pool in POOLS}
    if (low := ratio.min_prefill_per_decode) is not None:
        held = math.ceil(low * total / (1 + low) - 1e-9)
        least["prefill"] = max(least["prefill"], min(held, wanted["prefill"]))
    if (high := ratio.max_prefill_per_decode) is not None:
        held = math.ceil(total / (1 + high) - 1e-9)
        least["decode"] = max(least["decode"], min(held, wanted["decode"]))
    if carried is not None:
        most["prefill"] = max(wanted["prefill"], min(most["prefill"], carried))
    for pool, rules in policy.pools.items():
        if isinstance(rules, SchedulePool):
            least[pool] = most[pool] = float(wanted[pool])
    return {pool: SideRoom(least[pool], most[pool]) for pool in POOLS}
