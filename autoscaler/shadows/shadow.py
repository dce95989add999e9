"""Policies that decide beside the one in force, on the same snapshots, and are never acted on.

Each decision runs on a thread of its own, so that a shadow whose code is slow, or never returns, delays no decision of
the policy in force. It shares the interpreter: code that computes for ever takes its share of the CPU.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoscaler.plan import Decide, Memory, ScalingPlan
from autoscaler.snapshot import POOLS, Snapshot
from splitserve.errors import ConfigError
from splitserve.logs import log_event, log_exception

MAX_SHADOWS = 8
DECIDE_S = 5.0
"""A decision that takes longer is overdue: the shadow is not asked again until it returns."""


@dataclass(slots=True)
class ShadowPolicy:
    """One of them. `plan` is its last decision, None before the first. `look` is called from one thread."""

    name: str
    decide: Decide
    plan: ScalingPlan | None = None
    errors: int = 0
    """Decisions that its own code could not make, by pool, and those that were overdue."""
    clock: Callable[[], float] = time.monotonic
    _memory: Memory = None
    _thread: threading.Thread | None = None
    _since_s: float = 0.0
    _told: bool = False
    """Whether the decision under way has been reported as overdue."""

    def look(self, snapshot: Snapshot, live: ScalingPlan) -> None:
        """Begins a decision, unless the last one is still under way, and returns at once."""
        if self._thread is not None and self._thread.is_alive():
            self._report()
            return
        self._since_s, self._told = self.clock(), False
        named = f"shadow {self.name}"
        self._thread = threading.Thread(target=self._decide, args=(snapshot, live), name=named, daemon=True)
        self._thread.start()

    @property
    def overdue(self) -> bool:
        """Whether a decision has been under way for longer than `DECIDE_S`."""
        busy = self._thread is not None and self._thread.is_alive()
        return busy and self.clock() - self._since_s > DECIDE_S

    def settled(self, wait_s: float) -> bool:
        """Waits `wait_s` seconds at most for the decision under way. Whether there is none now."""
        if self._thread is not None:
            self._thread.join(wait_s)
        return self._thread is None or not self._thread.is_alive()

    def _report(self) -> None:
        if not self._told and self.overdue:
            self._told = True
            self.errors += 1
            busy_s = self.clock() - self._since_s
            log_event("shadow.overdue", level=logging.WARNING, policy=self.name, busy_s=round(busy_s, 1))

    def _decide(self, snapshot: Snapshot, live: ScalingPlan) -> None:
        """Decides as in a dry run: nothing it wanted before has come, so it starts from what there is."""
        before = self.plan
        try:
            plan, self._memory = self.decide(self._memory, replace(snapshot, acting=False))
        except Exception as error:  # of a policy's own code: it must not end unseen with its thread
            self.errors += 1
            log_exception("shadow.failed", error, policy=self.name)
            return
        self.plan = plan
        self.errors += sum(plan.pool(pool).error != "" for pool in POOLS)
        for pool in POOLS:
            wanted, other = plan.pool(pool), live.pool(pool)
            changed = before is None or before.pool(pool).desired != wanted.desired
            log_event(
                "scaling.shadow",
                level=logging.INFO if changed else logging.DEBUG,
                policy=self.name,
                pool=pool,
                desired=wanted.desired,
                standby=wanted.standby,
                lend=plan.lend_decode_to_prefill,
                reason=wanted.reason,
                live=other.desired,
            )


def unchanged(snapshot: Snapshot) -> Snapshot:
    """Where the policy in force sees nothing else."""
    return snapshot


@dataclass(slots=True)
class Shadows:
    """All of them. Raises ConfigError for too many, or two of one name: names are labels of metrics."""

    policies: Sequence[ShadowPolicy] = ()
    history_s: float = 0.0
    """How far back arrivals are to be kept for them, seconds."""
    within: Callable[[Snapshot], Snapshot] = unchanged
    """Adds what the policy in force sees beside the snapshot. Called by whoever calls `look`."""

    def __post_init__(self) -> None:
        names = [one.name for one in self.policies]
        if len(names) > MAX_SHADOWS:
            raise ConfigError(f"shadow: at most {MAX_SHADOWS} policies, not {len(names)}", field="shadow")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"shadow: two policies are named {twice!r}", field="shadow")

    def look(self, snapshot: Snapshot, live: ScalingPlan) -> None:
        """Lets all of them begin to decide."""
        snapshot = self.within(snapshot) if self.policies else snapshot
        for one in self.policies:
            one.look(snapshot, live)
