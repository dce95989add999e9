"""A scaling plan: how many replicas each pool is to have, and why. Plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from autoscaler.snapshot import Snapshot
from splitserve.roles import PoolName

Cause = Literal[
    "policy",
    "schedule",
    "silent_coordinator",
    "bounds",
    "gpu_budget",
    "from_zero",
    "to_zero",
]
"""What decided a count last: the pool's policy, its schedule, a coordinator that does not answer, the pool's bounds and
`behavior`, the GPU budget, requests that wait for the first workers, or a long time without requests."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """`desired` replicas in rotation (pending ones counted), and `standby` warm ones beside them."""

    desired: int
    standby: int = 0
    reason: str = ""
    """One line for operators."""
    error: str = ""
    """The error of the pool's policy; empty while it works."""
    cause: Cause = "policy"

    @property
    def given_up(self) -> bool:
        """Whether the pool goes to zero because there were no requests for long: starting replicas end, too. In all
        other cases no starting replica is drained: coordinators that see no replica may have just restarted."""
        return self.cause == "to_zero"


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """A decision for both pools."""

    prefill: PoolPlan
    decode: PoolPlan
    one_shape: bool = False
    """Whether replicas of both pools have the same GPUs, so that they may take each other's role."""

    def pool(self, name: PoolName) -> PoolPlan:
        """The plan of one pool."""
        return self.prefill if name == "prefill" else self.decode

    @property
    def is_at_zero(self) -> bool:
        """Whether a pool is to have no replica."""
        return 0 in (self.prefill.desired, self.decode.desired)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The counts, without the reasons."""
        return self.prefill.desired, self.prefill.standby, self.decode.desired, self.decode.standby


Memory = Any
"""What a `Decide` function remembers between decisions: an immutable value of its own type; None at first."""

Decide = Callable[[Memory, Snapshot], tuple[ScalingPlan, Memory]]
"""Makes the plan. Pure: it reads no clock and does no I/O, so the simulator replays what production runs."""
