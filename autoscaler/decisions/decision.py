"""One decision of the control loop, as it is kept for people. Plain data; shares lie between 0 and 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoscaler.classes.class_bill import PoolBill
from autoscaler.plan import Cause
from autoscaler.snapshot import PoolName


@dataclass(frozen=True, slots=True)
class ExpectedShare:
    """What so many ready replicas would do for the demand of the decision."""

    replicas: int
    attainment: float | None
    """Share within the pool's target; None where the policy has no target, or the demand was not measured."""


@dataclass(frozen=True, slots=True)
class AchievedShare:
    """What was measured over one window that began with the decision."""

    after_s: float
    """From the decision until the measurement, seconds."""
    ready: int
    """Replicas in rotation then. Fewer than were wanted: the rest still started."""
    samples: int
    """Prompts, or answers, that were measured."""
    attainment: float | None
    """Share of them within the pool's target; None without a target or without samples."""


@dataclass(frozen=True, slots=True)
class PoolOutcome:
    """One pool's part of a decision."""

    desired: int
    standby: int
    ready: int
    starting: int
    """Replicas in rotation and on their way when it was decided."""
    cause: Cause
    """What decided the number last: the binding constraint."""
    reason: str
    actions: tuple[str, ...]
    """What followed from it, such as "start 2"."""
    inputs: Mapping[str, float | None]
    """The signals that it was decided by; None: not measured. Units are in the names."""
    target_s: float | None
    """Latency target; None where the policy has none."""
    planned: ExpectedShare
    fewer: ExpectedShare | None
    """With one replica less; None where there would be none."""
    more: ExpectedShare
    achieved: AchievedShare | None = None
    """None until its window is over, or where nobody looked then."""
    bill: PoolBill | None = None
    """None where replicas have no price. `planned`, `fewer` and `more` then count units: replicas of speed 1."""


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """A decision for both pools."""

    number: int
    """Counted from 1 since the process started."""
    at_s: float
    """On the clock of snapshots."""
    wall_s: float
    """Seconds since the epoch."""
    window_s: float
    """Length of the window in which it is measured what came."""
    acted: bool
    """False in a dry run, and while another autoscaler holds the lease."""
    complete: bool
    """False while a coordinator did not answer."""
    pools: Mapping[PoolName, PoolOutcome]
