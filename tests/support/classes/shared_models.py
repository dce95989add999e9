"""Models with classes on one account, round after round: a round is a start, and an end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from autoscaler.actuators.actuator import ActualReplica
from autoscaler.classes.class_actions import reconcile_classes
from autoscaler.decide import make_decide
from autoscaler.plan import Memory, ScalingPlan
from autoscaler.policies.policy_file import ScalingPolicy, parse_policy
from autoscaler.reconcile import Bounds, Drain, ReplicaView, Start
from autoscaler.sharing.claims.shares import GPUS, MONEY, amounts_in, of_class
from autoscaler.sharing.model_account import ModelAccount
from autoscaler.sharing.models_file import least_uses
from autoscaler.sharing.shared_account import SharedAccount
from autoscaler.snapshot import POOLS, PoolName, Replica, ReplicaState
from splitserve.errors import UnavailableError
from tests.support.scaling.signal_sources import Clock
from tests.support.scaling.snapshots import snapshot

ROUND_S = 20.0


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
    plan: ScalingPlan | None = None
    """The last one."""
    stuck: bool = False
    """Whether it decides nothing."""

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
        self.plan, self.memory = self.account.deciding(make_decide(self.policy))(self.memory, base)
        bounds = dict.fromkeys(POOLS, Bounds(1, 9))
        return [one for one in reconcile_classes(self.plan, pools, bounds) if isinstance(one, Start | Drain)]


class Models:
    """All of them on one account, round after round. No limit is exceeded by what exists."""

    def __init__(
        self, wishes: Mapping[str, Wish], limits: Mapping[str, float], start_rounds: int = 1
    ) -> None:
        self.clock, self.limits = Clock(1000.0), limits
        self.start_rounds = start_rounds
        self.begun: dict[tuple[str, str], float] = {}
        """When each start was seen first, by model and name."""
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
            for action in () if one.stuck else one.decide(self.clock.now):
                done |= self.carry_out(one, action)
                self.check()
        self.clock.now += ROUND_S
        for one in self.models:
            left = [each for each in one.there if each.state is not ReplicaState.DRAINING]
            one.there = [self._later(one.name, each) for each in left]
        return done

    def _later(self, model: str, each: ReplicaView) -> ReplicaView:
        begun_s = self.begun.setdefault((model, each.name), self.clock.now - ROUND_S)
        if self.clock.now - begun_s < self.start_rounds * ROUND_S and each.state is ReplicaState.STARTING:
            return each
        return replace(each, state=ReplicaState.READY)

    def carry_out(self, one: Scaled, action: Start | Drain) -> bool:
        if isinstance(action, Drain):
            one.there = [
                replace(each, state=ReplicaState.DRAINING) if each.name in action.names else each
                for each in one.there
            ]
            return True
        kind = action.replica_class or one.policy.pools[action.pool].classes[0].name
        try:
            count = one.account.reserve(action.pool, action.count, kind)
        except UnavailableError:
            return False
        for _ in range(count):
            one.add(action.pool, kind, ReplicaState.STARTING)
        return True

    def check(self) -> None:
        assert self.money() <= self.limits.get(MONEY, 1e9) + 1e-9
        for name, limit in self.limits.items():
            there = sum(of_class(each.replica_class) == name for one in self.models for each in one.there)
            assert amounts_in((name,)) or there <= limit
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
        return settled(self.round, most_rounds)


def settled(play_round: Callable[[], object], most_rounds: int) -> bool:
    """Plays rounds until nothing is done for longer than what moves waits. Whether that came."""
    quiet = 0
    for _ in range(most_rounds):
        quiet = 0 if play_round() else quiet + 1
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
