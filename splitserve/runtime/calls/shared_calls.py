"""Calls that are made once for all who want the same at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Call(Generic[T]):
    future: asyncio.Future[T]
    waiters: int = 0


class SharedCalls(Generic[T]):
    """Calls in progress, by key. One that nobody waits for any more is cancelled, so that what has not begun never
    begins. For one event loop."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, _Call[T]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    async def result(self, key: Hashable, begin: Callable[[], Awaitable[T]]) -> T:
        """The result of the call with this key, which `begin` begins unless it is in progress, or what it raises."""
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _Call(asyncio.ensure_future(begin()))
        call.waiters += 1
        try:
            return await asyncio.shield(call.future)
        finally:
            call.waiters -= 1
            if not call.waiters or call.future.done():
                self._forget(key, call)

    def _forget(self, key: Hashable, call: _Call[T]) -> None:
        if self._calls.get(key) is call:
            del self._calls[key]
        if not call.future.done():
            call.future.cancel()
