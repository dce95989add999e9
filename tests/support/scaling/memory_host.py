"""A Docker host in memory that can be cut off, for tests of several hosts. What was told to end ends by itself."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

from autoscaler.actuators.actuator import ONE_GPU, ActualReplica, ReplicaShape, Room, RoomActuator
from autoscaler.actuators.docker_room import free_room
from splitserve.errors import SplitserveError, UnavailableError
from splitserve.gpus.inventory import GpuInventory
from splitserve.gpus.placement import GpuUse, choose_gpus
from splitserve.roles import PoolName

LOST = UnavailableError("no route to host", reason="DOCKER_UNREACHABLE")


class MemoryHost(RoomActuator):
    """`there` is what really runs, whatever the caller can see. `failure` is raised by every call while it is set;
    with `hangs` calls never answer. An `unheard` start takes place, and its answer is lost."""

    proves_end = True

    def __init__(self, name: str, gpus: int | None = None, most: int = 100, listed: str = "") -> None:
        """`listed`: its GPUs with their kinds, in place of `gpus`."""
        self.name = name
        self.there: dict[str, ActualReplica] = {}
        self.stubborn: set[str] = set()
        self.failure: SplitserveError | None = None
        self.hangs = self.unheard = False
        self.lacks: Room | None = None
        self.started = self.tidied = 0
        numbered = [f"GPU-{name}-{number}" for number in range(gpus or 0)]
        self._inventory = GpuInventory.listed(listed) if listed else GpuInventory.of_groups([numbered])
        self._most = most
        self._deadlines: dict[str, float] = {}
        self._numbers = itertools.count()

    def cut(self) -> None:
        """It answers nobody."""
        self.failure = LOST

    def mend(self) -> None:
        """It answers again."""
        self.failure, self.hangs = None, False

    async def replicas(self) -> tuple[ActualReplica, ...]:
        await self._answer()
        now_s = time.monotonic()
        for name, until_s in list(self._deadlines.items()):
            if name not in self.stubborn or now_s > until_s:
                self.there.pop(name, None)
                del self._deadlines[name]
        return tuple(self.there[name] for name in sorted(self.there))

    async def tidy(self) -> None:
        await self._answer()
        self.tidied += 1

    @property
    def gpu_inventory(self) -> int | None:
        return self._inventory.capacity or None

    async def room(self, pool: PoolName, shape: ReplicaShape) -> Room:
        await self._answer()
        return self.lacks or free_room(self._inventory, self._uses(), pool, shape.gpus, self._most, shape.gpu)

    async def start(self, pool: PoolName, count: int, shape: ReplicaShape = ONE_GPU) -> None:
        await self._answer()
        for _ in range(count):
            gpus: tuple[str, ...] = ()
            if self._inventory.gpus:
                gpus = choose_gpus(self._inventory, self._uses(), pool, shape.gpus, shape.gpu)
            name = f"{pool}-{self.name}-{next(self._numbers)}"
            self.there[name] = ActualReplica(name, pool, False, time.time(), ",".join(gpus) or None)
            self.started += 1
            if self.unheard:
                self.failure = LOST
                raise LOST

    async def stop(self, names: Sequence[str], drain_s: float) -> None:
        await self._answer()
        for name in names:
            found = self.there.get(name)
            if found is not None and not found.stopping:
                self.there[name] = replace(found, stopping=True)
                self._deadlines[name] = time.monotonic() + drain_s

    async def close(self) -> None:
        pass

    def _uses(self) -> list[GpuUse]:
        return [
            GpuUse(replica.pool, tuple((replica.gpu or "").split(","))) for replica in self.there.values()
        ]

    async def _answer(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure
