"""Replicas in memory: ordered ones are there at once, stopped ones until `end` is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoscaler.actuators.actuator import ONE_GPU, ActualReplica, Actuator, ReplicaShape
from splitserve.errors import ResourceExhaustedError, SplitserveError
from splitserve.roles import PoolName


class FakeActuator(Actuator):
    """`gpus` bounds how many there may be; `failure` is raised by every call while it is set."""

    def __init__(self, gpus: int = 1000) -> None:
        self.there: dict[str, ActualReplica] = {}
        self.calls: list[tuple[object, ...]] = []
        self.failure: SplitserveError | None = None
        self.closed = False
        self.tidied = 0
        self._gpus = gpus
        self._number = 0

    async def replicas(self) -> tuple[ActualReplica, ...]:
        self._fail()
        return tuple(self.there[name] for name in sorted(self.there))

    async def tidy(self) -> None:
        self._fail()
        self.tidied += 1

    async def start(self, pool: PoolName, count: int, shape: ReplicaShape = ONE_GPU) -> None:
        self._fail()
        self.calls.append(("start", pool, count))
        for _ in range(count):
            if len(self.there) >= self._gpus:
                raise ResourceExhaustedError("no GPU is free", reason="NO_GPU")
            name = f"{pool}-{self._number}"
            self._number += 1
            self.there[name] = ActualReplica(name, pool, False, float(self._number))

    async def stop(self, names: Sequence[str], drain_s: float) -> None:
        self._fail()
        self.calls.append(("stop", tuple(names), drain_s))
        for name in self.there.keys() & set(names):
            self.there[name] = replace(self.there[name], stopping=True)

    async def close(self) -> None:
        self.closed = True

    def end(self) -> None:
        """All that was told to stop has ended."""
        self.there = {name: replica for name, replica in self.there.items() if not replica.stopping}

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure
