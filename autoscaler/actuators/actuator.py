"""The actuator interface: starts and ends replicas. Actuators decide nothing."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoscaler.snapshot import PoolName


class Presence(enum.Enum):
    """What is known of a replica now."""

    HERE = "here"
    """It was seen just now."""
    UNKNOWN = "unknown"
    """Its host does not answer: it was there when the host last did, and keeps its place."""
    GIVEN_UP = "given up"
    """Its host has not answered for so long that others may take its place. It may still run."""


@dataclass(frozen=True, slots=True)
class ActualReplica:
    """A replica that exists. `name` is the worker id that it registers with."""

    name: str
    pool: PoolName
    """To an actuator the pool that it was started for, whatever role it has now."""
    stopping: bool
    """It is draining and has not ended yet."""
    created_wall_s: float
    """Seconds since the epoch; survives a restart of the autoscaler."""
    gpu: str | None = None
    """The GPU assigned to it, or several with commas between."""
    placeholder: bool = False
    """Ordered and not made yet: it will vanish, and another name stand in its place."""
    host: str = ""
    """The host that it runs on, where there are several."""
    presence: Presence = Presence.HERE


def counted(replicas: Iterable[ActualReplica], registered: Collection[str]) -> list[ActualReplica]:
    """Without those that were given up, unless the coordinators still see them: they serve."""
    return [r for r in replicas if r.presence is not Presence.GIVEN_UP or r.name in registered]


def by_role(replicas: Iterable[ActualReplica], roles: Mapping[str, PoolName]) -> list[ActualReplica]:
    """The replicas in the pools of their roles. Those that nobody has seen yet stay where they were started."""
    return [replace(replica, pool=roles.get(replica.name, replica.pool)) for replica in replicas]


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """The GPUs of one replica."""

    gpus: int = 1
    gpu: str = ""
    """Their kind; empty: any."""


ONE_GPU = ReplicaShape()


class Actuator(ABC):
    """Replicas of both pools. Every method has its own deadline and raises SplitserveError.

    No state between calls that `replicas` could not recover: a restarted autoscaler adopts what runs.
    """

    proves_end = False
    """Whether the process of a replica that is listed no more has certainly ended; the coordinators are told then."""

    @abstractmethod
    async def replicas(self) -> tuple[ActualReplica, ...]:
        """All replicas that exist now, in order of their names, without those that ended. Changes nothing."""

    async def tidy(self) -> None:
        """Removes what is left of replicas that ended, and kills those that overran their drain, as the latest list had
        them. For who may act; what fails is tried again after the next list, and holds nothing else up."""
        return

    @property
    def gpu_inventory(self) -> int | None:
        """GPUs that it may give to replicas, used ones included; None where it gives none out."""
        return None

    @property
    def hosts(self) -> Mapping[str, bool]:
        """Whether each host answered when it was last asked; empty where there is only one."""
        return {}

    @abstractmethod
    async def start(self, pool: PoolName, count: int, shape: ReplicaShape = ONE_GPU) -> None:
        """Creates replicas; returns once they are ordered.

        Raises ResourceExhaustedError (NO_GPU) when the inventory has not `shape.gpus` GPUs for the next one; those
        before it stay ordered. Raises FailedPreconditionError (GPU_KIND, field `gpu`) where no GPU of the inventory is
        of its kind."""

    @abstractmethod
    async def stop(self, pool: PoolName, names: Sequence[str], drain_s: float) -> None:
        """Tells these replicas of a pool to drain and to end within `drain_s` seconds; returns at once. What is still
        there after the deadline is killed. Names that do not exist are ignored."""

    @abstractmethod
    async def close(self) -> None:
        """Closes the connection. Replicas keep running, unless they are children of this process."""


@dataclass(frozen=True, slots=True)
class Room:
    """How many more replicas of a pool fit on a host now."""

    replicas: int
    reason: str = ""
    """Without room: NO_GPU, GPU_KIND, NO_ROOM, NO_TEMPLATE, NO_IMAGE or NO_MODEL."""
    why: str = ""
    """The same for people."""
    linked: int = 0
    """NVLink pairs inside the next replica."""


class RoomActuator(Actuator):
    """An actuator of one host among several."""

    @abstractmethod
    async def room(self, pool: PoolName, shape: ReplicaShape) -> Room:
        """Room for such replicas of this pool. Raises SplitserveError where the host does not answer."""
