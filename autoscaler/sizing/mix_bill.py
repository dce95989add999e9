"""What a plan's pools cost as mixes of replica classes, with spot machines above a floor. Pure.

The plan counts replicas of one kind. They are the units of a policy's classes, replicas of speed 1: of each pool the
cheapest mix with so many units is taken, with its `on_demand_floor`, as the autoscaler would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autoscaler.advisor.advice import Prediction
from autoscaler.classes.mix import cheapest_mix
from autoscaler.classes.neutral.joint_mix import joint_mix
from autoscaler.classes.replica_class import ReplicaClass
from autoscaler.classes.search.offer import ClassMix, MixSide, offers_of
from autoscaler.policies.policy_file import AnyPool, ScalingPolicy
from autoscaler.simulation.traces.trace import Trace
from splitserve.errors import FailedPreconditionError


@dataclass(frozen=True, slots=True)
class PoolMix:
    """One pool. Money is for an hour, in the currency of the policy."""

    units: int
    """Replicas of speed 1 that the plan has."""
    classes: Mapping[str, int]
    """Replicas of each class."""
    on_demand_units: float
    """Units that are not on spot machines."""
    cost_per_hour: float
    on_demand_cost_per_hour: float | None
    """Without spot machines; None where the other classes do not give so much."""
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class MixBill:
    """Both pools."""

    prefill: PoolMix
    decode: PoolMix
    cost_per_hour: float
    cost_per_million_tokens: float
    on_demand_cost_per_hour: float | None
    on_demand_cost_per_million_tokens: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def mix_bill(policy: ScalingPolicy, split: Prediction, trace: Trace) -> MixBill:
    """The bill of two pools that serve this trace for ever.

    All pools must have classes. Raises FailedPreconditionError: TOO_FEW_REPLICAS where they give fewer units than the
    plan has, TOO_DEAR where they cost more than the policy's budget, TOO_FEW_GPUS where they take more than its
    `gpu_budget`."""
    units = split.candidate.prefill, split.candidate.decode
    given = zip(policy.pools.items(), units, _mixes(policy, units), strict=True)
    pools = [_mixed(name, pool, count, mix) for (name, pool), count, mix in given]
    cost = sum(one.cost_per_hour for one in pools)
    if policy.budget_per_hour is not None and cost > policy.budget_per_hour:
        message = (
            f"policy: {split.candidate.name} costs {cost:g} an hour, the budget is {policy.budget_per_hour:g}"
        )
        raise FailedPreconditionError(message, reason="TOO_DEAR", field="policy")
    gpus = sum(one.gpus for one in pools)
    if policy.gpu_budget is not None and gpus > policy.gpu_budget:
        message = f"policy: {split.candidate.name} takes {gpus} GPUs, the budget is {policy.gpu_budget}"
        raise FailedPreconditionError(message, reason="TOO_FEW_GPUS", field="policy")
    plain = [one.on_demand_cost_per_hour for one in pools]
    on_demand = None if None in plain else sum(each for each in plain if each is not None)
    tokens = sum(one.prompt_tokens + one.output_tokens for one in trace.requests)
    hours_per_million = max(trace.duration_s, 1e-3) / 3600 / tokens * 1e6
    return MixBill(
        pools[0],
        pools[1],
        cost,
        cost * hours_per_million,
        on_demand,
        None if on_demand is None else on_demand * hours_per_million,
    )


def _mixes(policy: ScalingPolicy, units: tuple[int, int]) -> Sequence[ClassMix]:
    """Those of neutral workers together: there are no more of a class than its limit on both sides."""
    prefill, decode = (
        MixSide(
            tuple(offers_of(pool.classes, gpus_each=pool.gpus_per_replica)), count, pool.floor.within(count)
        )
        for pool, count in zip(policy.pools.values(), units, strict=True)
    )
    if policy.workers == "neutral":
        return joint_mix(prefill, decode)
    return [cheapest_mix(side.offers, side.units, floor=side.floor) for side in (prefill, decode)]


def _mixed(name: str, pool: AnyPool, units: int, mix: ClassMix) -> PoolMix:
    if mix.units < units - 1e-9:
        message = f"policy: the classes of {name} give {mix.units:g} units, the plan has {units}"
        raise FailedPreconditionError(message, reason="TOO_FEW_REPLICAS", field="policy")
    counts = dict(zip((one.name for one in pool.classes), mix.counts, strict=True))
    on_demand = sum(counts[one.name] * one.speed for one in pool.classes if not one.spot)
    without_spot = _on_demand_cost(pool.classes, units)
    return PoolMix(units, counts, on_demand, mix.price_per_hour, without_spot, mix.gpus)


def _on_demand_cost(classes: Sequence[ReplicaClass], units: int) -> float | None:
    plain = [one for one in classes if not one.spot]
    mix = cheapest_mix(offers_of(plain), units)
    return mix.price_per_hour if plain and mix.units >= units - 1e-9 else None
