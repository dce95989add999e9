"""What a host says when it is asked for room for one more replica, and who can be asked."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from autoscaler.actuators.actuator import Actuator, ReplicaKind
from autoscaler.snapshot import PoolName


@dataclass(frozen=True, slots=True)
class Room:
    """How many more replicas of a pool fit on a host now."""

    replicas: int
    reason: str = ""
    """Without room: NO_GPU, GPU_KIND, NO_ROOM, NO_TEMPLATE, NO_IMAGE, NO_MODEL or WORKER_KIND."""
    why: str = ""
    """The same for people."""
    linked: int = 0
    """NVLink pairs inside the next replica."""
    missing_image: str = ""
    """The image to pull."""


class RoomActuator(Actuator):
    """An actuator of one host among several."""

    @abstractmethod
    async def room(self, pool: PoolName, kind: ReplicaKind) -> Room:
        """Room for such replicas of this pool. Raises SplitserveError where the host does not answer."""

    @abstractmethod
    async def pull(self, image: str) -> None:
        """Fetches an image, beside all other calls. Raises SplitserveError."""
