"""A thread for parsing and rendering, so that a large message does not stop the event loop.

Python code on another thread lets the event loop run again after the interpreter's switch interval. A call into C that
keeps the interpreter's lock does not: such calls need bounds of their own, checked before them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SHORT_BYTES = 16 * 2**10
"""Messages up to this size are parsed on the event loop: in 3 ms at worst, and usually in less than the hop takes."""
SWITCH_INTERVAL_S = 0.001


class ParserThread:
    """One thread, started at first use; work is done in order. One at a time: each further thread that wants the
    interpreter could delay the event loop by another switch interval."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parser")

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work`; on the event loop if what it works on is short (`size` in bytes)."""
        if size <= SHORT_BYTES:
            return work(*args, **kwargs)
        return await asyncio.wrap_future(self._thread.submit(work, *args, **kwargs))

    def close(self) -> None:
        """Drops what has not begun and lets the thread end."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def favor_event_loop() -> None:
    """Lets the event loop have the interpreter back within a millisecond while other threads compute."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
