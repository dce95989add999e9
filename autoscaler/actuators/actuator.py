"""The actuator interface: starts and ends replicas. Actuators decide nothing."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from splitserve.roles import PoolName


class Presence(enum.Enum):
    """What is known of a replica now."""

    HERE = "here"
    """It was seen just now."""
    UNKNOWN = "unknown"
    """Its host does not answer. The host's last answer listed the replica, which keeps its place."""
    GIVEN_UP = "given up"
    """Its host has not answered for so long that another replica may take its place. It may still run."""


@dataclass(frozen=True, slots=True)
class ActualReplica:
    """A replica that exists. `name` is the worker id that it registers with."""

    name: str
    pool: PoolName
    """The pool that it was started for, whatever its worker's role is now."""
    stopping: bool
    """It is draining and has not ended yet."""
    created_wall_s: float
    """Seconds since the epoch; survives a restart of the autoscaler."""
    gpu: str | None = None
    """The GPU assigned to it, or several with commas between."""
    placeholder: bool = False
    """Ordered, but not created yet. The replica that is created will have another name."""
    host: str = ""
    """The host that it runs on, where there are several."""
    presence: Presence = Presence.HERE


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
    """Whether a replica that is no longer listed has certainly ended. The coordinators are told of it in that case."""

    @abstractmethod
    async def replicas(self) -> tuple[ActualReplica, ...]:
        """All replicas that exist now, in order of their names. Ended ones are left out. Changes nothing."""

    async def tidy(self) -> None:
        """Removes what ended replicas left behind, and kills replicas that overran their drain, both as of the latest
        call of `replicas`. Only an autoscaler that may act calls it. A replica for which it fails delays no other, and
        is tried again after the next list."""
        return

    @property
    def gpu_inventory(self) -> int | None:
        """GPUs that the actuator may give to replicas, used ones included; None where it assigns no GPUs."""
        return None

    @property
    def hosts(self) -> Mapping[str, bool]:
        """Whether each host answered when it was last asked; empty with a single host."""
        return {}

    @abstractmethod
    async def start(self, pool: PoolName, count: int, shape: ReplicaShape = ONE_GPU) -> None:
        """Creates replicas; returns once they are ordered.

        Raises ResourceExhaustedError (NO_GPU) when `shape.gpus` GPUs are not free for the next replica; the replicas
        before it stay ordered. Raises FailedPreconditionError (GPU_KIND, field `gpu`) when the inventory has no GPU of
        the kind `shape.gpu`."""

    @abstractmethod
    async def stop(self, names: Sequence[str], drain_s: float) -> None:
        """Tells these replicas to drain and to end within `drain_s` seconds; returns at once. A replica that still runs
        after the deadline is killed. Names that do not exist are ignored."""

    @abstractmethod
    async def close(self) -> None:
        """Closes the connection. Replicas keep running, unless they are children of this process."""


@dataclass(frozen=True, slots=True)
class Room:
    """How many more replicas of a pool fit on a host now."""

    replicas: int
    reason: str = ""
    """Why there is no room: NO_GPU, GPU_KIND, NO_ROOM, NO_TEMPLATE, NO_IMAGE or NO_MODEL."""
    why: str = ""
    """The reason as a sentence."""
    linked: int = 0
    """NVLink pairs inside the next replica."""


class RoomActuator(Actuator):
    """An actuator of one host among several."""

    @abstractmethod
    async def room(self, pool: PoolName, shape: ReplicaShape) -> Room:
        """Room for replicas of this pool and shape. Raises SplitserveError when the host does not answer."""
