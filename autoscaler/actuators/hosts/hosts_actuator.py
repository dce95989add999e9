"""One actuator over those of several hosts.

An unreachable host is unknown, not gone. Its replicas stay on the list as they were last seen, so that none is
replaced, and no replica is started on the host. After `unknown_s` its replicas are given up: others may take their
places. Those that still run when the host comes back count again. An order whose outcome is unknown keeps a place
likewise.

Nothing is known of a host that has not answered since this process began. Until it answers, or for `unknown_s`, nothing
is started anywhere. Replicas that the coordinators see there count as capacity nevertheless.
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
from autoscaler.actuators.hosts.host_watch import HostWatch
from splitserve.errors import FailedPreconditionError, SplitserveError, UnavailableError
from splitserve.logs import log_event
from splitserve.roles import PoolName


class HostsActuator(Actuator):
    """Replicas of all hosts, which are asked concurrently. Each host may take `answer_s` seconds.

    The only state is what `replicas` cannot recover while a host is away.
    """

    def __init__(
        self,
        hosts: Sequence[HostWatch],
        *,
        answer_s: float = 4.0,
        unknown_s: float = 900.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.proves_end = all(host.actuator.proves_end for host in hosts)
        self._hosts = tuple(hosts)
        self._answer_s, self._unknown_s, self._clock = answer_s, unknown_s, clock
        self._began_s = clock()

    @override
    async def replicas(self) -> tuple[ActualReplica, ...]:
        """Raises FailedPreconditionError (SAME_WORKER_ID) when workers of two hosts have the same id."""
        await self._ask(self._hosts)
        now_s = self._clock()
        replicas = [replica for host in self._hosts for replica in host.listed(now_s, self._unknown_s)]
        twice = [name for name, count in Counter(replica.name for replica in replicas).items() if count > 1]
        if twice:
            hosts = sorted({replica.host for replica in replicas if replica.name == twice[0]})
            message = (
                f"worker {twice[0]} is on the hosts {', '.join(hosts)}; each needs a host name of its own"
            )
            raise FailedPreconditionError(message, reason="SAME_WORKER_ID")
        return tuple(sorted(replicas, key=lambda replica: replica.name))

    @override
    async def tidy(self) -> None:
        """Skips hosts that do not answer."""
        await self._tell_each(lambda actuator: actuator.tidy())

    @property
    @override
    def gpu_inventory(self) -> int | None:
        """The GPUs of hosts that were given up are left out."""
        now_s = self._clock()
        counts = [host.actuator.gpu_inventory for host in self._hosts if not self._is_given_up(host, now_s)]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    @property
    @override
    def hosts(self) -> Mapping[str, bool]:
        return {host.name: host.reachable for host in self._hosts}

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
            # The new replicas' names are then known even if their host is cut off at once.
            await self._ask([host for host in self._hosts if ordered[host.name]])

    @override
    async def stop(self, names: Sequence[str], drain_s: float) -> None:
        """Raises UnavailableError (HOST_UNKNOWN) for replicas of a host that does not answer, after all other hosts
        have been told: call again for these replicas."""
        await self._tell_each(lambda actuator: actuator.stop(names, drain_s))
        for host in self._hosts:
            untold = [replica.name for replica in host.replicas if replica.name in names]
            if untold and not host.reachable:
                message = f"{', '.join(untold)}: host {host.name} does not answer; it is told when it is back"
                raise UnavailableError(message, reason="HOST_UNKNOWN")

    @override
    async def close(self) -> None:
        """Replicas keep running."""
        await asyncio.gather(*(host.close() for host in self._hosts))

    async def _tell_each(self, order: Callable[[Actuator], Awaitable[None]]) -> None:
        """Tells all reachable hosts; raises the first error once all of them have been told."""
        orders = [order(host.actuator) for host in self._hosts if host.reachable]
        for error in await asyncio.gather(*orders, return_exceptions=True):
            if error is not None:
                raise error

    async def _ask(self, hosts: Collection[HostWatch]) -> None:
        """Asks these hosts for their replicas. Waits only for hosts that answered the last time."""
        questions = {host: host.ask() for host in hosts}
        if awaited := [question for host, question in questions.items() if host.reachable]:
            await asyncio.wait(awaited, timeout=self._answer_s)
        back = [host for host in questions if host.settle(self._clock())]
        if back:
            await self._ask(back)

    async def _start_one(self, pool: PoolName, shape: ReplicaShape, ordered: Counter[str]) -> None:
        """Orders one replica. When the Engine of the best host refuses, the next best host gets the order, so that one
        broken host does not stop all starts. An order without an answer goes to no other host."""
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
                refused[host.name] = error
                fields = {"host": host.name, "pool": pool, "error": error.message}
                log_event("host.refused", level=logging.WARNING, **fields)
            else:
                ordered[host.name] += 1
                return

    async def _place(
        self, pool: PoolName, shape: ReplicaShape, ordered: Counter[str], refused: Collection[str]
    ) -> HostWatch:
        reachable = [host for host in self._hosts if host.reachable and host.name not in refused]
        rooms = await asyncio.gather(*(host.room(pool, shape) for host in reachable))
        candidates = []
        for host, room in zip(reachable, rooms, strict=True):
            if room is None:
                continue
            counts = Counter(replica.pool for replica in host.replicas if not replica.stopping)
            counts[pool] += ordered[host.name]
            candidates.append(HostCandidate(host.name, room, counts, host.fabric))
        silent = [host.name for host in self._hosts if not host.reachable]
        chosen = choose_host(pool, candidates, silent)
        return next(host for host in reachable if host.name == chosen)

    def _refuse_while_unknown(self) -> None:
        """Raises UnavailableError while a host that has not answered since this process began may still do so."""
        left_s = self._began_s + self._unknown_s - self._clock()
        silent = [host.name for host in self._hosts if host.answered_s is None]
        if silent and left_s >= 0:
            message = (
                f"host {', '.join(silent)} has not answered since the autoscaler began: what runs there is not known, "
                f"and nothing is started until it answers, or for another {left_s:.0f} s"
            )
            raise UnavailableError(message, reason="HOST_UNKNOWN")

    def _is_given_up(self, host: HostWatch, now_s: float) -> bool:
        since_s = self._began_s if host.answered_s is None else host.answered_s
        return not host.reachable and now_s - since_s > self._unknown_s
