"""Models that wait for each other's classes: what all want and what fits is reached, and no limit is ever exceeded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from autoscaler.actuators.actuator import ActualReplica
from autoscaler.classes.class_actions import reconcile_classes
from autoscaler.decide import make_decide
from autoscaler.plan import Memory
from autoscaler.policies.policy_file import ScalingPolicy, parse_policy
from autoscaler.reconcile import Bounds, Drain, ReplicaView, Start
from autoscaler.sharing.giving_way import PoolStanding, gives_way
from autoscaler.sharing.model_account import ModelAccount
from autoscaler.sharing.models_file import least_uses
from autoscaler.sharing.shared_account import SharedAccount
from autoscaler.sharing.shares import AMOUNTS, GPUS, MONEY, Claim, ClassOfClaim, Rung, of_class, share
from autoscaler.snapshot import POOLS, PoolName, Replica, ReplicaState
from splitserve.errors import UnavailableError
from tests.support.scaling.signal_sources import Clock
from tests.support.scaling.snapshots import snapshot

ROUND_S = 20.0
X, Y, Z = of_class("x"), of_class("y"), of_class("z")


@dataclass(frozen=True)
class Wish:
    """What one model wants: units of prefill, of these classes (speed, price). Decode has one replica of its own."""

    units: int
    classes: Mapping[str, tuple[float, float]]
    held: Mapping[str, int]
    """Of each class at first."""
    gpus: Mapping[str, int] = field(default_factory=dict)
    """Of a replica of each class; 0 where nothing is said."""

    def policy(self) -> ScalingPolicy:
        always = [{"start": "00:00", "end": "00:00", "replicas": self.units}]
        classes = [
            {
                "name": name,
                "speed": speed,
                "price_per_hour": price,
                "gpus_per_replica": self.gpus.get(name, 0),
            }
            for name, (speed, price) in self.classes.items()
        ]
        own = [{"name": "own", "price_per_hour": 0.5, "gpus_per_replica": 0}]
        at_once = {"scaleDown": {"stabilizationWindowSeconds": 0}}
        more = {"kind": "schedule", "max_replicas": 9, "drain_s": 1, "behavior": at_once}
        return parse_policy(
            {
                "lend_decode": False,
                "prefill": {**more, "schedule": always, "classes": classes, "payback_s": 600},
                "decode": {**more, "classes": own},
            }
        )


@dataclass
class Scaled:
    """One model: its replicas, which need a round to start and one to end."""

    name: str
    wish: Wish
    account: ModelAccount
    policy: ScalingPolicy
    there: list[ReplicaView] = field(default_factory=list)
    memory: Memory = None
    number: int = 0

    def add(self, pool: PoolName, kind: str, state: ReplicaState) -> None:
        self.number += 1
        name = f"{pool}-{self.number}"
        self.there.append(ReplicaView(name, state, 0.0, float(self.number), replica_class=kind))

    def units(self) -> float:
        """In rotation."""
        ready = [one for one in self.there if one.state is ReplicaState.READY and one.name.startswith("p")]
        return sum(self.wish.classes[one.replica_class][0] for one in ready)

    def decide(self, now_s: float) -> list[Start | Drain]:
        listed = [
            ActualReplica(
                one.name,
                "prefill" if one.name.startswith("p") else "decode",
                one.state is ReplicaState.DRAINING,
                0.0,
                replica_class=one.replica_class,
            )
            for one in self.there
        ]
        self.account.listed(listed, self.account.account.generation)
        pools = {pool: [one for one in self.there if one.name.startswith(pool)] for pool in POOLS}
        seen = {
            pool: tuple(Replica(one.name, one.state, 0.0, replica_class=one.replica_class) for one in found)
            for pool, found in pools.items()
        }
        base = snapshot(now_s, acting=True)
        base = replace(
            base,
            prefill=replace(base.prefill, replicas=seen["prefill"], classes={}),
            decode=replace(base.decode, replicas=seen["decode"], classes={}),
        )
        plan, self.memory = self.account.deciding(make_decide(self.policy))(self.memory, base)
        bounds = dict.fromkeys(POOLS, Bounds(1, 9))
        return [one for one in reconcile_classes(plan, pools, bounds) if isinstance(one, Start | Drain)]


class Models:
    """All of them on one account, round after round. No limit is exceeded by what exists."""

    def __init__(self, wishes: Mapping[str, Wish], limits: Mapping[str, float]) -> None:
        self.clock, self.limits = Clock(1000.0), limits
        policies = {name: wish.policy() for name, wish in wishes.items()}
        least = {name: (lambda one=one: least_uses(one, limits)) for name, one in policies.items()}
        account = SharedAccount(limits, least, move_after_s=30.0, clock=self.clock)  # type: ignore[arg-type]
        self.models = [
            Scaled(name, wish, ModelAccount(account, name, lambda name=name: policies[name]), policies[name])  # type: ignore[misc]
            for name, wish in wishes.items()
        ]
        for one in self.models:
            one.add("decode", "own", ReplicaState.READY)
            for kind, count in one.wish.held.items():
                for _ in range(count):
                    one.add("prefill", kind, ReplicaState.READY)

    def round(self) -> bool:
        """Whether anything was done."""
        done = False
        for one in self.models:
            for action in one.decide(self.clock.now):
                done |= self.carry_out(one, action)
                self.check()
        self.clock.now += ROUND_S
        for one in self.models:
            left = [each for each in one.there if each.state is not ReplicaState.DRAINING]
            one.there = [replace(each, state=ReplicaState.READY) for each in left]
        return done

    def carry_out(self, one: Scaled, action: Start | Drain) -> bool:
        if isinstance(action, Drain):
            one.there = [
                replace(each, state=ReplicaState.DRAINING) if each.name in action.names else each
                for each in one.there
            ]
            return True
        kind = action.replica_class or one.policy.pools[action.pool].classes[0].name
        each = one.account.uses_of(action.pool, kind)
        try:
            count = one.account.account.reserve(one.name, action.pool, action.count, each)
        except UnavailableError:
            return False
        for _ in range(count):
            one.add(action.pool, kind, ReplicaState.STARTING)
        return True

    def check(self) -> None:
        assert self.money() <= self.limits.get(MONEY, 1e9) + 1e-9
        for name, limit in self.limits.items():
            there = sum(of_class(each.replica_class) == name for one in self.models for each in one.there)
            assert name in AMOUNTS or there <= limit
        assert self.gpus() <= self.limits.get(GPUS, 1e9)

    def gpus(self) -> int:
        return sum(one.wish.gpus.get(each.replica_class, 0) for one in self.models for each in one.there)

    def money(self) -> float:
        prices = {
            one.name: {**{k: p for k, (_, p) in one.wish.classes.items()}, "own": 0.5} for one in self.models
        }
        return sum(prices[one.name][each.replica_class] for one in self.models for each in one.there)

    def all_have_what_they_want(self) -> bool:
        return all(one.units() >= one.wish.units for one in self.models)

    def settle(self, most_rounds: int = 40) -> bool:
        """Until nothing is done for longer than what moves waits. Whether that came."""
        quiet = 0
        for _ in range(most_rounds):
            quiet = 0 if self.round() else quiet + 1
            if quiet > 3:
                return True
        return False


def fits(wishes: Mapping[str, Wish], limits: Mapping[str, float]) -> bool:
    """Whether all can have what they want, by trying everything."""

    def able(rest: list[Wish], left: Mapping[str, float]) -> bool:
        if not rest:
            return True
        wish, *others = rest
        kinds = list(wish.classes)
        for counts in product(*(range(wish.units + 1) for _ in kinds)):
            used = {of_class(kind): count for kind, count in zip(kinds, counts, strict=True)}
            used[GPUS] = sum(wish.gpus.get(kind, 0) * n for kind, n in zip(kinds, counts, strict=True))
            units = sum(wish.classes[kind][0] * count for kind, count in zip(kinds, counts, strict=True))
            after = {name: left.get(name, 99.0) - used.get(name, 0) for name in {*left, *used}}
            if units >= wish.units and min(after.values()) >= 0 and able(others, after):
                return True
        return False

    return able(list(wishes.values()), {n: a for n, a in limits.items() if n != MONEY})


KINDS = {"x": (1.0, 1.0), "y": (1.0, 1.0), "z": (2.0, 3.0)}


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, Wish], dict[str, float]]:
    limits = {of_class(kind): draw(st.integers(1, 3)) for kind in KINDS}
    left = dict(limits)
    wishes = {}
    for name in ("a", "b", "c")[: draw(st.integers(2, 3))]:
        kinds = draw(st.sampled_from(["x", "y", "xy", "xz", "yz", "xyz"]))
        held = {}
        for kind in kinds:
            held[kind] = draw(st.integers(0, left[of_class(kind)]))
            left[of_class(kind)] -= held[kind]
        price = draw(st.sampled_from([0.5, 2.0]))
        classes = {kind: (KINDS[kind][0], KINDS[kind][1] * (price if kind == "x" else 1.0)) for kind in kinds}
        wishes[name] = Wish(draw(st.integers(1, 4)), classes, held)
    return wishes, {name: float(limit) for name, limit in limits.items()}


@settings(max_examples=30, deadline=None, phases=[Phase.generate])
@given(worlds())
def test_what_all_want_and_what_fits_is_reached(world: tuple[dict[str, Wish], dict[str, float]]) -> None:
    wishes, limits = world
    models = Models(wishes, limits)
    if fits(wishes, limits):
        assert models.settle(), "then nothing moves"
        assert models.all_have_what_they_want()
    else:
        models.settle(12)


FAST_Y = {"x": (1.0, 1.0), "y": (2.0, 1.0)}
FAST_X = {"x": (2.0, 1.0), "y": (1.0, 1.0)}


@pytest.mark.parametrize("budget", [None, 5.5])
def test_two_models_swap_full_classes_one_replica_at_a_time(budget: float | None) -> None:
    """Each has all of the class that the other is fast on."""
    wishes = {"a": Wish(4, FAST_Y, {"x": 2}), "b": Wish(4, FAST_X, {"y": 2})}
    models = Models(wishes, {X: 2.0, Y: 2.0} | ({} if budget is None else {MONEY: budget}))
    least = [9.0, 9.0]
    for _ in range(20):
        models.round()
        least = [min(known, one.units()) for known, one in zip(least, models.models, strict=True)]
    assert models.all_have_what_they_want()
    assert least == [1.0, 2.0], "only one gives way, and never with its last replica"
    assert models.settle(4), "then nothing moves"


def test_a_model_that_lacks_nothing_gives_its_class_for_another_of_the_same_use() -> None:
    wishes = {
        "a": Wish(2, {"x": (1.0, 1.0), "y": (1.0, 3.0)}, {"x": 2}),
        "b": Wish(2, {"x": (1.0, 1.0)}, {"x": 1}),
    }
    models = Models(wishes, {X: 3.0, Y: 2.0})
    assert models.settle()
    assert models.all_have_what_they_want()


def test_a_pool_halfway_between_two_mixes_does_not_turn_round() -> None:
    """With y, x and y the second has what it wants, and so has the third nothing; with z and x all have."""
    z_or = {"z": (2.0, 3.0)}
    wishes = {
        "a": Wish(1, {"x": (1.0, 0.5), **z_or}, {"x": 2, "z": 2}),
        "b": Wish(3, {"x": (1.0, 0.5), "y": (1.0, 1.0), **z_or}, {"y": 1}),
        "c": Wish(2, {"y": (1.0, 1.0), **z_or}, {}),
    }
    models = Models(wishes, {X: 2.0, Y: 2.0, Z: 2.0, MONEY: 9.5})
    assert models.settle()
    assert models.all_have_what_they_want()


EACH = {X: ClassOfClaim(), Y: ClassOfClaim()}


def has(held: Mapping[str, float], wanted: Mapping[str, float], weight: float = 1.0) -> PoolStanding:
    return PoolStanding(held, wanted, sum(wanted.values()), EACH, weight)


def given_way(
    pools: list[PoolStanding], limits: Mapping[str, float], last_too: bool = False
) -> dict[int, str]:
    held = {name: sum(one.held.get(name, 0.0) for one in pools) for name in limits}
    return {one: given.name for one, given in gives_way(pools, limits, held, last_too).items()}


def test_one_of_a_circle_gives_way() -> None:
    limits = {X: 3.0, Y: 3.0}
    swap = [has({X: 3.0}, {Y: 3.0}), has({Y: 3.0}, {X: 3.0})]
    assert given_way(swap, limits) == {0: X}
    assert given_way([replace(swap[0], weight=2.0), swap[1]], limits) == {1: Y}, "the one with less traffic"
    more = [has({X: 2.0}, {Y: 3.0}), has({Y: 3.0}, {X: 3.0}), has({X: 1.0}, {X: 0.0})]
    assert given_way(more, limits) == {}, "the third ends what it does not need, and all goes on"


def test_nobody_gives_way_while_anything_else_goes_on() -> None:
    assert given_way([has({X: 3.0}, {Y: 3.0}), has({Y: 2.0}, {X: 2.0})], {X: 3.0, Y: 3.0}) == {}
    partly = [has({X: 2.0}, {Y: 3.0}), has({X: 1.0, Y: 3.0}, {X: 3.0})]
    assert given_way(partly, {X: 3.0, Y: 3.0}) == {}, "the second has one more than it needs"
    assert given_way([has({X: 3.0}, {Y: 3.0})], {X: 3.0, Y: 0.0}) == {}, "there is none for it"
    assert given_way([], {}) == {}


def test_the_last_replica_that_does_its_work_stays() -> None:
    limits = {X: 1.0, Y: 1.0}
    content = [has({X: 1.0}, {Y: 1.0}), has({Y: 1.0}, {X: 1.0})]
    assert given_way(content, limits) == {}
    slow = {**EACH, Y: ClassOfClaim(usable=False)}
    assert given_way([content[0], replace(content[1], classes=slow)], limits) == {1: Y}


def test_a_full_claim_makes_room_by_the_same_capacity_of_others() -> None:
    """The first could do with y or z, the second with x or y; the third needs x."""

    def one_of(*names: str) -> Claim:
        found = [Rung(1.0, {name: 1.0, MONEY: float(n + 1)}, 1.0) for n, name in enumerate(names)]
        return Claim((Rung(0.0, {}, 0.0, 0.0), *found))

    claims = [one_of(Y, Z), one_of(X, Y), one_of(X)]
    limits = {X: 1.0, Y: 1.0, Z: 1.0}
    at = share(claims, limits)
    assert [claim.rungs[rung].units for claim, rung in zip(claims, at, strict=True)] == [1.0, 1.0, 1.0]
    assert share(claims, {**limits, MONEY: 3.0}) != at, "there is no money for that"
