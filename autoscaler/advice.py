"""What one pool's policy says, before `behavior`, the bounds and the budget of GPUs have their say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autoscaler.snapshot import Replica, ReplicaState, Snapshot


@dataclass(frozen=True, slots=True)
class Situation:
    """A pool as a policy finds it."""

    current: int
    """Replicas that the last plan wanted in rotation; those that still start are counted."""
    ready: int
    """Replicas in rotation."""
    starting: int
    """Replicas that are on their way."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation."""

    wanted: int
    """Replicas."""
    reason: str
    """Why, in one line for people."""
    need: float = 0.0
    """Replicas that the demand fills, not rounded: says how much a pool is hurt that gets fewer."""


Advise = Callable[[Any, Snapshot, Situation], tuple[Advice, Any]]
"""One pool's policy: (its memory, None at first; snapshot; situation) -> (advice, memory). Pure."""


def count(replicas: tuple[Replica, ...], state: ReplicaState) -> int:
    """Replicas in this state."""
    return sum(1 for replica in replicas if replica.state is state)
