"""Control loops of two models with one account, over time: the load moves from one to the other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from autoscaler.actuators.actuator import ActualReplica, Presence
from autoscaler.control_loop import ControlLoop, LoopSettings
from autoscaler.decide import make_decide
from autoscaler.decisions.attainment import AttainmentModel
from autoscaler.decisions.decider import Decider
from autoscaler.decisions.decisions_page import shared_document
from autoscaler.decisions.journal import DecisionJournal
from autoscaler.loop_metrics import loop_metrics
from autoscaler.policies.policy_file import ScalingPolicy, parse_policy
from autoscaler.policy_in_force import loop_settings
from autoscaler.reconcile import PlannedRotation
from autoscaler.shadows.shadow import ShadowPolicy, Shadows
from autoscaler.sharing.claims.shares import GPUS, MONEY, of_class
from autoscaler.sharing.model_account import AccountedActuator, ModelAccount
from autoscaler.sharing.models_file import least_uses
from autoscaler.sharing.shared_account import SharedAccount
from autoscaler.sharing.shared_metrics import shared_metrics
from autoscaler.snapshot import ClassSignals, PoolName, Replica, ReplicaState, Snapshot
from splitserve.errors import ResourceExhaustedError, UnavailableError
from tests.support.scaling.fake_actuator import FakeActuator
from tests.support.scaling.signal_sources import Clock
from tests.support.scaling.snapshots import Load, arrivals, snapshot
from tests.support.waiting import PATIENCE_S

STEP_S, COLD_S, DRAIN_S = 10.0, 20.0, 10.0
BEGAN_S = 600.0
PRICED = [{"name": "only", "price_per_hour": 1.0, "max_replicas": 40}]


def rules(classes: Sequence[dict[str, Any]] = PRICED, **more: Any) -> ScalingPolicy:
    both = {"min_replicas": 1, "max_replicas": 40, "cold_start_s": COLD_S, "classes": classes, **more}
    return parse_policy({"prefill": {"target_ms": 1000, **both}, "decode": {"target_ms": 60, **both}})


class Served(FakeActuator):
    """One model: its replicas, and the loop that scales them."""

    def __init__(self, model: str, load: Load, policy: ScalingPolicy, world: World) -> None:
        super().__init__()
        self.model, self.load, self.policy, self.world = model, load, policy, world
        self.told: dict[str, float] = {}
        """When each was told to end."""
        self.resting: frozenset[str] = frozenset()

    def attach(self) -> ControlLoop:
        own = ModelAccount(self.world.account, self.model, lambda: self.policy)
        return ControlLoop(
            self.observe,
            make_decide(self.policy),
            self,
            AccountedActuator(self, own, self.world.starting),
            loop_settings(self.policy, LoopSettings()),
            decider=Decider(self.world.turns, own.seen, own.decided, PATIENCE_S),
            journal=DecisionJournal(AttainmentModel(self.policy)),
        )

    async def apply(self, where: PlannedRotation, decisions: Any) -> None:
        """As a `Rotation`."""
        self.resting = where.standby

    async def observe(self) -> Snapshot:
        now_s = self.world.clock.now
        found = replace(snapshot(1.0), now_s=now_s)
        kind = self.policy.prefill.classes[0].name if self.policy.prefill.classes else ""
        p, d = found.prefill, found.decode
        mine = {pool: self.seen(pool) for pool in ("prefill", "decode")}
        return replace(
            found,
            arrivals=arrivals(self.load, now_s, max(0.0, now_s - 600), STEP_S),
            prefill=replace(
                p,
                replicas=mine["prefill"],
                cold_start_s=COLD_S,
                classes={kind: ClassSignals(1, p.tokens_per_s)},
                latency=None,
            ),
            decode=replace(
                d,
                replicas=mine["decode"],
                cold_start_s=COLD_S,
                classes={kind: ClassSignals(1, None, d.kv_capacity_tokens, d.max_running_requests, d.step)},
                tpot=None,
            ),
        )

    def seen(self, pool: str) -> tuple[Replica, ...]:
        found = []
        for one in self.there.values():
            age_s = self.world.clock.now - one.created_wall_s
            state = ReplicaState.READY if age_s >= COLD_S else ReplicaState.STARTING
            if state is ReplicaState.READY and one.name in self.resting:
                state = ReplicaState.STANDBY
            state = ReplicaState.DRAINING if one.stopping else state
            if one.pool == pool:
                found.append(Replica(one.name, state, one.created_wall_s, replica_class=one.replica_class))
        return tuple(found)

    async def start(self, pool: PoolName, count: int, kind: Any = None) -> None:
        before = set(self.there)
        if self.gpu_inventory is not None and len(before) + count > self.gpu_inventory:
            raise ResourceExhaustedError("no GPU is free", reason="NO_GPU")
        await super().start(pool, count, kind)
        for name in self.there.keys() - before:
            self.there[name] = replace(self.there[name], created_wall_s=self.world.clock.now)

    async def stop(self, pool: PoolName, names: Sequence[str], drain_s: float) -> None:
        await super().stop(pool, names, drain_s)
        self.told |= dict.fromkeys(names, self.world.clock.now)

    @property
    def gpu_inventory(self) -> int | None:
        """Without those of other models, as on Docker."""
        others = sum(len(one.there) for one in self.world.served.values() if one is not self)
        return None if self.world.gpus is None else self.world.gpus - others

    def ready(self, pool: str) -> int:
        return sum(one.state is ReplicaState.READY for one in self.seen(pool))

    def resting_in(self, pool: str) -> int:
        return sum(one.state is ReplicaState.STANDBY for one in self.seen(pool))

    def pass_time(self) -> None:
        """Those that have drained end."""
        now_s = self.world.clock.now
        self.there = {
            name: one
            for name, one in self.there.items()
            if not one.stopping or now_s < self.told[name] + DRAIN_S
        }


class World:
    """Two models. `steps` is how the counts of both went."""

    def __init__(
        self, limits: dict[str, float], policies: dict[str, ScalingPolicy], loads: dict[str, Load]
    ) -> None:
        self.clock, self.starting, self.turns = Clock(BEGAN_S), asyncio.Lock(), asyncio.Lock()
        least = {model: (lambda one=one: least_uses(one)) for model, one in policies.items()}
        self.account = SharedAccount(limits, least, move_after_s=30.0, clock=self.clock)  # type: ignore[arg-type]
        self.limits = limits
        self.served = {model: Served(model, loads[model], one, self) for model, one in policies.items()}
        self.loops = {model: one.attach() for model, one in self.served.items()}
        self.gpus: int | None = None
        self.steps: list[dict[str, int]] = []
        self.away: set[str] = set()
        """Models whose loops do not run."""

    async def run(self, seconds: float) -> None:
        end_s = self.clock.now + seconds
        while self.clock.now < end_s:
            for model, loop in self.loops.items():
                if model not in self.away:
                    await loop.tick()
                self.check()
            self.steps.append({model: len(one.there) for model, one in self.served.items()})
            self.clock.now += STEP_S
            for one in self.served.values():
                one.pass_time()

    def check(self) -> None:
        """By what really exists, not by the account."""
        total = sum(len(one.there) for one in self.served.values())
        for name in (MONEY, GPUS, of_class("only")):
            assert total <= self.limits.get(name, 1000), self.steps[-3:]

    def starts(self) -> int:
        """Replicas ordered so far."""
        return sum(one._number for one in self.served.values())

    def counts(self) -> dict[str, int]:
        return {model: len(one.there) for model, one in self.served.items()}


FIRST = Load(bursts=((0.0, BEGAN_S + 300, 4.0),))
"""High until ten minutes have passed, then low; and the other way round."""
SECOND = Load(bursts=((BEGAN_S + 300, 1e9, 4.0),))


def two(limits: dict[str, float], classes: Sequence[dict[str, Any]] = PRICED) -> World:
    policies = {"a": rules(classes), "b": rules(classes)}
    return World(limits, policies, {"a": FIRST, "b": SECOND})


@pytest.mark.parametrize(
    ("limits", "classes"),
    [
        ({MONEY: 16.0}, PRICED),
        ({of_class("only"): 16.0}, PRICED),
        ({GPUS: 16.0}, ()),
        ({GPUS: 16.0}, PRICED),
    ],
)
async def test_the_load_moves_from_one_model_to_the_other(
    limits: dict[str, float], classes: Sequence[dict[str, Any]]
) -> None:
    world = two(limits, classes)
    await world.run(300)
    first = world.counts()
    assert first["a"] > first["b"] > 1
    assert sum(first.values()) >= 14, "what there is, is used"
    before = world.starts()
    await world.run(500)
    then = world.counts()
    assert then["b"] > then["a"] > 1
    assert sum(then.values()) >= 14
    assert world.starts() - before <= 14, "nothing was started twice for the same load"
    for pool in ("prefill", "decode"):
        assert all(one.ready(pool) >= 1 for one in world.served.values())


async def test_steady_loads_move_nothing_to_and_fro() -> None:
    policies = {"a": rules(), "b": rules()}
    loads = {"a": Load(requests_per_s=30.0), "b": Load(requests_per_s=31.0)}
    world = World({MONEY: 14.0}, policies, loads)
    await world.run(300)
    before, counts = world.starts(), world.counts()
    await world.run(500)
    assert (world.starts(), world.counts()) == (before, counts)


@pytest.mark.parametrize("limits", [{MONEY: 16.0}, {of_class("only"): 16.0}])
async def test_standbys_are_kept_of_what_nobody_claims(limits: dict[str, float]) -> None:
    policies = {"a": rules(warm_standby=2), "b": rules()}
    low = Load(requests_per_s=4.0)
    world = World(limits, policies, {"a": low, "b": replace(low, bursts=((BEGAN_S + 300, 1e9, 20.0),))})
    await world.run(300)
    assert [world.served["a"].resting_in(pool) for pool in ("prefill", "decode")] == [2, 2]
    await world.run(400)
    assert sum(world.counts().values()) == 16
    assert sum(world.served["a"].resting_in(pool) for pool in ("prefill", "decode")) == 0
    assert world.served["a"].ready("decode") >= 1


async def test_models_with_and_without_classes_share_gpus() -> None:
    """The second has machines of two GPUs, twice as fast and cheaper for that; where GPUs are short it takes others."""
    kinds = [
        {"name": "one", "price_per_hour": 2.0, "max_replicas": 40},
        {"name": "two", "price_per_hour": 3.0, "speed": 1.5, "gpus_per_replica": 2, "max_replicas": 40},
    ]
    world = World({GPUS: 16.0}, {"a": rules(()), "b": rules(kinds)}, {"a": FIRST, "b": SECOND})

    def gpus() -> int:
        there = world.served["b"].there.values()
        return sum(2 if one.replica_class == "two" else 1 for one in there) + world.counts()["a"]

    most = 0
    for _ in range(80):
        await world.run(STEP_S)
        most = max(most, gpus())
        if len(world.steps) == 30:
            assert world.counts()["a"] > 8
    assert 14 <= most <= 16
    assert gpus() - world.counts()["a"] > 8, "they have moved"
    causes = {pool.cause for one in world.loops["b"].journal.decisions for pool in one.pools.values()}
    assert "gpu_budget" in causes


async def test_reasons_say_budget_and_who_has_it() -> None:
    world = two({MONEY: 16.0})
    await world.run(300)
    (latest, *_) = reversed(world.loops["a"].journal.decisions)
    reasons = [pool.reason for pool in latest.pools.values() if pool.cause == "money_budget"]
    assert reasons
    assert "within a budget of 16 an hour (a has " in reasons[0]
    assert "b " in reasons[0]
    decisions = {model: loop.journal.decisions for model, loop in world.loops.items()}
    page = shared_document(decisions, world.account.limits, world.account.used)
    assert {one["model"] for one in page["decisions"][:2]} == {"a", "b"}
    assert page["shared"]["limits"] == {MONEY: 16.0}
    used = {model: uses[MONEY] for model, uses in page["shared"]["used"].items()}
    assert used == {model: float(count) for model, count in world.counts().items()}


async def test_gpus_that_no_budget_limits_are_shared_by_inventory() -> None:
    world = two({}, ())
    world.limits, world.gpus = {GPUS: 16.0}, 16
    await world.run(300)
    assert world.counts()["a"] > world.counts()["b"] > 1
    await world.run(500)
    assert world.counts()["b"] > world.counts()["a"] > 1


async def test_the_other_goes_on_while_one_is_stuck_or_fails() -> None:
    world = two({MONEY: 16.0})
    await world.run(200)
    counts = world.counts()
    world.away = {"a"}
    await world.run(400)
    assert world.counts()["a"] == counts["a"], "nobody ends what is not theirs"
    assert world.counts()["b"] == 16 - counts["a"]
    world.away = set()
    world.served["a"].failure = UnavailableError("the Engine does not answer", reason="DOCKER")
    await world.run(60)
    assert world.counts()["b"] == 16 - counts["a"]
    world.served["a"].failure = None
    await world.run(400)
    assert world.counts()["b"] > world.counts()["a"]


async def test_after_a_restart_what_is_found_counts() -> None:
    world = two({MONEY: 16.0})
    await world.run(300)
    again = two({MONEY: 16.0})
    again.clock.now = world.clock.now
    for model, one in world.served.items():
        again.served[model].there, again.served[model]._number = dict(one.there), 100
    before = world.counts()
    again.served["b"].failure = UnavailableError("not yet", reason="DOCKER")
    await again.run(30)
    assert again.counts() == before
    again.served["b"].failure = None
    await again.run(30)
    assert sum(again.counts().values()) <= 16


async def test_replicas_of_a_host_that_does_not_answer_keep_their_place_on_the_account() -> None:
    world = two({MONEY: 16.0})
    await world.run(100)
    a = world.served["a"]
    a.there = {name: replace(one, presence=Presence.UNKNOWN) for name, one in a.there.items()}
    await world.run(60)
    a.there = {name: replace(one, presence=Presence.GIVEN_UP) for name, one in a.there.items()}
    world.loops["a"].observe = nobody  # type: ignore[assignment]
    await world.loops["a"].actuator.replicas()  # type: ignore[union-attr]
    assert world.account.used["a"][MONEY] == len(a.there), "the coordinators still see them"


async def nobody() -> Snapshot:
    raise UnavailableError("no coordinator answers")


async def test_metrics_have_the_model() -> None:
    world = two({MONEY: 16.0})
    await world.run(10)
    own = {model: loop_metrics(loop.status) for model, loop in world.loops.items()}
    families = {family.name: family for family in shared_metrics(own, world.account)}
    desired = families["splitserve_autoscaler_desired_replicas"].samples
    assert {(one.labels["model"], one.labels["pool"]) for one in desired} == {
        (model, pool) for model in ("a", "b") for pool in ("prefill", "decode")
    }
    used = families["splitserve_autoscaler_shared_used"].samples
    assert {one.labels["model"]: one.value for one in used} == {
        m: float(n) for m, n in world.counts().items()
    }


async def test_shadows_decide_within_the_budget_and_claim_nothing() -> None:
    """One that wants all there is sees what the other model has, and takes nothing from it."""
    world = two({MONEY: 16.0})
    always = [{"start": "00:00", "end": "00:00", "replicas": 20}]
    pool = {"kind": "schedule", "schedule": always, "max_replicas": 20, "classes": PRICED}
    greedy = parse_policy({"prefill": pool, "decode": pool})
    own = ModelAccount(world.account, "a", lambda: world.served["a"].policy)
    one = ShadowPolicy("greedy", make_decide(greedy))
    world.loops["a"].shadows = Shadows([one], within=own.within)
    await world.run(200)
    assert one.settled(5.0)
    assert one.plan is not None
    wanted = sum(one.plan.pool(pool).desired for pool in ("prefill", "decode"))
    assert wanted <= 16 - world.counts()["b"]
    causes = {one.plan.prefill.cause, one.plan.decode.cause}
    assert "money_budget" in causes
    plain = two({MONEY: 16.0})
    await plain.run(200)
    assert plain.steps == world.steps, "it changes nothing"
    assert world.account.left_for("a") == {MONEY: 16.0 - world.counts()["b"]}


def test_an_adopted_replica_is_of_the_class_that_it_says() -> None:
    policy = rules([*PRICED, {"name": "dear", "price_per_hour": 9.0, "speed": 2}])
    account = SharedAccount({MONEY: 20.0}, {"a": dict})
    own = ModelAccount(account, "a", lambda: policy)
    own.listed([ActualReplica("p", "prefill", False, 0.0)], account.generation)
    assert account.used["a"][MONEY] == 1.0
    seen = snapshot(prefill=0)
    seen = replace(
        seen,
        prefill=replace(
            seen.prefill, replicas=(Replica("p", ReplicaState.READY, 0.0, replica_class="dear"),)
        ),
    )
    own.deciding(make_decide(policy))(None, seen)
    assert account.used["a"][MONEY] == 9.0
