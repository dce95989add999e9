"""One actuator over those of several hosts.

An unreachable host is unknown, not gone. Its replicas stay on the list as they were last seen, so that nothing is
started in their place, and no replica is started on it. After `unknown_s` they are given up: others may take their
places, and whatever runs when the host comes back counts again. An order whose outcome was not heard keeps a place
likewise.

What runs on a host that has not answered since this process began cannot be known. Until it answers, or for
`unknown_s`, nothing is started anywhere. Replicas that the coordinators see there count as capacity all the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from typing_extensions import override

from autoscaler.actuators.actuator import ONE_GPU, ActualReplica, Actuator, ReplicaShape
from autoscaler.actuators.hosts.host_placement import HostCandidate, choose_host
from autoscaler.actuators.hosts.host_watch import HostLink, HostWatch
from autoscaler.snapshot import POOLS, PoolName
from splitserve.errors import FailedPreconditionError, SplitserveError, UnavailableError
from splitserve.logs import log_event


class HostsActuator(Actuator):
    """Replicas of all hosts. Each host is asked beside the others and may take `answer_s` seconds.

    It remembers what `replicas` cannot recover while a host is away, and nothing else.
    """

    def __init__(
        self,
        hosts: Sequence[HostLink],
        *,
        answer_s: float = 4.0,
        unknown_s: float = 900.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.proves_end = all(host.actuator.proves_end for host in hosts)
        self._hosts = tuple(HostWatch(host) for host in hosts)
        self._answer_s, self._unknown_s, self._clock = answer_s, unknown_s, clock
        self._began_s = clock()

    @override
    async def replicas(self) -> tuple[ActualReplica, ...]:
        """Raises FailedPreconditionError (SAME_WORKER_ID) when two hosts have workers of one id."""
        await self._ask(self._hosts)
        now_s = self._clock()
        found = [replica for host in self._hosts for replica in host.listed(now_s, self._unknown_s)]
        twice = [name for name, count in Counter(replica.name for replica in found).items() if count > 1]
        if twice:
            where = sorted({replica.host for replica in found if replica.name == twice[0]})
            message = (
                f"worker {twice[0]} is on the hosts {', '.join(where)}; each needs a host name of its own"
            )
            raise FailedPreconditionError(message, reason="SAME_WORKER_ID")
        return tuple(sorted(found, key=lambda replica: replica.name))

    @override
    async def tidy(self) -> None:
        """Hosts that do not answer are left out."""
        await self._tell_each(lambda actuator: actuator.tidy())

    @property
    @override
    def gpu_inventory(self) -> int | None:
        """Without the GPUs of hosts that were given up."""
        now_s = self._clock()
        counts = [
            host.link.actuator.gpu_inventory for host in self._hosts if not self._is_given_up(host, now_s)
        ]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    @property
    @override
    def hosts(self) -> Mapping[str, bool]:
        return {host.link.name: host.reachable for host in self._hosts}

    @override
    async def start(self, pool: PoolName, count: int, shape: ReplicaShape = ONE_GPU) -> None:
        """Raises UnavailableError (HOST_UNKNOWN) while a host has not answered since this process began,
        and what `choose_host` raises."""
        if all(host.answered_s is None for host in self._hosts):
            await self._ask(self._hosts)
        self._refuse_while_unknown()
        ordered: Counter[str] = Counter()
        try:
            for _ in range(count):
                await self._start_one(pool, shape, ordered)
        finally:
            # So that their names are known if their host is cut off at once.
            await self._ask([host for host in self._hosts if ordered[host.link.name]])

    @override
    async def stop(self, pool: PoolName, names: Sequence[str], drain_s: float) -> None:
        """Raises UnavailableError (HOST_UNKNOWN) for replicas of a host that does not answer, once all
        others have been told: they are to be told again."""
        await self._tell_each(lambda actuator: actuator.stop(pool, names, drain_s))
        for host in self._hosts:
            away = [replica.name for replica in host.replicas if replica.name in names]
            if away and not host.reachable:
                message = (
                    f"{', '.join(away)}: host {host.link.name} does not answer; it is told when it is back"
                )
                raise UnavailableError(message, reason="HOST_UNKNOWN")

    @override
    async def close(self) -> None:
        """Replicas stay."""
        await asyncio.gather(*(host.close() for host in self._hosts))

    async def _tell_each(self, order: Callable[[Actuator], Awaitable[None]]) -> None:
        """Tells all hosts that answer; raises the first error once all of them have been told."""
        told = [order(host.link.actuator) for host in self._hosts if host.reachable]
        for answer in await asyncio.gather(*told, return_exceptions=True):
            if answer is not None:
                raise answer

    async def _ask(self, hosts: Collection[HostWatch]) -> None:
        """Asks all of them. Only those that answered the last time are waited for: who is away delays nobody."""
        asked = {host: host.ask() for host in hosts}
        if waited := [task for host, task in asked.items() if host.reachable]:
            await asyncio.wait(waited, timeout=self._answer_s)
        back = [host for host in asked if host.settle(self._clock())]
        if back:
            await self._ask(back)

    async def _start_one(self, pool: PoolName, shape: ReplicaShape, ordered: Counter[str]) -> None:
        """One order. Where the Engine of the best host refuses it, the next best gets it: one broken host must not take
        all orders. An order without an answer goes nowhere else."""
        refused: dict[str, UnavailableError] = {}
        while True:
            try:
                host = await self._place(pool, shape, ordered, refused)
            except SplitserveError as error:
                raise next(iter(refused.values()), error) from None
            try:
                await host.start(pool, shape)
            except UnavailableError as error:
                if not host.reachable:
                    raise
                refused[host.link.name] = error
                fields = {"host": host.link.name, "pool": pool, "error": error.message}
                log_event("host.refused", level=logging.WARNING, **fields)
            else:
                ordered[host.link.name] += 1
                return

    async def _place(
        self, pool: PoolName, shape: ReplicaShape, ordered: Counter[str], refused: Collection[str]
    ) -> HostWatch:
        reachable = [host for host in self._hosts if host.reachable and host.link.name not in refused]
        rooms = await asyncio.gather(*(host.room(pool, shape) for host in reachable))
        candidates = []
        for host, room in zip(reachable, rooms, strict=True):
            if room is None:
                continue
            there = Counter(replica.pool for replica in host.replicas if not replica.stopping)
            there[pool] += ordered[host.link.name]
            counts = {one: there[one] for one in POOLS}
            candidates.append(HostCandidate(host.link.name, room, counts, host.link.fabric))
        silent = [host.link.name for host in self._hosts if not host.reachable]
        chosen = choose_host(pool, candidates, silent)
        return next(host for host in reachable if host.link.name == chosen)

    def _refuse_while_unknown(self) -> None:
        """While hosts that have not answered since this began may yet."""
        left_s = self._began_s + self._unknown_s - self._clock()
        never = [host.link.name for host in self._hosts if host.answered_s is None]
        if never and left_s >= 0:
            message = (
                f"host {', '.join(never)} has not answered since the autoscaler began: what runs there is not known, "
                f"and nothing is started until it answers, or for another {left_s:.0f} s"
            )
            raise UnavailableError(message, reason="HOST_UNKNOWN")

    def _is_given_up(self, host: HostWatch, now_s: float) -> bool:
        since_s = self._began_s if host.answered_s is None else host.answered_s
        return not host.reachable and now_s - since_s > self._unknown_s
