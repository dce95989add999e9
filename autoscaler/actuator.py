"""The interface to wherever replicas live. Actuators act; they decide nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from autoscaler.snapshot import PoolName


@dataclass(frozen=True, slots=True)
class ActualReplica:
    """A replica that exists. `name` is the worker id that it registers with."""

    name: str
    pool: PoolName
    stopping: bool
    """It was told to drain and has not ended yet."""
    created_wall_s: float
    """Seconds since the epoch; survives a restart of the autoscaler."""
    gpu: str | None = None
    """The GPU that it was given."""


class Actuator(ABC):
    """Replicas of both pools. Every method has a deadline of its own and raises SplitserveError.

    Nothing is remembered between calls that `replicas` could not find out again: a restarted autoscaler
    adopts what runs.
    """

    @abstractmethod
    async def replicas(self) -> tuple[ActualReplica, ...]:
        """All replicas that exist now, in order of their names. Those that ended are not among them."""

    @abstractmethod
    async def start(self, pool: PoolName, count: int) -> None:
        """Creates replicas; returns once they are ordered. Raises ResourceExhaustedError (NO_GPU) when the
        inventory has no GPU for the next one; those before it stay ordered."""

    @abstractmethod
    async def stop(self, pool: PoolName, names: Sequence[str], drain_s: float) -> None:
        """Tells these replicas to drain and to end within `drain_s` seconds; returns at once. What is still
        there after the deadline is killed. Names that do not exist are ignored."""

    @abstractmethod
    async def close(self) -> None:
        """Lets go of the connection. Replicas stay, except where they cannot live without this process."""
