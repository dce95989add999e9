"""What a policy with replica classes must keep over several of its fields. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from autoscaler.classes.mix import cheapest_mix, leanest_mix
from autoscaler.classes.neutral.joint_mix import joint_mix, total_mix
from autoscaler.classes.on_demand_floor import OnDemandFloor
from autoscaler.classes.replica_class import ReplicaClass
from autoscaler.classes.search.offer import MixSide, offers_of, without
from autoscaler.policies.behavior import broken_rule
from autoscaler.sharing.claims.shares import counted_in, of_kind
from autoscaler.snapshot import PoolName
from splitserve.gpus.kinds import is_slices


class _Pool(Protocol):
    @property
    def classes(self) -> tuple[ReplicaClass, ...]: ...
    @property
    def gpus_per_replica(self) -> int: ...
    @property
    def floor(self) -> OnDemandFloor: ...
    @property
    def warm_standby(self) -> int: ...


class _Policy(Protocol):
    @property
    def workers(self) -> str: ...
    @property
    def pools(self) -> Mapping[PoolName, _Pool]: ...
    @property
    def gpu_budget(self) -> int | None: ...
    @property
    def budget_per_hour(self) -> float | None: ...
    @property
    def gpu_limits(self) -> Mapping[str, int]: ...
    @property
    def least_awake(self) -> tuple[int, int]: ...


def check_classes(policy: _Policy) -> None:
    """Raises the error of the first rule that is broken."""
    pools = policy.pools
    for name, pool in pools.items():
        if not pool.classes:
            continue
        _check_slices(name, pool)
    if policy.workers == "neutral":
        _check_one_price_list(pools)
    classed = [name for name, pool in pools.items() if pool.classes]
    if policy.gpu_budget is not None and len(classed) == 1:
        raise broken_rule(
            f"gpu_budget ({policy.gpu_budget}) needs classes in both pools or in none: {classed[0]} has some"
        )
    _check_kinds(policy)
    if policy.budget_per_hour is None:
        return
    for name, pool in pools.items():
        if not pool.classes:
            raise broken_rule(
                f"budget_per_hour ({policy.budget_per_hour:g}) needs {name}.classes with their prices"
            )
    of_all = least_price_of_neutral if policy.workers == "neutral" else least_price_per_hour
    least = of_all(list(pools.values()), policy.least_awake)
    if least > policy.budget_per_hour:
        raise broken_rule(
            f"budget_per_hour ({policy.budget_per_hour:g}) must hold min_replicas and warm_standby of both pools, with "
            f"their on_demand_floor: {least:g}"
        )


def _check_kinds(policy: _Policy) -> None:
    """Each limit by kind is of a class, and each pool alone has its least within them."""
    limits = {of_kind(kind): float(most) for kind, most in policy.gpu_limits.items()}
    for (name, pool), units in zip(policy.pools.items() if limits else (), policy.least_awake, strict=False):
        if not pool.classes:
            raise broken_rule(f"gpu_limits need {name}.classes with the kind of their GPUs")
        offers = [
            replace(offer, kinds=counted_in(one.gpu, limits))
            for one, offer in zip(
                pool.classes, offers_of(pool.classes, gpus_each=pool.gpus_per_replica), strict=True
            )
        ]
        if cheapest_mix(offers, units, floor=pool.floor.within(units), kinds=limits).units < units:
            raise broken_rule(f"gpu_limits must hold min_replicas of {name}: {units}")
    for kind in policy.gpu_limits:
        named = [one.gpu for pool in policy.pools.values() for one in pool.classes]
        if not any(counted_in(gpu, (of_kind(kind),)) for gpu in named):
            raise broken_rule(f"gpu_limits names {kind}, which is the gpu of no class")


_OF_THE_WORKER = ("name", "gpu", "price_per_hour", "max_replicas", "spot", "worker_options")
"""What a class says of its workers, on whichever side; `speed` is of one side."""


def _check_one_price_list(pools: Mapping[PoolName, _Pool]) -> None:
    """One neutral worker is of one class, wherever it leans."""
    prefill, decode = pools["prefill"], pools["decode"]
    if len(prefill.classes) != len(decode.classes):
        counts = f"{len(prefill.classes)} and {len(decode.classes)}"
        raise broken_rule(
            f"decode.classes of neutral workers must be those of prefill, but for speed: there are {counts}"
        )
    for number, (one, other) in enumerate(zip(prefill.classes, decode.classes, strict=True)):
        field = f"decode.classes.{number}"
        for what in _OF_THE_WORKER:
            here, there = getattr(other, what), getattr(one, what)
            if here != there:
                raise broken_rule(
                    f"{field}.{what} of neutral workers must be that of prefill, {_shown(there)}, not {_shown(here)}"
                )
        gpus = one.gpus_or(prefill.gpus_per_replica), other.gpus_or(decode.gpus_per_replica)
        if gpus[0] != gpus[1]:
            raise broken_rule(
                f"{field}.gpus_per_replica of neutral workers must be that of prefill, {gpus[0]}, not {gpus[1]}"
            )


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _check_slices(name: PoolName, pool: _Pool) -> None:
    for number, one in enumerate(pool.classes):
        gpus = one.gpus_or(pool.gpus_per_replica)
        if gpus > 1 and is_slices(one.gpu):
            field = f"{name}.classes.{number}.gpus_per_replica"
            raise broken_rule(
                f"{field} ({gpus}) must be 1 with gpu {one.gpu!r}: CUDA shows a process one slice"
            )


def least_price_per_hour(pools: Sequence[_Pool], least: Sequence[int]) -> float:
    """What the cheapest replicas for these capacities cost for an hour, with standbys."""
    price = 0.0
    for pool, units in zip(pools, least, strict=True):
        offers = offers_of(pool.classes)
        mix = cheapest_mix(offers, units, floor=pool.floor.within(units))
        price += mix.price_per_hour + cheapest_mix(without(offers, mix), pool.warm_standby).price_per_hour
    return price


def least_price_of_neutral(pools: Sequence[_Pool], least: Sequence[int]) -> float:
    """The same of neutral workers, of which there are no more of a class than its limit on both sides together."""
    offers = [tuple(offers_of(pool.classes)) for pool in pools]
    prefill, decode = (
        MixSide(of_side, units, pool.floor.within(units))
        for pool, of_side, units in zip(pools, offers, least, strict=True)
    )
    taken = total_mix(joint_mix(prefill, decode), offers[0])
    for pool, of_side in zip(pools, offers, strict=True):
        standbys = cheapest_mix(without(of_side, taken), pool.warm_standby)
        taken = total_mix((taken, standbys), of_side)
    return taken.price_per_hour


def least_gpus(pools: Sequence[_Pool], least: Sequence[int]) -> int:
    """The fewest GPUs for these capacities, with standbys."""
    gpus = 0
    for pool, units in zip(pools, least, strict=True):
        if not pool.classes:
            gpus += (units + pool.warm_standby) * pool.gpus_per_replica
            continue
        offers = offers_of(pool.classes, gpus_each=pool.gpus_per_replica)
        mix = leanest_mix(offers, units, pool.floor.within(units))
        gpus += mix.gpus + leanest_mix(without(offers, mix), pool.warm_standby).gpus
    return gpus
