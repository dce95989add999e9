"""The control loop against an actuator and a rotation in memory."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from dataclasses import replace
from typing import Any

import pytest

from autoscaler import control_loop
from autoscaler.actuators.actuator import Presence
from autoscaler.control_loop import CHANGE_ROLE_S, ControlLoop
from autoscaler.lease import Lease
from autoscaler.loop_metrics import loop_metrics
from autoscaler.plan import Memory, PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import parse_policy
from autoscaler.reconcile import PlannedRotation
from autoscaler.snapshot import DecodeSignals, PrefillSignals, Replica, ReplicaState, Snapshot
from coordinator.telemetry.scaling_lease import ScalingLeases
from splitserve.errors import FailedPreconditionError, SplitserveError, UnavailableError
from splitserve.roles import PoolName
from splitserve.v1 import scaling_pb2
from tests.support.scaling.fake_actuator import FakeActuator
from tests.support.scaling.signal_sources import Clock
from tests.support.waiting import PATIENCE_S

DOWN = UnavailableError("nobody answers")


class World:
    """One policy, one actuator, coordinators that see every replica as ready by default."""

    def __init__(self, interval_s: float = 15.0, *, dry_run: bool = False, **of_pools: float) -> None:
        self.actuator = FakeActuator()
        self.plan = ScalingPlan(PoolPlan(1), PoolPlan(1))
        self.states: dict[str, ReplicaState] = {}
        self.complete = True
        self.blind: UnavailableError | None = None
        self.deaf: SplitserveError | None = None
        self.applied: list[tuple[list[str], list[str]]] = []
        self.told: list[Any] = []
        self.rounds: list[Memory] = []
        self.snapshots: list[Snapshot] = []
        self.now_s = 0.0
        self.others: list[Replica] = []
        self.unregistered: set[str] = set()
        self.has_role: dict[str, PoolName] = {}
        """Of workers that can change it."""
        self.roles: dict[str, PoolName] = {}
        pools = {"prefill": {"drain_s": 7.0}, "decode": {"drain_s": 9.0}}
        given = {name: {"target_ms": 100.0} | pool | of_pools for name, pool in pools.items()}
        policy = parse_policy({"interval_s": interval_s} | given)
        self.loop = ControlLoop(self.observe, self.decide, self, self.actuator, policy, dry_run)

    async def observe(self) -> Snapshot:
        if self.blind is not None:
            raise self.blind
        seen: dict[str, list[Replica]] = {"prefill": [], "decode": []}
        for replica in await self.actuator.replicas():
            registered = replica.name not in self.unregistered
            if not registered and replica.presence is Presence.GIVEN_UP:
                continue
            state = self.states.get(replica.name, ReplicaState.READY)
            pool = self.has_role.get(replica.name, replica.pool)
            seen[pool].append(
                Replica(
                    replica.name,
                    ReplicaState.DRAINING if replica.stopping else state,
                    0.0,
                    registered=registered,
                    can_change_role=replica.name in self.has_role,
                    created_wall_s=replica.created_wall_s,
                    reachable=replica.presence is Presence.HERE,
                )
            )
        for replica in self.others:
            seen["prefill"].append(replica)
        signals = PrefillSignals(tuple(seen["prefill"])), DecodeSignals(tuple(seen["decode"]))
        return Snapshot(self.now_s, *signals, complete=self.complete)

    def decide(self, memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        self.rounds.append(memory)
        self.snapshots.append(snapshot)
        return self.plan, (memory or 0) + 1

    async def apply(self, where: PlannedRotation, decisions: Any, valid_s: float) -> None:
        if self.deaf is not None:
            raise self.deaf
        self.applied.append((sorted(where.standby), sorted(where.active)))
        self.told = list(decisions)
        self.roles = dict(where.roles)

    def wants(self, prefill: int, decode: int, standby: int = 0) -> None:
        self.plan = ScalingPlan(PoolPlan(prefill, standby, "more came"), PoolPlan(decode), one_shape=True)

    async def tick(self) -> list[str]:
        await self.loop.tick()
        return sorted(self.actuator.there)


async def test_it_starts_what_is_missing_once_and_remembers() -> None:
    world = World()
    world.wants(2, 1)
    there = await world.tick()
    assert there == ["decode-2", "prefill-0", "prefill-1"]
    assert await world.tick() == there
    assert world.rounds == [None, 1]


async def test_coordinators_are_told_why_and_what_comes_next() -> None:
    world = World()
    world.wants(2, 1)
    await world.tick()
    prefill, decode = world.told
    assert (prefill.desired, prefill.reason, list(prefill.next_actions)) == (2, "more came", ["start 2"])
    assert (decode.desired, list(decode.next_actions)) == (1, ["start 1"])
    await world.tick()
    assert [list(one.next_actions) for one in world.told] == [[], []]


async def test_workers_change_roles_before_one_is_started() -> None:
    world = World()
    world.wants(2, 1)
    assert await world.tick() == ["decode-2", "prefill-0", "prefill-1"]
    world.has_role = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-2": "decode"}
    world.wants(1, 2)
    await world.tick()
    (moved,) = [name for name, pool in world.roles.items() if pool == "decode" and name != "decode-2"]
    assert len(world.actuator.there) == 3, "nothing was started"
    await world.tick()
    told = {"decode-2": "decode", "prefill-0": "prefill", "prefill-1": "prefill", moved: "decode"}
    assert world.roles == told, "nor is another one moved while it has not taken its role"
    assert world.loop.status.actions["change_role"] == 1
    world.has_role[moved] = "decode"
    await world.tick()
    assert world.actuator.calls[-1][0] == "start", "no action once it has"
    world.wants(1, 1)
    world.has_role["decode-2"] = "decode"
    await world.tick()
    assert len(world.actuator.calls) == 3
    kind, names, drain_s = world.actuator.calls[-1]
    assert (kind, world.has_role[names[0]], drain_s) == ("stop", "decode", 9.0)


async def test_a_worker_that_does_not_take_its_role_is_counted_where_it_is_again() -> None:
    world = World()
    world.wants(2, 1)
    names = await world.tick()
    world.has_role = {name: world.actuator.there[name].pool for name in names}
    world.wants(1, 2)
    await world.tick()
    assert world.loop.status.actions["change_role"] == 1
    world.now_s += CHANGE_ROLE_S + 1
    await world.tick()
    assert world.loop.status.actions["change_role"] == 2


async def test_scale_in_is_one_at_a_time_and_out_of_rotation_first() -> None:
    world = World()
    world.wants(3, 1)
    await world.tick()
    await world.tick()
    world.wants(1, 1)
    await world.tick()
    await world.tick()
    assert world.actuator.calls[2:] == [("stop", ("prefill-2",), 7.0)]
    assert world.applied[2] == (["prefill-2"], ["decode-3", "prefill-0", "prefill-1"])
    world.actuator.end()
    await world.tick()
    assert world.actuator.calls[3:] == [("stop", ("prefill-1",), 7.0)]


async def test_what_vanished_is_replaced() -> None:
    world = World()
    await world.tick()
    del world.actuator.there["prefill-0"]
    assert await world.tick() == ["decode-1", "prefill-2"]


async def test_a_new_loop_adopts_what_runs() -> None:
    world = World()
    world.wants(2, 2)
    there = await world.tick()
    after = World()
    after.actuator = after.loop.actuator = world.actuator
    after.wants(2, 2)
    assert await after.tick() == there


async def test_standbys_reach_the_coordinators() -> None:
    world = World()
    world.wants(1, 1, standby=1)
    await world.tick()
    await world.tick()
    assert world.applied[-1] == (["prefill-1"], ["decode-2", "prefill-0"])
    world.states["prefill-1"] = ReplicaState.STANDBY
    world.wants(2, 1, standby=1)
    await world.tick()
    assert world.applied[-1] == ([], ["decode-2", "prefill-0", "prefill-1"])


@pytest.mark.parametrize("hop", ["observe", "actuator", "rotate"])
async def test_a_failing_hop_is_tried_again_and_scales_nothing_down(hop: str) -> None:
    world = World()
    world.wants(3, 1)
    there = await world.tick()
    world.wants(3, 2)
    world.blind = DOWN if hop == "observe" else None
    world.actuator.failure = DOWN if hop == "actuator" else None
    world.deaf = DOWN if hop == "rotate" else None
    await world.tick()
    assert set(world.actuator.there) >= set(there)
    assert sum(world.loop.status.errors.values()) == 1
    world.blind = world.actuator.failure = world.deaf = None
    assert len(await world.tick()) == 5


async def test_half_a_look_removes_nothing_and_still_adds() -> None:
    world = World()
    world.wants(2, 1)
    await world.tick()
    await world.tick()
    world.complete = False
    world.wants(1, 2, standby=1)
    assert len(await world.tick()) == 4
    assert world.applied[-1][0] == []
    assert not [call for call in world.actuator.calls if call[0] == "stop"]


async def test_a_hop_that_hangs_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_loop, "OBSERVE_S", 0.01)
    world = World()

    async def hang() -> Snapshot:
        await asyncio.Event().wait()
        raise AssertionError

    world.loop.observe = hang
    await world.tick()
    assert world.loop.status.errors == {"observe": 1}


async def test_a_failed_start_does_not_keep_the_other_pool_from_acting() -> None:
    world = World()
    world.actuator = world.loop.actuator = FakeActuator(gpus=2)
    world.wants(3, 1)
    await world.tick()
    assert [call[:2] for call in world.actuator.calls] == [("start", "prefill"), ("start", "decode")]
    assert world.loop.status.errors == {"start": 2}


async def test_dry_run_decides_and_acts_on_nothing(caplog: pytest.LogCaptureFixture) -> None:
    world = World(dry_run=True)
    world.wants(2, 1)
    with caplog.at_level(logging.INFO, "splitserve"):
        assert await world.tick() == []
    assert world.applied == []
    assert world.actuator.tidied == 0
    assert [record.message for record in caplog.records] == ["scaling.decided"] * 2
    assert caplog.records[0].__dict__["event_fields"]["actions"] == ["start"]


async def test_what_it_did_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    with caplog.at_level(logging.INFO, "splitserve"):
        world.wants(2, 1)
        await world.tick()
        caplog.clear()
        await world.tick()
        assert not caplog.records  # no news
        world.wants(3, 1)
        await world.tick()
    acted = caplog.records[-1]
    assert acted.message == "scaling.acted"
    assert acted.__dict__["event_fields"] == {
        "pool": "prefill",
        "action": "start",
        "reason": "more came",
        "count": 1,
    }


async def test_without_an_actuator_it_looks_at_whatever_is_registered() -> None:
    world = World()
    await world.tick()
    world.loop.actuator = None
    world.wants(4, 1)
    there = sorted(world.actuator.there)
    assert await world.tick() == there
    assert {pool: plan.desired for pool, plan in world.loop.status.plans.items()} == {
        "prefill": 4,
        "decode": 1,
    }


async def test_metrics() -> None:
    world = World()
    world.wants(2, 1)
    await world.tick()
    await world.tick()
    found = metrics_of(world)
    assert found["splitserve_autoscaler_desired_replicas", "prefill"] == 2
    assert found["splitserve_autoscaler_replicas", "prefill", "ready"] == 2
    assert found["splitserve_autoscaler_decisions_total",] == 2
    assert found["splitserve_autoscaler_actions_total", "start"] == 2
    assert found["splitserve_autoscaler_errors_total", "observe"] == 0
    assert found["splitserve_autoscaler_reason", "prefill", "policy"] == 1
    assert found["splitserve_autoscaler_reason", "prefill", "gpu_budget"] == 0


async def test_it_ticks_until_it_is_cancelled() -> None:
    world = World(interval_s=0.001)
    third, here = asyncio.Event(), asyncio.get_running_loop()

    def decide(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        plan, after = world.decide(memory, snapshot)
        if after == 3:
            here.call_soon_threadsafe(third.set)
        return plan, after

    world.loop.decide = decide
    task = asyncio.create_task(world.loop.run())
    await asyncio.wait_for(third.wait(), PATIENCE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_policy_that_fails_holds_up_no_replacement_and_gives_up_nothing() -> None:
    world = World()
    world.wants(2, 1)
    assert await world.tick() == ["decode-2", "prefill-0", "prefill-1"]
    world.states["prefill-0"] = ReplicaState.PREEMPTED
    world.states["decode-2"] = ReplicaState.STANDBY
    decide = world.loop.decide

    def fails(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        raise ValueError("no number")

    world.loop.decide = fails
    there = await world.tick()
    assert there == ["decode-2", "prefill-0", "prefill-1", "prefill-3"], "the plan before holds: 2 prefill"
    assert world.loop.status.errors["policy"] == 1
    world.wants(1, 1)
    assert await world.tick() == there
    world.loop.decide = decide
    await world.tick()
    assert world.rounds == [None, 1]
    assert "stop" in [call[0] for call in world.actuator.calls]


async def test_the_event_loop_goes_on_while_a_decision_takes_long() -> None:
    world, free = World(), threading.Event()
    decide = world.loop.decide

    def slow(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        assert free.wait(PATIENCE_S)
        return decide(memory, snapshot)

    world.loop.decide = slow
    ticking = asyncio.create_task(world.tick())
    await asyncio.sleep(0.05)
    assert not ticking.done()
    free.set()
    assert await ticking == ["decode-1", "prefill-0"]


async def test_a_replica_that_starts_for_ever_is_reported_replaced_and_tried_ever_later() -> None:
    world = World(cold_start_s=10.0, start_deadline_cold_starts=2.0)

    def hang() -> None:
        there = world.actuator.there.values()
        world.states |= {r.name: ReplicaState.STARTING for r in there if r.pool == "prefill"}

    world.wants(1, 1)
    await world.tick()
    hang()
    ordered = []
    for _ in range(200):
        world.now_s += 5
        await world.tick()
        ordered.append((world.now_s, sum(call[:2] == ("start", "prefill") for call in world.actuator.calls)))
        world.actuator.end()
        hang()
    times = [at for (at, count), (_, before) in zip(ordered[1:], ordered, strict=False) if count > before]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert len(times) >= 4
    assert gaps == sorted(gaps), "each try waits longer than the one before"
    metrics = metrics_of(world)
    assert metrics["splitserve_autoscaler_failed_starts_total", "prefill"] == len(times)
    assert metrics["splitserve_autoscaler_failed_starts_total", "decode"] == 0
    assert sum(world.actuator.there[name].pool == "decode" for name in world.actuator.there) == 1


async def test_workers_of_another_host_count_and_their_own_dead_do_not() -> None:
    world = World()
    far = [Replica(f"far-{n}", ReplicaState.READY, 0.0, ours=False) for n in range(2)]
    world.others = far
    world.wants(3, 1)
    there = await world.tick()
    assert there == ["decode-1", "prefill-0"], "the plan is for all hosts together"
    await world.tick()
    assert world.applied[-1] == ([], ["decode-1", "prefill-0"])
    # A coordinator knows a dead replica for a while: it is replaced nevertheless.
    del world.actuator.there["prefill-0"]
    world.others = [*far, Replica("prefill-0", ReplicaState.READY, 0.0, ours=False)]
    assert "prefill-2" in await world.tick()


async def test_places_of_a_host_that_was_given_up_are_filled_and_that_is_no_failed_start() -> None:
    world = World()
    world.plan = ScalingPlan(PoolPlan(2), PoolPlan(1))
    await world.loop.tick()
    there = world.actuator.there
    lost = next(name for name in there if name.startswith("prefill"))
    there[lost] = replace(there[lost], presence=Presence.UNKNOWN)
    await world.loop.tick()
    assert len(there) == 3
    there[lost] = replace(there[lost], presence=Presence.GIVEN_UP)
    world.states[lost] = ReplicaState.READY
    await world.loop.tick()
    assert len(there) == 3, "a coordinator sees it"
    world.unregistered.add(lost)
    await world.loop.tick()
    assert len(there) == 4
    assert metrics_of(world)["splitserve_autoscaler_failed_starts_total", "prefill"] == 0


async def test_what_cannot_be_tidied_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.wants(2, 1)

    async def refuses() -> None:
        raise DOWN

    monkeypatch.setattr(world.actuator, "tidy", refuses)
    assert len(await world.tick()) == 3
    assert metrics_of(world)["splitserve_autoscaler_errors_total", "tidy"] == 1


async def test_without_the_lease_it_decides_and_does_not_act() -> None:
    world = World()
    world.wants(2, 1)
    coordinator = FencedCoordinator()
    world.loop.lease = Lease([coordinator], "me", "", 10.0, coordinator.clock)
    await coordinator.acquire_lease("other", valid_s=10.0)
    assert await world.tick() == []
    assert world.applied == []
    assert not world.snapshots[-1].acting
    assert world.actuator.tidied == 0
    assert metrics_of(world)["splitserve_autoscaler_holds_lease",] == 0
    coordinator.clock.now += 11
    assert len(await world.tick()) == 3
    assert world.actuator.tidied == 1
    assert world.snapshots[-1].acting
    assert metrics_of(world)["splitserve_autoscaler_holds_lease",] == 1


@pytest.mark.parametrize("sleeps_in", ["observe", "apply"])
async def test_one_that_sleeps_through_the_end_of_its_lease_does_nothing_when_it_wakes(
    sleeps_in: str,
) -> None:
    world = World()
    world.wants(2, 1)
    coordinator = FencedCoordinator()
    world.loop.lease = Lease([coordinator], "me", "", 10.0, coordinator.clock)

    async def observe() -> Snapshot:
        if sleeps_in == "observe":
            await coordinator.passes_to("other")
        return await world.observe()

    async def apply(where: PlannedRotation, decisions: Any, valid_s: float) -> None:
        if sleeps_in == "apply":
            await coordinator.passes_to("other")

    world.loop.observe = observe
    world.apply = apply  # type: ignore[method-assign]
    assert await world.tick() == []


@pytest.mark.parametrize("has_lease", [True, False])
async def test_a_coordinator_that_refuses_a_stale_plan_stops_the_tick(has_lease: bool) -> None:
    world = World()
    world.wants(2, 1)
    coordinator = FencedCoordinator()
    lease = world.loop.lease = Lease([coordinator], "me", "", 10.0, coordinator.clock) if has_lease else None
    world.deaf = FailedPreconditionError("another acts", reason="STALE_LEASE")
    assert await world.tick() == []
    assert lease is None or not lease.held
    world.deaf = None
    assert len(await world.tick()) == 3


class FencedCoordinator:
    """A coordinator's leases on a clock that stands."""

    target = "c:1"

    def __init__(self) -> None:
        self.clock = Clock()
        self.leases = ScalingLeases(-1000.0, lambda: 1)

    async def acquire_lease(
        self, holder: str, *, valid_s: float, model: str = "", number: int = 0
    ) -> scaling_pb2.AcquireLeaseResponse:
        request = scaling_pb2.AcquireLeaseRequest(holder=holder, model=model, number=number)
        request.valid_for.FromNanoseconds(round(valid_s * 1e9))
        return self.leases.acquire(request, self.clock.now)

    async def passes_to(self, holder: str) -> None:
        """Time passes until the lease ends, and another takes it."""
        self.clock.now += 11
        assert (await self.acquire_lease(holder, valid_s=10.0)).granted


async def test_a_policy_that_fails_is_counted_and_the_loop_goes_on() -> None:
    world = World()
    world.plan = ScalingPlan(PoolPlan(2, error="line 3: KeyError: 'x'"), PoolPlan(1))
    assert len(await world.tick()) == 3
    assert metrics_of(world)["splitserve_autoscaler_errors_total", "policy"] == 1


def metrics_of(world: World) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in loop_metrics(world.loop.status)
        for sample in metric.samples
    }


async def test_at_zero_a_request_that_waits_ends_the_pause() -> None:
    world = World(interval_s=10 * PATIENCE_S, min_replicas=0)
    world.wants(0, 0)
    asked = asyncio.Event()

    async def pause(wait_s: float) -> None:
        assert wait_s > PATIENCE_S
        asked.set()
        world.wants(1, 1)

    world.loop.pause = pause
    running = asyncio.create_task(world.loop.run())
    async with asyncio.timeout(PATIENCE_S):
        await asked.wait()
        while len(world.rounds) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        # Awake, the interval counts.
        while len(world.actuator.there) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert len(world.rounds) == 2
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_preempted_replica_is_replaced_at_the_notice_and_ends_before_its_machine() -> None:
    world = World()
    world.plan = ScalingPlan(PoolPlan(1), PoolPlan(2))
    await world.loop.tick()
    world.actuator.calls.clear()
    taken = next(name for name, replica in world.actuator.there.items() if replica.pool == "decode")
    world.states[taken] = ReplicaState.PREEMPTED
    await world.loop.tick()
    assert world.actuator.calls == [("start", "decode", 1), ("stop", (taken,), 9.0)]
    assert taken not in world.applied[-1][1], "it is in rotation no more"
    await world.loop.tick()
    assert len(world.actuator.calls) == 2
    world.actuator.end()
    await world.loop.tick()
    assert len(world.actuator.calls) == 2
    assert world.loop.status.failed_starts["decode"] == 0
