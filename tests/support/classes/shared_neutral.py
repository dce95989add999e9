"""Models with neutral workers of classes on one account, round after round: a round is a start, a change, or an end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from autoscaler.actuators.actuator import ActualReplica
from autoscaler.classes.class_actions import reconcile_classes
from autoscaler.decide import make_decide
from autoscaler.plan import Memory, ScalingPlan
from autoscaler.policies.policy_file import ScalingPolicy, parse_policy
from autoscaler.reconcile import Action, Bounds, Drain, Lean, ReplicaView, Start
from autoscaler.sharing.claims.shares import GPUS, MONEY, kinds_in, of_class, of_kind
from autoscaler.sharing.model_account import ModelAccount
from autoscaler.sharing.models_file import least_uses
from autoscaler.sharing.shared_account import SharedAccount
from autoscaler.snapshot import POOLS, PoolName, Replica, ReplicaState
from splitserve.errors import UnavailableError
from tests.support.classes.shared_models import settled
from tests.support.scaling.signal_sources import Clock
from tests.support.scaling.snapshots import snapshot

ROUND_S = 20.0
READY, STARTING, DRAINING = ReplicaState.READY, ReplicaState.STARTING, ReplicaState.DRAINING


@dataclass(frozen=True)
class Kind:
    """A class of workers."""

    prefill: float = 1.0
    decode: float = 1.0
    """Speeds."""
    price: float = 1.0
    gpus: int = 1
    most: int = 9
    gpu: str = ""


@dataclass
class NeutralModel:
    """One model: what it wants of both sides, and its workers."""

    prefill: int
    decode: int
    kinds: Mapping[str, Kind]
    pools: dict[PoolName, list[ReplicaView]] = field(default_factory=lambda: {"prefill": [], "decode": []})
    memory: Memory = None
    plan: ScalingPlan | None = None
    number: int = 0

    def policy(self) -> ScalingPolicy:
        at_once = {"scaleDown": {"stabilizationWindowSeconds": 0}}
        more = {"kind": "schedule", "max_replicas": 20, "drain_s": 1, "behavior": at_once, "payback_s": 600}
        sides = {}
        for pool, units in (("prefill", self.prefill), ("decode", self.decode)):
            classes = [
                {
                    "name": name,
                    "speed": getattr(one, pool),
                    "price_per_hour": one.price,
                    "gpus_per_replica": one.gpus,
                    "max_replicas": one.most,
                    "gpu": one.gpu,
                }
                for name, one in self.kinds.items()
            ]
            always = [{"start": "00:00", "end": "00:00", "replicas": units}]
            sides[pool] = {**more, "schedule": always, "classes": classes}
        return parse_policy({"workers": "neutral", "lend_decode": False, **sides})

    def add(self, pool: PoolName, kind: str, state: ReplicaState = READY) -> None:
        self.number += 1
        self.pools[pool].append(
            ReplicaView(f"w{self.number}", state, 0.0, float(self.number), neutral=True, replica_class=kind)
        )

    def units(self, pool: PoolName) -> float:
        """In rotation."""
        ready = [one for one in self.pools[pool] if one.state is READY]
        return sum(getattr(self.kinds[one.replica_class], pool) for one in ready)

    @property
    def has_all(self) -> bool:
        return self.units("prefill") >= self.prefill and self.units("decode") >= self.decode

    @property
    def workers(self) -> list[ReplicaView]:
        return [one for pool in POOLS for one in self.pools[pool]]

    def may_have(self, counts: Mapping[str, int]) -> bool:
        """Whether these carry all that it wants."""
        for split in product(*(range(count + 1) for count in counts.values())):
            prefill = sum(self.kinds[name].prefill * n for name, n in zip(counts, split, strict=True))
            rest = [count - n for count, n in zip(counts.values(), split, strict=True)]
            decode = sum(self.kinds[name].decode * n for name, n in zip(counts, rest, strict=True))
            if prefill >= self.prefill and decode >= self.decode:
                return True
        return False


class NeutralModels:
    """All of them on one account. No limit is exceeded by what exists, at any moment."""

    def __init__(self, models: Mapping[str, NeutralModel], limits: Mapping[str, float]) -> None:
        self.clock, self.limits, self.models = Clock(1000.0), limits, dict(models)
        least = {name: (lambda one=one: least_uses(one.policy(), limits)) for name, one in models.items()}
        self.account = SharedAccount(limits, least, move_after_s=30.0, clock=self.clock)  # type: ignore[arg-type]
        self.own = {name: ModelAccount(self.account, name, one.policy) for name, one in models.items()}
        self.done = Counter[str]()
        """Actions so far, by kind."""

    def round(self) -> bool:
        """Whether anything was done."""
        done = False
        for name, one in self.models.items():
            for action in self._decided(name, one):
                done |= self._carry_out(name, one, action)
                self.check()
        self.clock.now += ROUND_S
        for one in self.models.values():
            for pool in POOLS:
                left = [each for each in one.pools[pool] if each.state is not DRAINING]
                one.pools[pool] = [
                    replace(each, state=READY) if each.state is STARTING else each for each in left
                ]
        return done

    def settle(self, most_rounds: int = 60) -> bool:
        """Until nothing is done for longer than what moves waits. Whether that came."""
        return settled(self.round, most_rounds)

    def used(self) -> Counter[str]:
        """By what really exists, not by the account."""
        found = Counter[str]()
        for one in self.models.values():
            for each in one.workers:
                kind = one.kinds[each.replica_class]
                counted = {of_class(each.replica_class): 1, of_kind(kind.gpu): kind.gpus}
                found.update({MONEY: kind.price, GPUS: kind.gpus, **counted})  # type: ignore[dict-item]
        return found

    def check(self) -> None:
        used = self.used()
        for name, limit in self.limits.items():
            assert used[name] <= limit + 1e-9, (name, used)
        for one in self.models.values():
            live = Counter(each.replica_class for each in one.workers if each.state is not DRAINING)
            assert all(live[name] <= kind.most for name, kind in one.kinds.items())

    def _decided(self, name: str, one: NeutralModel) -> tuple[Action, ...]:
        own = self.own[name]
        listed = [
            ActualReplica(each.name, pool, each.state is DRAINING, 0.0, replica_class=each.replica_class)
            for pool in POOLS
            for each in one.pools[pool]
        ]
        own.listed(listed, self.account.generation)
        seen = {
            pool: tuple(
                Replica(each.name, each.state, 0.0, neutral=True, replica_class=each.replica_class)
                for each in one.pools[pool]
            )
            for pool in POOLS
        }
        base = snapshot(self.clock.now, acting=True)
        base = replace(
            base,
            prefill=replace(base.prefill, replicas=seen["prefill"], classes={}),
            decode=replace(base.decode, replicas=seen["decode"], classes={}),
        )
        one.plan, one.memory = own.deciding(make_decide(one.policy()))(one.memory, base)
        return reconcile_classes(one.plan, one.pools, dict.fromkeys(POOLS, Bounds(1, 20)))

    def _carry_out(self, name: str, one: NeutralModel, action: Action) -> bool:
        self.done[type(action).__name__] += 1
        match action:
            case Lean(pool, moved):
                other: PoolName = "decode" if pool == "prefill" else "prefill"
                (found,) = [each for each in one.pools[other] if each.name == moved]
                one.pools[other].remove(found)
                one.pools[pool].append(found)
            case Drain(_, names):
                for pool in POOLS:
                    one.pools[pool] = [
                        replace(each, state=DRAINING) if each.name in names else each
                        for each in one.pools[pool]
                    ]
            case Start(pool, count, kind):
                kind = kind or next(iter(one.kinds))
                try:
                    able = self.own[name].reserve(pool, count, kind)
                except UnavailableError:
                    return False
                for _ in range(able):
                    one.add(pool, kind, STARTING)
        return True


def all_fit(models: Mapping[str, NeutralModel], limits: Mapping[str, float]) -> bool:
    """Whether some workers within the limits carry what all want. By trying everything."""
    kinds = {name: kind for one in models.values() for name, kind in one.kinds.items()}
    names = sorted(kinds)
    states = {(0,) * len(names)}
    for one in models.values():
        able = [
            counts
            for counts in product(
                *(range(min(4, one.kinds[name].most if name in one.kinds else 0) + 1) for name in names)
            )
            if one.may_have({n: c for n, c in zip(names, counts, strict=True) if n in one.kinds})
        ]
        states = {
            after
            for before in states
            for counts in able
            if _within(
                after := tuple(a + b for a, b in zip(before, counts, strict=True)), names, kinds, limits
            )
        }
    return bool(states)


def _within(
    counts: tuple[int, ...], names: list[str], kinds: Mapping[str, Kind], limits: Mapping[str, float]
) -> bool:
    pairs = list(zip(names, counts, strict=True))
    money = sum(kinds[name].price * count for name, count in pairs)
    gpus = sum(kinds[name].gpus * count for name, count in pairs)
    for limit in kinds_in(limits):
        of_it = sum(kinds[name].gpus * count for name, count in pairs if of_kind(kinds[name].gpu) == limit)
        if of_it > limits[limit]:
            return False
    classes = all(count <= limits.get(of_class(name), 1e9) for name, count in pairs)
    return classes and money <= limits.get(MONEY, 1e9) + 1e-9 and gpus <= limits.get(GPUS, 1e9)
