"""Decisions off the event loop: on a thread of their own, so that signals, notices and health answers do not wait.

A policy is pure, so a thread is enough: it gets a snapshot and a memory and returns a plan and a memory. A thread can
be left behind but not ended; one that never returns keeps nobody from acting on the last plan, nor from stopping.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from autoscaler.plan import Decide, Memory, ScalingPlan
from autoscaler.shadows.shadow import unchanged
from autoscaler.snapshot import Snapshot
from splitserve.logs import log_event

TURN_S = 1.0
"""For so long a decision is waited for, by its loop and by those that share an account with it."""


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision, and what it was made of."""

    snapshot: Snapshot
    plan: ScalingPlan
    memory: Memory


@dataclass(slots=True)
class _UnderWay:
    began_s: float
    future: asyncio.Future[Decided]
    told: bool = False
    """Whether it was reported as overdue."""
    woke: bool = False
    """Whether its end has ended a pause."""
    passed_over: bool = False
    """Whether its loop had a reason to look again meanwhile: what it saw then is in no decision yet."""


@dataclass(slots=True)
class Decider:
    """Makes the decisions of one loop, one at a time. `within` adds to a snapshot what the policy sees beside it, and
    `told` gets each plan; both are called on the event loop, and nothing else has its turn in between unless the
    decision takes longer than `turn_s`."""

    turns: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Of all loops on one account, so that each sees what the one before it claims."""
    within: Callable[[Snapshot], Snapshot] = unchanged
    told: Callable[[ScalingPlan], None] = lambda plan: None
    turn_s: float = TURN_S
    clock: Callable[[], float] = time.monotonic
    overdue: int = 0
    """Decisions that took longer than an interval."""
    _under_way: _UnderWay | None = None
    _is_behind: bool = False
    """Whether the decision that was taken last had passed something over."""

    @property
    def is_busy(self) -> bool:
        """Whether a decision is under way or has not been asked for."""
        return self._under_way is not None

    async def decided(
        self, decide: Decide, memory: Memory, snapshot: Snapshot, interval_s: float
    ) -> Decided | None:
        """The decision for this snapshot; the one that is under way, if there is one. None: it is not made yet, ask
        again later. Raises what `decide` raises."""
        if self._under_way is not None:
            return self._taken(interval_s)
        async with self.turns:
            snapshot = self.within(snapshot)
            future = _on_thread(partial(_made, decide, memory, snapshot))
            self._under_way = _UnderWay(self.clock(), future)
            await asyncio.wait({future}, timeout=self.turn_s)
            return self._taken(interval_s)

    async def pause(self, rest: Callable[[float], Awaitable[None]], left_s: float) -> None:
        """Rests, until a decision that is under way has been made at most. One that has ended ends one pause only, for
        it may be that nobody can take it. No rest, once, where the decision that was taken passed something over."""
        one = self._under_way
        if one is None:
            behind, self._is_behind = self._is_behind, False
            await (asyncio.sleep(0) if behind else rest(left_s))
            return
        async with asyncio.TaskGroup() as group:
            resting = group.create_task(_awaited(rest(left_s)))
            ends: set[asyncio.Future[Any]] = {resting} if one.woke else {resting, one.future}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            one.woke, one.passed_over = one.future.done(), one.passed_over or resting.done()
            resting.cancel()

    def forget(self) -> None:
        """What is under way is of a policy that is not in force any more."""
        if self._under_way is not None:
            self._under_way.future.add_done_callback(lambda future: future.exception())
            self._under_way = None

    def _taken(self, interval_s: float) -> Decided | None:
        one = self._under_way
        if one is None:
            return None
        if one.future.done():
            self._under_way, self._is_behind = None, one.passed_over
            decided = one.future.result()
            self.told(decided.plan)
            return decided
        busy_s = self.clock() - one.began_s
        if busy_s > interval_s and not one.told:
            one.told = True
            self.overdue += 1
            log_event("scaling.overdue", level=logging.WARNING, busy_s=round(busy_s, 1))
        return None


def held_over(plan: ScalingPlan) -> ScalingPlan:
    """A plan that is acted on while the next one is not made: what was to be given up once is not given up again."""
    return replace(plan, prefill=replace(plan.prefill, gives=""), decode=replace(plan.decode, gives=""))


def _made(decide: Decide, memory: Memory, snapshot: Snapshot) -> Decided:
    plan, after = decide(memory, snapshot)
    return Decided(snapshot, plan, after)


def _on_thread(make: Callable[[], Decided]) -> asyncio.Future[Decided]:
    """A thread that may be left behind: one of an executor would be waited for at the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Decided] = loop.create_future()

    def tell(answer: Callable[[], None]) -> None:
        try:
            loop.call_soon_threadsafe(answer)
        except RuntimeError:
            return  # the event loop has ended meanwhile

    def run() -> None:
        try:
            made = make()
        except BaseException as error:  # raised again where the decision is asked for
            tell(partial(future.set_exception, _told_to_a_future(error)))
        else:
            tell(partial(future.set_result, made))

    context = copy_context()
    threading.Thread(target=context.run, args=(run,), name="decision", daemon=True).start()
    return future


def _told_to_a_future(error: BaseException) -> BaseException:
    """No future takes StopIteration, and what is no Exception would end more than the decision: a loop that awaits a
    CancelledError takes it for its own end."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"a decision raised {type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped


async def _awaited(one: Awaitable[None]) -> None:
    await one
