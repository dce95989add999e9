"""The workers that a cluster starts with under a policy, before anything is measured. Pure.

They are of the default class where the least of both pools fits so within what the policy limits (`budget_per_hour`,
`gpu_budget`, `gpu_limits`, `max_replicas` of a class), else the cheapest mix of classes that does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest

from autoscaler.classes.mix import cheapest_mix, leanest_mix
from autoscaler.classes.neutral.joint_mix import MixBudget, joint_mix, total_mix
from autoscaler.classes.search.offer import ClassMix, ClassOffer, MixSide, mix_of, offers_of
from autoscaler.policies.policy_file import AnyPool, ScalingPolicy
from autoscaler.sharing.claims.shares import counted_in, of_kind
from autoscaler.snapshot import POOLS
from splitserve.errors import ConfigError

_ALIKE = 1_000_000
"""What there may be of replicas without classes, which other settings bound."""

FirstWorkers = Mapping[str, tuple[str, ...]]
"""The class of each first worker, in the order of their numbers, by `worker`, or `prefill` and `decode`; empty names
where a pool has no classes."""


def first_workers(policy: ScalingPolicy, given: Mapping[str, int]) -> FirstWorkers:
    """What is started. `given`: numbers from the settings by their fields (`workers`, or `prefill` and `decode`), which
    are of the default class. Raises ConfigError naming the field where these, or the least, do not fit."""
    if policy.workers == "neutral":
        return {"worker": _neutral(policy, given.get("workers"))}
    return _pinned(policy, {name: count for name, count in given.items() if name in POOLS})


def _neutral(policy: ScalingPolicy, given: int | None) -> tuple[str, ...]:
    offers = [_offers(pool, _kinds(policy)) for pool in policy.pools.values()]
    pairs = list(zip(offers, policy.least_awake, strict=True))
    of_default = [math.ceil(units / each[0].speed) for each, units in pairs]
    started = _default(offers[0], given or sum(of_default))
    problem = _too_much(policy, [(offers[0], started)])
    if not problem:
        return _names(offers[0], started)
    if given is not None:
        raise ConfigError(f"workers: {given} of the first class are {problem}", field="workers")
    sides = [
        MixSide(each, units, pool.floor.within(units))
        for pool, (each, units) in zip(policy.pools.values(), pairs, strict=True)
    ]
    mixes = joint_mix(
        sides[0], sides[1], MixBudget(policy.budget_per_hour, policy.gpu_budget, _kinds(policy))
    )
    if not sum(total_mix(mixes, offers[0]).counts):
        raise _nothing_fits("decode")
    # Even ones lean to prefill at first.
    turns = zip_longest(*(_names(offers[0], mix) for mix in mixes))
    return tuple(name for turn in turns for name in turn if name is not None)


def _pinned(policy: ScalingPolicy, given: Mapping[str, int]) -> FirstWorkers:
    offers = {name: _offers(pool, _kinds(policy)) for name, pool in policy.pools.items()}
    least = dict(zip(POOLS, policy.least_awake, strict=True))
    mixes: dict[str, ClassMix] = {}
    for name in POOLS:
        count = given.get(name, math.ceil(least[name] / offers[name][0].speed))
        mixes[name] = _default(offers[name], count)
    problem = _too_much(policy, [(offers[name], mixes[name]) for name in POOLS])
    # The cheapest are within the money, those of fewest GPUs within the GPUs: the policy file is checked for that.
    for choose in (cheapest_mix, leanest_mix, partial(cheapest_mix, kinds=_kinds(policy))):
        if not problem:
            break
        for name in POOLS:
            if name not in given:
                floor = policy.pools[name].floor.within(least[name])
                mixes[name] = choose(offers[name], least[name], floor=floor)
        problem = _too_much(policy, [(offers[name], mixes[name]) for name in POOLS])
    if problem and given:
        field = next(name for name in POOLS if name in given)
        raise ConfigError(
            f"{field}: {given[field]} of the first class and the rest are {problem}", field=field
        )
    for name in POOLS:
        if problem or not sum(mixes[name].counts):
            raise _nothing_fits(name)
    return {name: _names(offers[name], mixes[name]) for name in POOLS}


def _nothing_fits(name: str) -> ConfigError:
    field = f"{name}.min_replicas"
    limits = "budget_per_hour, gpu_budget, gpu_limits and max_replicas of the classes"
    return ConfigError(f"{field}: no first workers of its classes are within {limits}", field=field)


def _kinds(policy: ScalingPolicy) -> dict[str, float]:
    return {of_kind(kind): float(most) for kind, most in policy.gpu_limits.items()}


def _offers(pool: AnyPool, kinds: Mapping[str, float]) -> tuple[ClassOffer, ...]:
    if not pool.classes:
        return (ClassOffer("", 1.0, 0.0, _ALIKE, gpus=pool.gpus_per_replica),)
    offers = offers_of(pool.classes, gpus_each=pool.gpus_per_replica)
    named = zip(pool.classes, offers, strict=True)
    return tuple(replace(offer, kinds=counted_in(one.gpu, kinds)) for one, offer in named)


def _default(offers: Sequence[ClassOffer], count: int) -> ClassMix:
    return mix_of(offers, (count, *(0 for _ in offers[1:])))


def _names(offers: Sequence[ClassOffer], mix: ClassMix) -> tuple[str, ...]:
    pairs = zip(offers, mix.counts, strict=True)
    return tuple(one.name for one, count in pairs for _ in range(count))


def _too_much(policy: ScalingPolicy, mixes: Sequence[tuple[Sequence[ClassOffer], ClassMix]]) -> str:
    """What these exceed, for people; empty: nothing."""
    for offers, mix in mixes:
        for one, count in zip(offers, mix.counts, strict=True):
            if count > one.most:
                return f"more than max_replicas of class {one.name} ({one.most})"
    money, gpus = sum(mix.price_per_hour for _, mix in mixes), sum(mix.gpus for _, mix in mixes)
    if policy.budget_per_hour is not None and money > policy.budget_per_hour + 1e-9:
        return f"{money:g} an hour, more than budget_per_hour ({policy.budget_per_hour:g})"
    if policy.gpu_budget is not None and gpus > policy.gpu_budget:
        return f"{gpus} GPUs, more than gpu_budget ({policy.gpu_budget})"
    for kind, most in policy.gpu_limits.items():
        pairs = [pair for offers, mix in mixes for pair in zip(offers, mix.counts, strict=True)]
        of_it = sum(one.gpus * count for one, count in pairs if of_kind(kind) in one.kinds)
        if of_it > most:
            return f"{of_it} GPUs of kind {kind}, more than gpu_limits has ({most})"
    return ""
