"""Work of which little may go on at once, given to tenants in turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple


class _Waiting(NamedTuple):
    """A place in a lane."""

    size: int
    number: int
    ready: asyncio.Future[None]


class FairLane:
    """Work of which `at_once` may go on at a time. Tenants take turns, and the smallest of a tenant goes first."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._waiting: OrderedDict[object, list[_Waiting]] = OrderedDict()
        self._numbers = count()

    def waiting(self, tenant: object) -> int:
        """How many of a tenant wait for their turn."""
        return len(self._waiting.get(tenant, ()))

    @asynccontextmanager
    async def turn(self, tenant: object, size: int = 0) -> AsyncIterator[None]:
        """Waits for the tenant's turn."""
        if self._free:
            self._free -= 1
        else:
            queue = self._waiting.setdefault(tenant, [])
            waiting = _Waiting(size, next(self._numbers), asyncio.get_running_loop().create_future())
            heappush(queue, waiting)
            try:
                await waiting.ready
            except asyncio.CancelledError:
                if waiting.ready.cancelled():
                    self._leave(tenant, waiting)
                else:
                    self._next()
                raise
        try:
            yield
        finally:
            self._next()

    def _next(self) -> None:
        """Gives a turn that has ended to the tenant that has waited longest for one."""
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            waiting = heappop(queue)
            if queue:
                self._waiting[tenant] = queue
            if not waiting.ready.done():
                waiting.ready.set_result(None)
                return
        self._free += 1

    def _leave(self, tenant: object, waiting: _Waiting) -> None:
        queue = self._waiting.get(tenant, [])
        if waiting in queue:
            queue.remove(waiting)
            heapify(queue)
        if not queue:
            self._waiting.pop(tenant, None)
