"""A coordinator's planner and an autoscaler's control loop on the same workers, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from autoscaler.actuators.actuator import ActualReplica
from autoscaler.control_loop import ControlLoop, LoopSettings
from autoscaler.decide import make_decide
from autoscaler.decisions.decider import Decider
from autoscaler.policies.policy_file import parse_policy
from autoscaler.policies.recommendation import PoolStatus, Recommend, Recommendation
from autoscaler.policy_in_force import loop_settings
from autoscaler.reconcile import PlannedRotation
from autoscaler.snapshot import (
    POOLS,
    DecodeSignals,
    PoolName,
    PrefillSignals,
    Replica,
    ReplicaState,
    Snapshot,
)
from coordinator.admission.entry import NOTHING_HELD
from coordinator.leanings.leaning_loop import LeaningLoop
from coordinator.leanings.leaning_planner import RETURN_AFTER_S
from coordinator.workers.registry import Registry
from coordinator.workers.rotation import checked_plan
from splitserve.config.coordinator import AdmissionConfig, CoordinatorConfig
from splitserve.v1 import registry_pb2, scaling_pb2
from tests.support.cluster.registrations import registration
from tests.support.scaling.fake_actuator import FakeActuator
from tests.support.waiting import PATIENCE_S

LEANINGS: dict[PoolName, registry_pb2.Pool.ValueType] = {
    "prefill": registry_pb2.POOL_PREFILL,
    "decode": registry_pb2.POOL_DECODE,
}
CONFIG = CoordinatorConfig(admission=AdmissionConfig(ttft_slo_s=1.0, tpot_slo_s=0.05))
INTERVAL_S, WINDOW_S, STEP_S = 5.0, 60.0, 0.5
QUIET = registry_pb2.WorkerLoad(total_blocks=1000, free_blocks=1000, prefill_tokens_per_second=1000)
PROMPTS = registry_pb2.WorkerLoad(
    total_blocks=1000, free_blocks=1000, prefill_tokens_per_second=1000, waiting_tokens=900
)
TOKENS = registry_pb2.WorkerLoad(
    streams=40,
    running_requests=40,
    total_blocks=1000,
    free_blocks=900,
    prefill_tokens_per_second=1000,
    step_fit=registry_pb2.DecodeStepFit(base_ms=30, sequence_ms=1),
)
"""Of each worker; more than the side keeps in time, however many lean there."""


@dataclass
class World:
    """Neutral workers that follow at once, a coordinator, and a policy that wants what it is told to want."""

    leans: dict[str, PoolName]
    rules: dict[str, Any] = field(default_factory=dict)
    wanted: tuple[int, int] = (1, 1)
    load: registry_pb2.WorkerLoad = field(default_factory=lambda: QUIET)
    now_s: float = 0.0
    moves: list[tuple[float, str, PoolName]] = field(default_factory=list)
    plans: list[PlannedRotation] = field(default_factory=list)

    def __post_init__(self) -> None:
        pool = {"kind": "slo", "target_ms": 100, "max_replicas": 4}
        given = {name: _given(pool | self.rules.pop(name, {})) for name in POOLS}
        policy = parse_policy({"workers": "neutral", "interval_s": INTERVAL_S} | self.rules | given)
        functions: dict[PoolName, Recommend] = {"prefill": self._recommends(0), "decode": self._recommends(1)}
        self.registry, self.actuator = Registry(1e9), FakeActuator()
        self.planner = LeaningLoop(CONFIG, self.registry, lambda model: NOTHING_HELD)
        self.loop = ControlLoop(
            self._observe,
            make_decide(policy, functions),
            self,
            self.actuator,
            loop_settings(policy, LoopSettings()),
            decider=Decider(turn_s=PATIENCE_S),
        )
        for number, (name, pool_name) in enumerate(self.leans.items()):
            self.actuator.there[name] = ActualReplica(name, pool_name, False, float(number))
            request = registration(name, LEANINGS[pool_name])
            request.neutral = True
            self.registry.register(request, 0.0)
            self.registry.set_output_open((name, 1), True)
        for _ in range(2):
            self._report()

    def _recommends(self, side: int) -> Recommend:
        def recommend(memory: None, snapshot: Snapshot, status: PoolStatus) -> tuple[Recommendation, None]:
            return Recommendation(self.wanted[side], "told", float(self.wanted[side])), memory

        return recommend

    async def apply(self, where: PlannedRotation, decisions: Sequence[scaling_pb2.PoolDecision]) -> None:
        """As `CoordinatorRotation`, with one coordinator."""
        self.plans.append(where)
        request = scaling_pb2.ApplyPlanRequest(
            active_worker_ids=where.active,
            standby_worker_ids=where.standby,
            movable_worker_ids=where.movable,
            prefill_leaning_worker_ids=[name for name, pool in where.leanings.items() if pool == "prefill"],
            decode_leaning_worker_ids=[name for name, pool in where.leanings.items() if pool == "decode"],
        )
        self.registry.apply_plan(checked_plan(request, self.now_s, self.registry.plan))

    async def _observe(self) -> Snapshot:
        seen: dict[PoolName, list[Replica]] = {pool: [] for pool in POOLS}
        for name, pool in self.leans.items():
            state = ReplicaState.DRAINING if self.actuator.there[name].stopping else ReplicaState.READY
            seen[pool].append(Replica(name, state, 0.0, neutral=True))
        signals = PrefillSignals(tuple(seen["prefill"])), DecodeSignals(tuple(seen["decode"]))
        return Snapshot(self.now_s, *signals, window_s=WINDOW_S)

    def _report(self) -> None:
        for name, before in list(self.leans.items()):
            worker = self.registry.get((name, 1))
            assert worker is not None
            pool = self.leans[name] = self.registry.leaning_asked_of(worker) or before
            if pool != before:
                self.moves.append((self.now_s, name, pool))
            report = registry_pb2.ReportRequest(
                worker_id=name, epoch=1, load=self.load, leaning=LEANINGS[pool]
            )
            report.draining = self.actuator.there[name].stopping
            report.connected_agent_ids.extend(peer.agent_id for peer in self.registry.peers_of(worker))
            self.registry.report(report, self.now_s)

    async def run(self, seconds: float) -> None:
        """So many seconds, in each of which the planner looks once; decisions come every five."""
        for _ in range(round(seconds / STEP_S)):
            if self.now_s % INTERVAL_S == 0:
                await self.loop.tick()
            self._report()
            if self.now_s % 1.0 == 0:
                self.planner.look(self.now_s)
            self._report()
            self.now_s += STEP_S

    @property
    def sides(self) -> tuple[int, int]:
        prefill = sum(pool == "prefill" for pool in self.leans.values())
        return prefill, len(self.leans) - prefill


def _given(rules: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rules.items() if value is not None}


AT_ONCE = {"behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}}


def world(prefill: int, decode: int, rules: dict[str, Any] | None = None) -> World:
    leans: dict[str, PoolName] = {f"w{n}": "prefill" for n in range(prefill)}
    leans |= {f"w{n}": "decode" for n in range(prefill, prefill + decode)}
    return World(leans, dict(rules or {}), wanted=(prefill, decode))


async def test_a_load_that_turns_is_followed_within_10_s_and_the_plan_goes_on_from_there() -> None:
    """The policy sees a minute late what has come, and has no need of a start then."""
    here = world(2, 1)
    await here.run(20)
    assert here.moves == []
    here.load = TOKENS
    await here.run(10)
    assert here.sides == (1, 2)
    await here.run(45)
    assert len(here.moves) == 1
    here.wanted = (1, 2)
    await here.run(60)
    assert (len(here.moves), here.sides, here.actuator.calls) == (1, (1, 2), [])


async def test_a_policy_that_insists_gets_its_way_after_its_window_and_they_do_not_take_turns() -> None:
    """For ten minutes the policy wants two for prefill, and the planner two for decode."""
    here = world(2, 1, {"gpu_budget": 3})
    here.load = TOKENS
    await here.run(600)
    times = [at_s for at_s, _, _ in here.moves]
    assert [pool for _, _, pool in here.moves[:4]] == ["decode", "prefill"] * 2
    assert all(later - before >= RETURN_AFTER_S - STEP_S for before, later in pairwise(times))
    assert max(sum(at_s <= other < at_s + 60 for other in times) for at_s in times) <= 2, "in any minute"
    assert len(times) <= 2 * 600 / (WINDOW_S + RETURN_AFTER_S) + 2
    assert here.actuator.calls == []


async def test_what_left_is_not_replaced_and_what_came_not_ended_for_a_window() -> None:
    here = world(2, 1, {"prefill": AT_ONCE, "decode": AT_ONCE})
    here.load = TOKENS
    await here.run(5)
    assert here.sides == (1, 2)
    here.wanted = (3, 1)
    await here.run(50)
    assert (here.sides, here.actuator.calls) == ((1, 2), [])
    here.wanted = (1, 4)
    await here.run(5)
    assert here.actuator.calls == [("start", "decode", 2)], "what the other side needs is"


@pytest.mark.parametrize(
    "rules",
    [
        {"prefill": {"min_replicas": 2}},
        {"decode": {"max_replicas": 1}},
        {"ratio": {"min_prefill_per_decode": 2.0}},
        {"decode": {"kind": "schedule", "target_ms": None}},
    ],
)
async def test_what_is_binding_holds_while_the_other_side_is_pressed(rules: dict[str, Any]) -> None:
    here = world(2, 1, rules)
    here.load = TOKENS
    await here.run(40)
    assert (here.moves, here.actuator.calls) == ([], [])


async def test_one_that_is_to_end_ends_where_it_leans() -> None:
    here = world(3, 1, {"prefill": AT_ONCE, "decode": AT_ONCE})
    await here.run(5)
    here.load, here.wanted = TOKENS, (2, 1)
    await here.run(60)
    (ending,) = (name for name, one in here.actuator.there.items() if one.stopping)
    assert here.leans[ending] == "prefill"
    assert ending not in here.plans[-1].leanings
    assert here.sides == (2, 2), "of the others one has moved"


async def test_a_restarted_autoscaler_goes_on_from_where_workers_lean() -> None:
    here = world(2, 1)
    here.load = TOKENS
    await here.run(10)
    assert here.sides == (1, 2)
    fresh = World(dict(here.leans), wanted=(1, 1), load=TOKENS)
    await fresh.run(30)
    assert fresh.moves == []
    assert fresh.actuator.calls == []


async def test_when_the_plan_has_expired_the_planner_goes_on_alone() -> None:
    here = world(3, 1, {"prefill": {"min_replicas": 3}})
    here.load = TOKENS
    await here.run(10)
    assert here.sides == (3, 1)
    here.registry.expire(1e6)
    for second in range(40):
        here.now_s = 1e6 + second
        here._report()
        here.planner.look(here.now_s)
    assert here.sides[1] > 1
