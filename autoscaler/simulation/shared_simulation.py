"""Several models on one budget, on one virtual clock: each has its own cluster, trace and policy, and what they may
have together is shared by the account and the decisions of production (`autoscaler/sharing`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from autoscaler.actuators.actuator import ActualReplica
from autoscaler.classes.class_demand import gpus_of
from autoscaler.decide import make_decide
from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.reconcile import Start
from autoscaler.sharing.claims.shared_view import summed
from autoscaler.sharing.claims.shares import Uses
from autoscaler.sharing.model_account import ModelAccount, uses_of
from autoscaler.sharing.models_file import least_uses
from autoscaler.sharing.shared_account import SharedAccount
from autoscaler.simulation.evaluation.class_costs import RunCost, cost_of
from autoscaler.simulation.evaluation.comparison import bounds_of, under
from autoscaler.simulation.outcome import Outcome
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.simulator import Simulation, run_together
from autoscaler.snapshot import POOLS, PoolName
from autoscaler.start_watch import start_limits
from splitserve.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """What one model is replayed with."""

    scenario: Scenario
    policy: ScalingPolicy


@dataclass(frozen=True, slots=True)
class SharedOutcome:
    """The runs by model, and what they had together."""

    models: Mapping[str, Outcome]
    policies: Mapping[str, ScalingPolicy]
    limits: Uses
    peaks: Uses
    """Most of each limit that existed at once, what started or drained included."""
    refused: int
    """Replicas that had no room when they were to be ordered."""

    def cost(self, model: str) -> RunCost | None:
        """None without classes."""
        return cost_of(self.models[model], self.policies[model])

    def gpu_hours(self, model: str) -> float:
        """By the policy's `gpus_per_replica`."""
        pools = self.policies[model].pools
        return sum(
            hours * gpus_of(pools[pool], kind)
            for pool, kinds in self.models[model].class_hours.items()
            for kind, hours in kinds.items()
        )

    @property
    def attainment(self) -> float:
        """Share of the requests of all models within their own targets."""
        total = sum(len(one.requests) for one in self.models.values())
        met = sum(one.attainment * len(one.requests) for one in self.models.values())
        return met / total if total else 1.0

    @property
    def money(self) -> float | None:
        """Of all models with classes; None where there are none."""
        bills = [bill.money for model in self.models if (bill := self.cost(model)) is not None]
        return sum(bills) if bills else None

    def to_json(self) -> dict[str, Any]:
        """By model and in total; plain values."""
        models = {}
        for name, one in self.models.items():
            bill = self.cost(name)
            cost = {} if bill is None else {"cost": bill.to_json()}
            models[name] = {**one.to_json(), "gpu_hours": round(self.gpu_hours(name), 4), **cost}
        return {
            "models": models,
            "total": {
                "requests": sum(len(one.requests) for one in self.models.values()),
                "attainment": round(self.attainment, 5),
                "failed_requests": sum(one.failed_requests for one in self.models.values()),
                "replica_hours": round(sum(one.total_replica_hours for one in self.models.values()), 4),
                "gpu_hours": round(sum(self.gpu_hours(name) for name in self.models), 4),
                "money": None if self.money is None else round(self.money, 4),
                "orders_refused": self.refused,
            },
            "shared": {
                name: {"limit": limit, "most_used": round(self.peaks.get(name, 0.0), 6)}
                for name, limit in self.limits.items()
            },
        }


@dataclass(slots=True)
class _Ledger:
    """All models on the clock of the simulation."""

    limits: Uses
    move_after_s: float
    models: Mapping[str, SimulatedModel]
    now_s: float = 0.0
    known: bool = False
    """Whether the account knows what each has."""
    refused: int = 0
    peaks: dict[str, float] = field(default_factory=dict)
    parts: dict[str, _Part] = field(default_factory=dict)

    def account(self) -> SharedAccount:
        return SharedAccount(
            self.limits,
            {name: partial(least_uses, one.policy, self.limits) for name, one in self.models.items()},
            move_after_s=self.move_after_s,
            interval_s=lambda name: self.models[name].policy.interval_s,
            clock=lambda: self.now_s,
        )

    def all_listed(self) -> None:
        """Lists all of them before the first decision of any."""
        if not self.known:
            self.known = True
            for part in self.parts.values():
                part.own.listed(part.there(), part.own.account.generation)

    def seen(self) -> None:
        """Keeps the most that has existed at once, by the replicas themselves, not by the account."""
        used = summed([part.uses() for part in self.parts.values()])
        for name in self.limits:
            self.peaks[name] = max(self.peaks.get(name, 0.0), used.get(name, 0.0))


@dataclass(slots=True)
class _Part:
    """One model's `Account` of a run."""

    own: ModelAccount
    ledger: _Ledger
    there: Callable[[], Sequence[ActualReplica]] = tuple

    def listed(self, now_s: float, replicas: Sequence[ActualReplica]) -> None:
        self.ledger.now_s = now_s
        self.ledger.all_listed()
        self.own.listed(replicas, self.own.account.generation)
        self.ledger.seen()

    def able(self, start: Start) -> int:
        try:
            count = self.own.reserve(start.pool, start.count, start.replica_class)
        except UnavailableError as error:
            if error.reason == "SHARED_UNKNOWN":
                return 0  # not for want of room: others have not decided for the first time yet
            count = 0
        self.ledger.refused += start.count - count
        return count

    def acted(self) -> None:
        self.ledger.seen()

    def uses(self) -> Uses:
        """Of all its replicas that exist."""
        return summed([self.own.uses_of(one.pool, one.replica_class) for one in self.there()])


def simulate_shared(
    limits: Uses,
    models: Mapping[str, SimulatedModel],
    move_after_s: float = 0.0,
    on_progress: Callable[[str, float], None] = lambda *_: None,
) -> SharedOutcome:
    """Replays all of them within these limits, by name; what others have moves after `move_after_s`."""
    ledger = _Ledger(limits, move_after_s, models)
    account = ledger.account()
    first = first_replicas(limits, models)
    simulations = []
    for name, one in models.items():
        policy = one.policy
        own = ModelAccount(account, name, partial(_itself, policy))
        ledger.parts[name] = part = _Part(own, ledger)
        run = Simulation(
            under(one.scenario, policy),
            own.deciding(make_decide(policy)),
            policy.interval_s,
            bounds_of(policy),
            name,
            partial(on_progress, name),
            start_limits(policy),
            part,
            first[name],
        )
        part.there = run.replicas
        simulations.append(run)
    found = run_together(simulations)
    outcomes = {one.name: one for one in found}
    policies = {name: one.policy for name, one in models.items()}
    return SharedOutcome(outcomes, policies, limits, ledger.peaks, ledger.refused)


def _itself(policy: ScalingPolicy) -> ScalingPolicy:
    return policy


def first_replicas(
    limits: Uses, models: Mapping[str, SimulatedModel]
) -> dict[str, dict[PoolName, list[str]]]:
    """Classes of the replicas at the start: of each pool the least, then in turn as many as it would have alone, of the
    first class that has room."""
    left = dict(limits)
    found: dict[str, dict[PoolName, list[str]]] = {name: {pool: [] for pool in POOLS} for name in models}
    wanted = {
        name: {
            "least": dict(zip(POOLS, one.policy.least_awake, strict=True)),
            "all": one.scenario.first_replicas(),
        }
        for name, one in models.items()
    }
    for stage in ("least", "all"):
        able = True
        while able:
            able = False
            for name, one in models.items():
                for pool in POOLS:
                    able |= _one_more(one.policy, pool, wanted[name][stage][pool], found[name][pool], left)
    return found


def _one_more(
    policy: ScalingPolicy, pool: PoolName, units: float, there: list[str], left: dict[str, float]
) -> bool:
    """Adds a replica to `there`, where it has fewer units and there is room."""
    speeds = policy.pools[pool].speeds or {"": 1.0}
    if sum(speeds[kind] for kind in there) >= units:
        return False
    for kind in speeds:
        uses = uses_of(policy, pool, kind, left)
        if all(uses.get(name, 0.0) <= amount + 1e-9 for name, amount in left.items()):
            there.append(kind)
            left.update({name: amount - uses.get(name, 0.0) for name, amount in left.items()})
            return True
    return False
