"""Decisions on threads: the event loop goes on, loops on one account take turns, an overdue one holds up nobody."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from autoscaler.decisions.decider import Decided, Decider, held_over
from autoscaler.plan import Memory, PoolPlan, ScalingPlan
from autoscaler.snapshot import DecodeSignals, PrefillSignals, Snapshot
from tests.support.scaling.signal_sources import Clock
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(60)
NOW = Snapshot(5.0, PrefillSignals(), DecodeSignals())
PLAN = ScalingPlan(PoolPlan(1, gives="x"), PoolPlan(2))
INTERVAL_S = 15.0


class Policy:
    """Decides once it is let go, at once by default."""

    def __init__(self, free: bool = True) -> None:
        self.free, self.began = threading.Event(), threading.Event()
        self.seen: list[Snapshot] = []
        if free:
            self.free.set()

    def decide(self, memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        self.seen.append(snapshot)
        self.began.set()
        assert self.free.wait(PATIENCE_S)
        return PLAN, (memory or 0) + 1

    async def asked(self, decider: Decider, snapshot: Snapshot = NOW) -> Decided | None:
        return await decider.decided(self.decide, 6, snapshot, INTERVAL_S)


async def until_made(decider: Decider) -> None:
    await decider.pause(forever, 0.0)


async def forever(_seconds: float) -> None:
    await asyncio.Event().wait()


async def test_it_is_made_of_what_is_added_on_the_event_loop_and_told_there() -> None:
    policy, told, threads = Policy(), list[ScalingPlan](), set[threading.Thread]()

    def within(snapshot: Snapshot) -> Snapshot:
        threads.add(threading.current_thread())
        return replace(snapshot, now_s=9.0)

    made = await policy.asked(Decider(within=within, told=told.append, turn_s=PATIENCE_S))
    assert made == Decided(replace(NOW, now_s=9.0), PLAN, 7)
    assert told == [PLAN]
    assert threads == {threading.current_thread()}


async def test_the_event_loop_goes_on_meanwhile_and_the_next_decision_waits() -> None:
    policy, clock = Policy(free=False), Clock(100.0)
    decider = Decider(turn_s=0.0, clock=clock)
    assert await policy.asked(decider) is None
    assert decider.is_busy
    assert await policy.asked(decider, replace(NOW, now_s=6.0)) is None
    assert (len(policy.seen), decider.overdue) == (1, 0)
    clock.now += INTERVAL_S + 1
    for _ in range(3):
        assert await policy.asked(decider) is None
    assert decider.overdue == 1, "once for each decision"
    policy.free.set()
    await until_made(decider)
    made = await policy.asked(decider)
    assert made is not None
    assert made.snapshot.now_s == 5.0
    assert not decider.is_busy


async def test_loops_on_one_account_take_turns() -> None:
    turns, first = asyncio.Lock(), Policy(free=False)
    order: list[str] = []

    def decider(name: str) -> Decider:
        def within(snapshot: Snapshot) -> Snapshot:
            order.append(f"{name} sees")
            return snapshot

        return Decider(turns, within, lambda plan: order.append(f"{name} claims"), PATIENCE_S)

    async with asyncio.TaskGroup() as group:
        group.create_task(first.asked(decider("a")))
        group.create_task(Policy().asked(decider("b")))
        assert await asyncio.to_thread(first.began.wait, PATIENCE_S)
        first.free.set()
    assert order == ["a sees", "a claims", "b sees", "b claims"]


async def test_one_that_takes_longer_than_its_turn_holds_up_no_other() -> None:
    turns, stuck, other = asyncio.Lock(), Policy(free=False), Policy()
    slow = Decider(turns, turn_s=0.0)
    assert await stuck.asked(slow) is None
    made = await other.asked(Decider(turns, turn_s=PATIENCE_S))
    assert made is not None
    stuck.free.set()
    await until_made(slow)
    assert await stuck.asked(slow) is not None


async def test_a_pause_ends_with_the_decision_or_with_the_rest() -> None:
    policy = Policy(free=False)
    decider, rested = Decider(turn_s=0.0), list[float]()

    async def rest(seconds: float) -> None:
        rested.append(seconds)

    await decider.pause(rest, 3.0)
    await policy.asked(decider)
    await decider.pause(rest, 4.0)  # a machine is to be taken away: the loop looks at once
    assert rested == [3.0, 4.0]
    policy.free.set()
    await decider.pause(forever, 0.0)


async def test_the_end_of_a_decision_that_nobody_takes_ends_one_pause() -> None:
    policy, decider, rested = Policy(free=False), Decider(turn_s=0.0), list[float]()

    async def rest(seconds: float) -> None:
        await asyncio.to_thread(lambda: None)
        rested.append(seconds)

    await policy.asked(decider)
    policy.free.set()
    await until_made(decider)
    for seconds in (3.0, 4.0):
        await decider.pause(rest, seconds)
    assert rested == [3.0, 4.0], "each to its end"
    assert await policy.asked(decider) is not None


async def test_after_a_decision_that_passed_something_over_there_is_no_rest_once() -> None:
    policy, decider, rested = Policy(free=False), Decider(turn_s=0.0), list[float]()

    async def rest(seconds: float) -> None:
        rested.append(seconds)

    await policy.asked(decider)
    await decider.pause(rest, 3.0)  # demand, a notice, or the interval
    assert await policy.asked(decider, replace(NOW, now_s=6.0)) is None
    policy.free.set()
    await until_made(decider)
    made = await policy.asked(decider, replace(NOW, now_s=7.0))
    assert made is not None
    assert made.snapshot == NOW
    await decider.pause(rest, 4.0)
    assert rested == [3.0]
    await decider.pause(rest, 5.0)
    assert rested == [3.0, 5.0], "a loop that cannot look now does not spin"


async def test_one_that_is_late_by_itself_begins_no_next_one_sooner() -> None:
    policy, decider, rested = Policy(free=False), Decider(turn_s=0.0), list[float]()

    async def rest(seconds: float) -> None:
        rested.append(seconds)

    await policy.asked(decider)
    policy.free.set()
    await until_made(decider)
    assert await policy.asked(decider) is not None
    await decider.pause(rest, 4.0)
    assert rested == [4.0], "else a slow policy would be asked without end"


@pytest.mark.parametrize("error", [StopIteration, asyncio.CancelledError, SystemExit])
async def test_what_no_future_takes_is_raised_as_another_error(error: type[BaseException]) -> None:
    def broken(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        raise error

    decider = Decider(turn_s=PATIENCE_S)
    with pytest.raises(RuntimeError, match=error.__name__):
        await decider.decided(broken, None, NOW, INTERVAL_S)
    assert not decider.is_busy


async def test_what_a_policy_raises_is_raised_where_it_is_asked() -> None:
    def broken(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        raise KeyError("a policy's own code")

    decider = Decider(turn_s=PATIENCE_S)
    with pytest.raises(KeyError):
        await decider.decided(broken, None, NOW, INTERVAL_S)
    assert await Policy().asked(decider) is not None


async def test_a_cancelled_loop_leaves_its_turn_and_its_thread_behind() -> None:
    turns, stuck = asyncio.Lock(), Policy(free=False)
    task = asyncio.create_task(stuck.asked(Decider(turns, turn_s=PATIENCE_S)))
    assert await asyncio.to_thread(stuck.began.wait, PATIENCE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not turns.locked()
    stuck.free.set()


def test_a_plan_that_is_held_over_gives_nothing_up_again() -> None:
    assert held_over(PLAN).prefill.gives == ""
