"""Policies that decide beside the one in force, on the same snapshots, and are never acted on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoscaler.plan import Decide, Memory, ScalingPlan
from autoscaler.snapshot import POOLS, Snapshot
from splitserve.errors import ConfigError
from splitserve.logs import log_event

MAX_SHADOWS = 8


@dataclass(slots=True)
class ShadowPolicy:
    """One of them. `plan` is its last decision, None before the first."""

    name: str
    decide: Decide
    plan: ScalingPlan | None = None
    errors: int = 0
    """Decisions that its own code could not make, by pool."""
    _memory: Memory = None

    def look(self, snapshot: Snapshot, live: ScalingPlan) -> None:
        """Decides as in a dry run: nothing it wanted before has come, so it starts from what there is."""
        before = self.plan
        self.plan, self._memory = self.decide(self._memory, replace(snapshot, acting=False))
        self.errors += sum(self.plan.pool(pool).error != "" for pool in POOLS)
        for pool in POOLS:
            wanted, other = self.plan.pool(pool), live.pool(pool)
            changed = before is None or before.pool(pool).desired != wanted.desired
            log_event(
                "scaling.shadow",
                level=logging.INFO if changed else logging.DEBUG,
                policy=self.name,
                pool=pool,
                desired=wanted.desired,
                standby=wanted.standby,
                lend=self.plan.lend_decode_to_prefill,
                reason=wanted.reason,
                live=other.desired,
            )


@dataclass(slots=True)
class Shadows:
    """All of them. Raises ConfigError for too many, or two of one name: names are labels of metrics."""

    policies: Sequence[ShadowPolicy] = ()
    history_s: float = 0.0
    """How far back arrivals are to be kept for them, seconds."""

    def __post_init__(self) -> None:
        names = [one.name for one in self.policies]
        if len(names) > MAX_SHADOWS:
            raise ConfigError(f"shadow: at most {MAX_SHADOWS} policies, not {len(names)}", field="shadow")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"shadow: two policies are named {twice!r}", field="shadow")

    def look(self, snapshot: Snapshot, live: ScalingPlan) -> None:
        """Lets all of them decide."""
        for one in self.policies:
            one.look(snapshot, live)
