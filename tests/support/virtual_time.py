"""An event loop whose clock jumps to the next timer once there is nothing else to do: for what waits, but neither for
threads nor for sockets."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += max(0.0, timeout or 0.0)
        return super().select(0.0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time begins at 0, seconds."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """What the work returns, and how many seconds it took of its own time."""

    async def timed() -> tuple[T, float]:
        loop = asyncio.get_running_loop()
        return await work, loop.time()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(timed())
