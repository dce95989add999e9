"""What is known of one host: its replicas as last seen, and orders whose outcome is unknown."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from dataclasses import replace

from autoscaler.actuators.actuator import ActualReplica, Presence, ReplicaShape, Room, RoomActuator
from splitserve.errors import DeadlineExceededError, SplitserveError, UnavailableError
from splitserve.logs import log_event
from splitserve.roles import POOLS, PoolName

UNREADY = frozenset({"NO_IMAGE", "NO_MODEL", "NO_TEMPLATE"})
"""Reasons of a host that lacks what every replica needs, however much room it has."""


class HostWatch:
    """One host over time. A task of its own asks for the host's replicas, one question at a time: a slow host may take
    longer to answer than the caller waits."""

    def __init__(self, name: str, actuator: RoomActuator, fabric: str = "") -> None:
        self.name, self.actuator, self.fabric = name, actuator, fabric
        self.answered_s: float | None = None
        """When the host last listed its replicas; None: never since this process began."""
        self.reachable = True
        """Whether the last question was answered in time. True before the first answer."""
        self.replicas: tuple[ActualReplica, ...] = ()
        """The last list."""
        self._unsure: Counter[PoolName] = Counter()
        """By pool: orders since the last list that may have been carried out."""
        self._asked: asyncio.Task[tuple[ActualReplica, ...]] | None = None
        self._preparation: asyncio.Task[None] | None = None

    def ask(self) -> asyncio.Task[tuple[ActualReplica, ...]]:
        """The question under way, or a new one."""
        if self._asked is None:
            self._asked = asyncio.create_task(self.actuator.replicas())
        return self._asked

    def settle(self, now_s: float) -> bool:
        """Takes the answer, if there is one. Returns whether the host has just come back. Its answer is old in that
        case, since the question was sent while the host was away: ask again."""
        task, was_reachable = self._asked, self.reachable
        if task is None or not task.done():
            self._lost("no answer in time")
            return False
        self._asked = None
        try:
            listed = task.result()
        except SplitserveError as error:
            self._lost(error.message)
            return False
        self.replicas = tuple(replace(replica, host=self.name) for replica in listed)
        if (self.answered_s is None or not was_reachable) and (
            self._preparation is None or self._preparation.done()
        ):
            self._preparation = asyncio.create_task(self._prepare())
        self.answered_s, self.reachable = now_s, True
        # All calls to a host run in order: orders before this question have been carried out, or never will be.
        self._unsure.clear()
        if not was_reachable:
            log_event("host.back", host=self.name, replicas=[replica.name for replica in self.replicas])
        return not was_reachable

    def listed(self, now_s: float, unknown_s: float) -> list[ActualReplica]:
        """The host's replicas; while the host is away also a placeholder for each order that it may have carried
        out."""
        if self.reachable or self.answered_s is None:
            return list(self.replicas)
        silent_s = now_s - self.answered_s
        presence = Presence.GIVEN_UP if silent_s > unknown_s else Presence.UNKNOWN
        ordered = [
            ActualReplica(
                f"{pool}-{self.name}-unsure-{number}",
                pool,
                False,
                0.0,
                placeholder=True,
                host=self.name,
            )
            for pool, count in sorted(self._unsure.items())
            for number in range(count)
        ]
        return [replace(replica, presence=presence) for replica in (*self.replicas, *ordered)]

    async def start(self, pool: PoolName, shape: ReplicaShape) -> None:
        """Orders one replica. An order that may have been carried out despite an error counts until the next list."""
        self._unsure[pool] += 1
        try:
            await self.actuator.start(pool, 1, shape)
        except SplitserveError as error:
            refused = isinstance(error, UnavailableError) and error.reason == "DOCKER"
            if isinstance(error, UnavailableError | DeadlineExceededError) and not refused:
                # The host may have carried out the request although an error came back.
                self._lost(error.message)
            else:
                self._unsure[pool] -= 1
            raise

    async def room(self, pool: PoolName, shape: ReplicaShape) -> Room | None:
        """The host's room; None when it does not answer."""
        try:
            return await self.actuator.room(pool, shape)
        except SplitserveError as error:
            self._lost(error.message)
            return None

    async def close(self) -> None:
        """Cancels the questions under way and closes the connection."""
        for task in (self._asked, self._preparation):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError, SplitserveError):
                    await task
        await self.actuator.close()

    async def _prepare(self) -> None:
        """Logs what the host lacks before a replica is wanted there."""
        for pool in POOLS:
            try:
                room = await self.actuator.room(pool, ReplicaShape(gpus=0))
            except SplitserveError:
                return  # asked again when the host is back
            if room.reason in UNREADY:
                fields = {"host": self.name, "pool": pool, "reason": room.reason}
                log_event("host.unready", level=logging.WARNING, why=room.why, **fields)

    def _lost(self, why: str) -> None:
        if self.reachable:
            names = [replica.name for replica in self.replicas]
            log_event("host.unreachable", level=logging.WARNING, host=self.name, error=why, unknown=names)
        self.reachable = False
