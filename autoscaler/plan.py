"""What a scaling decision is: how many replicas each pool should have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autoscaler.snapshot import PoolName, Snapshot


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """`desired` replicas in rotation (pending ones counted), and `standby` warm ones beside them."""

    desired: int
    standby: int = 0
    reason: str = ""
    """Why, in one line for people."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision for both pools."""

    prefill: PoolPlan
    decode: PoolPlan
    lend_decode_to_prefill: bool = False
    """Decode workers compute prompts themselves where that is sooner, while prefill replicas start."""

    def pool(self, name: PoolName) -> PoolPlan:
        """The plan of one pool."""
        return self.prefill if name == "prefill" else self.decode


Memory = Any
"""What a decider remembers between decisions: an immutable value of its own type; None at first."""

Decide = Callable[[Memory, Snapshot], tuple[Plan, Memory]]
"""A policy: pure, so that the simulator replays what production runs. It reads no clock and does no I/O."""
