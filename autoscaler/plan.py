"""The joint plan: both pools' proposals under one GPU budget, one shared link and bounds on their ratio.

In this order: the bounds on the ratio add replicas; a shared link caps prefill; the budget removes replicas, standby
first, then from the less loaded pool. Pure and deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autoscaler.classes.on_demand_floor import NO_FLOOR, OnDemandFloor
from autoscaler.leanings.side_room import SideRoom
from autoscaler.policies.joint_limits import gpu_budget, link_carries, within_ratio
from autoscaler.policies.policy_file import AnyPool, ScalingPolicy
from autoscaler.sharing.claims.shared_view import GpuShare
from autoscaler.sharing.claims.shares import Claim
from autoscaler.snapshot import PoolName, Snapshot

Cause = Literal[
    "policy",
    "schedule",
    "silent_coordinator",
    "bounds",
    "ratio",
    "link",
    "gpu_budget",
    "money_budget",
    "from_zero",
    "to_zero",
    "one_neutral",
]
"""What decided a count last: the pool's policy, its schedule, a coordinator that does not answer, the pool's bounds and
`behavior`, the bounds on the ratio, the shared link, the GPU budget, the budget in money, requests that wait for the
first workers, idleness, one neutral worker that serves both pools."""


@dataclass(frozen=True, slots=True)
class ClassShare:
    """One class of a pool's replicas in a plan."""

    name: str
    count: int
    """Replicas of our own that it shall have."""
    speed: float = 1.0
    """Units of one replica; a unit is a replica of speed 1."""
    price_per_hour: float = 0.0
    gpus: int = 1
    """GPUs of one replica."""
    gpu: str = ""
    """Their kind; empty: any."""
    most: int = 10_000
    """Replicas at most; 0 where it must not be used now."""
    spot: bool = False
    """Whether its machines may be taken away."""
    standby: int = 0
    """Replicas beside `count` that it shall have on standby."""
    kinds: tuple[str, ...] = ()
    """Limits by kind that its GPUs count in, as `ScalingPlan.gpu_limits` names them."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """`desired` replicas in rotation (pending ones counted), and `standby` warm ones beside them."""

    desired: int
    standby: int = 0
    reason: str = ""
    """One line for operators."""
    error: str = ""
    """What the pool's policy failed with."""
    cause: Cause = "policy"
    units: float | None = None
    """With classes: the capacity that is wanted of `mix`, in replicas of speed 1; `desired` then counts the replicas of
    `mix` and those that others have. None: all replicas are alike."""
    mix: tuple[ClassShare, ...] = ()
    """All classes of the pool; empty: all replicas are alike."""
    floor: OnDemandFloor = NO_FLOOR
    """What of `units` must not be on spot machines, with the units that others have."""
    sleep: bool = False
    """Whether its standbys sleep."""
    gives: str = ""
    """The class of which one replica that is too much ends at once: what replaces it has no room before."""

    @property
    def given_up(self) -> bool:
        """Whether nobody has asked for anything for so long that the pool is given up: what still starts ends, too.
        Else, where the coordinators see no replica at all, they may have just restarted, and nothing is drained."""
        return self.cause == "to_zero"

    @property
    def capacity(self) -> int:
        """What its policy and `behavior` go on from: replicas, or units where there are classes."""
        return self.desired if self.units is None else round(self.units + self.floor.others)

    @property
    def price_per_hour(self) -> float | None:
        """Of `mix`, standbys included; None without classes."""
        return sum((one.count + one.standby) * one.price_per_hour for one in self.mix) if self.mix else None


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """A decision for both pools."""

    prefill: PoolPlan
    decode: PoolPlan
    lend_decode_to_prefill: bool = False
    """Decode workers compute prompts themselves, where that is faster, while prefill replicas start."""
    budget_per_hour: float | None = None
    """What all replicas of pools with classes may cost, those that start or drain included."""
    gpu_budget: int | None = None
    """GPUs that they may have, likewise."""
    gpu_limits: Mapping[str, int] = field(default_factory=dict)
    """GPUs of a kind, likewise, by the name of the limit."""
    class_room: Mapping[str, int] = field(default_factory=dict)
    """How many more replicas of a class may be started now, where several models share its limit."""
    one_price_list: bool = False
    """Whether both pools have the same classes, of neutral workers: each may lean to either."""
    rooms: Mapping[PoolName, SideRoom] = field(default_factory=dict)
    """How far coordinators' planners may move neutral workers until the next plan; empty: they move none."""
    claims: Mapping[str, Claim] = field(default_factory=dict)
    """What the pools want, or both as one, for other models on the same inventory to know; empty: there are none."""
    worth_moving: bool = False
    """Whether all of these models together would do much better if some gave up what they have."""

    def pool(self, name: PoolName) -> PoolPlan:
        """The plan of one pool."""
        return self.prefill if name == "prefill" else self.decode

    @property
    def is_at_zero(self) -> bool:
        """Whether a pool is to have no replica."""
        return 0 in (self.prefill.desired, self.decode.desired)

    @property
    def numbers(self) -> tuple[object, ...]:
        """What it decides, without the reasons."""
        wanted = [(pool.desired, pool.standby, pool.mix) for pool in (self.prefill, self.decode)]
        return *wanted, self.lend_decode_to_prefill


Memory = Any
"""A decider's memory between decisions: an immutable value of its own type; None at first."""

Decide = Callable[[Memory, Snapshot], tuple[ScalingPlan, Memory]]
"""A policy: pure, so that the simulator replays what production runs. It reads no clock and does no I/O."""

WORTH_MOVING = 0.1
"""GPUs move from pool to pool only if that lowers the worse pool's overload by this share."""
MOST_ALONE = 0.5
"""One neutral worker serves both pools while they keep less than this share of it busy."""
ALONE_AGAIN = 0.3
"""And again from here on, once there are two."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """One pool's proposal, without regard to the other pool."""

    count: int
    """Replicas in rotation, within the pool's bounds and `behavior`."""
    need: float
    """Replicas kept busy by the demand, not rounded."""
    current: int
    """Desired replicas of the last plan."""
    ready: int
    reason: str
    error: str = ""
    cause: Cause = "policy"
    least: int = 1
    """Fewest replicas as of now, which the GPU budget leaves."""


Notes = dict[PoolName, list[tuple[Cause, str]]]
"""What decided each pool's count, in order, with one line for operators."""


def one_neutral(policy: ScalingPolicy, prefill: Proposal, decode: Proposal) -> Proposal:
    """The prefill pool's proposal: 0 while the one neutral worker in decode has time for both pools."""
    if policy.workers != "neutral" or policy.prefill.min_replicas or policy.decode.min_replicas:
        return prefill
    most = ALONE_AGAIN if prefill.current else MOST_ALONE
    if prefill.count != 1 or decode.count != 1 or prefill.need + decode.need > most:
        return prefill
    reason = f"one neutral worker serves both pools; {prefill.reason}"
    return replace(prefill, count=0, reason=reason, cause="one_neutral")


def joint_plan(
    policy: ScalingPolicy,
    snapshot: Snapshot,
    prefill: Proposal,
    decode: Proposal,
    lending: bool = False,
    most: GpuShare | None = None,
) -> ScalingPlan:
    """The plan for both pools. `lending`: the last plan lent decode workers to prefill. `most`: its share of the
    GPUs of several models."""
    prefill = one_neutral(policy, prefill, decode)
    p, d = prefill.count, decode.count
    notes: Notes = {
        "prefill": [(prefill.cause, prefill.reason)],
        "decode": [(decode.cause, decode.reason)],
    }
    p, d, raised = within_ratio(policy, p, d)
    for pool_name, why in raised.items():
        notes[pool_name].append(("ratio", why))
    carried = link_carries(policy, snapshot)
    if carried is not None and p > max(carried, policy.prefill.min_replicas):
        p = max(carried, policy.prefill.min_replicas)
        why = f"the link carries the KV of {carried} prefill replicas: more add nothing"
        notes["prefill"].append(("link", why))
    standby = (policy.prefill.warm_standby, policy.decode.warm_standby)
    proposals = Proposals(prefill, decode, most)
    p, d, standby = _within_budget(policy, snapshot, proposals, p, d, standby, notes)
    pools = ((prefill, policy.prefill, p, standby[0]), (decode, policy.decode, d, standby[1]))
    plans = [
        PoolPlan(count, warm, _text(told), one.error, told[-1][0], sleep=pool.sleep)
        for (one, pool, count, warm), told in zip(pools, notes.values(), strict=True)
    ]
    return ScalingPlan(
        plans[0], plans[1], lend_decode_to_prefill=_lend(policy, snapshot, prefill, decode, p, lending)
    )


def _text(notes: list[tuple[Cause, str]]) -> str:
    return "; ".join(text for _, text in notes)


@dataclass(frozen=True, slots=True)
class Proposals:
    """Both pools' proposals, and what they may have of the GPUs that several models share."""

    prefill: Proposal
    decode: Proposal
    most: GpuShare | None = None

    def pool(self, name: PoolName) -> Proposal:
        """That of one pool."""
        return self.prefill if name == "prefill" else self.decode

    def overload(self, p: int, d: int) -> float:
        """Demand over capacity of the worse pool, with `p` prefill and `d` decode replicas."""
        return max(self.prefill.need / max(p, 1), self.decode.need / max(d, 1))


def _within_budget(
    policy: ScalingPolicy,
    snapshot: Snapshot,
    proposals: Proposals,
    p: int,
    d: int,
    standby: tuple[int, int],
    notes: Notes,
) -> tuple[int, int, tuple[int, int]]:
    budget, among = gpu_budget(policy, snapshot), ""
    if (most := proposals.most) is not None and (budget is None or most.gpus < budget):
        budget, among = most.gpus, most.among
    if budget is None or _gpus(policy, p, d, standby) <= budget:
        return p, d, standby
    standby = _less_standby(policy, p, d, standby, budget)
    if _gpus(policy, p, d, standby) > budget:
        wanted = (p, d)
        p, d = _shared(policy, proposals, p, d, budget)
        for name, count, before in (("prefill", p, wanted[0]), ("decode", d, wanted[1])):
            if count < before:
                why = f"{before} wanted, {count} within a budget of {budget} GPUs{among}"
                notes["prefill" if name == "prefill" else "decode"].append(("gpu_budget", why))
    return p, d, standby


def _gpus(policy: ScalingPolicy, p: int, d: int, standby: tuple[int, int]) -> int:
    return (p + standby[0]) * policy.prefill.gpus_per_replica + (
        d + standby[1]
    ) * policy.decode.gpus_per_replica


def _less_standby(
    policy: ScalingPolicy, p: int, d: int, standby: tuple[int, int], budget: int
) -> tuple[int, int]:
    """Standby that fits beside the replicas in rotation. The larger standby is reduced first."""
    left = list(standby)
    takes = (policy.prefill.gpus_per_replica, policy.decode.gpus_per_replica)
    while _gpus(policy, p, d, (left[0], left[1])) > budget:
        able = [index for index in (0, 1) if left[index] > 0 and takes[index] > 0]
        if not able:
            break
        left[max(able, key=lambda index: left[index])] -= 1
    return left[0], left[1]


def _shared(policy: ScalingPolicy, proposals: Proposals, p: int, d: int, budget: int) -> tuple[int, int]:
    """The budget shared by predicted harm: from both minima on, the next GPUs go to the pool with the higher demand
    over capacity, decode first when equal, because a full decode pool holds prefill up as well.

    Where a pool would lose replicas that it has to the other, that must be worth it: else the counts stay.
    """
    share_p, share_d = _by_harm(policy, proposals, p, d, budget)
    now_p, now_d = proposals.prefill.current, proposals.decode.current
    moves = (share_p < now_p and share_d > now_d) or (share_d < now_d and share_p > now_p)
    fits = _gpus(policy, now_p, now_d, (0, 0)) <= budget
    gain = proposals.overload(now_p, now_d) - proposals.overload(share_p, share_d)
    if moves and fits and gain < WORTH_MOVING * proposals.overload(now_p, now_d):
        return now_p, now_d
    return share_p, share_d


def _by_harm(policy: ScalingPolicy, proposals: Proposals, p: int, d: int, budget: int) -> tuple[int, int]:
    share_p, share_d = min(p, proposals.prefill.least), min(d, proposals.decode.least)
    while True:
        more_p = share_p < p and _gpus(policy, share_p + 1, share_d, (0, 0)) <= budget
        more_d = share_d < d and _gpus(policy, share_p, share_d + 1, (0, 0)) <= budget
        if not more_p and not more_d:
            return share_p, share_d
        prefill_worse = proposals.prefill.need / max(share_p, 1) > proposals.decode.need / max(share_d, 1)
        if more_p and (prefill_worse or not more_d):
            share_p += 1
        else:
            share_d += 1


def _lend(
    policy: ScalingPolicy, snapshot: Snapshot, prefill: Proposal, decode: Proposal, p: int, lending: bool
) -> bool:
    """Whether decode workers shall compute prompts themselves: while prefill replicas are on their way, decode has at
    least a replica's worth of steps to spare, and what waits for prefill would miss the target otherwise."""
    rate = snapshot.prefill.tokens_per_s
    if not policy.lend_decode or prefill.ready >= p or not rate or decode.need > decode.ready - 1:
        return False
    wait_s = snapshot.prefill.backlog_tokens / (rate * prefill.ready) if prefill.ready else math.inf
    target_s = _target_s(policy.prefill)
    return wait_s > (target_s / 2 if lending else target_s)


def _target_s(pool: AnyPool) -> float:
    return pool.target_ms / 1e3 if pool.kind in ("slo", "predictive") else 1.0
