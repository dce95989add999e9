"""Late sockets: each descriptor's readiness reaches the event loop up to so many milliseconds late.

What arrives over different connections (HTTP, gRPC, a pipe) then comes in any order, as on a busy machine; what
arrives over one of them keeps its order. A test that counts on one connection being faster than another fails.
`SPLITSERVE_TEST_JITTER_MS=40 pytest tests/integration` asks for it.
"""

from __future__ import annotations

import random
from asyncio import selector_events
from collections.abc import Callable
from typing import Any

VARIABLE = "SPLITSERVE_TEST_JITTER_MS"
SHARE = 0.3
"""So many of the wake-ups come late."""


def make_sockets_late(most_s: float, chance: random.Random) -> None:
    """Changes asyncio's own event loop for the rest of the process."""
    loop_class: Any = selector_events.BaseSelectorEventLoop
    add, remove = loop_class._add_reader, loop_class._remove_reader

    def late_add(loop: Any, fd: Any, callback: Callable[..., Any], *args: Any) -> Any:
        registered = object()
        current = loop.__dict__.setdefault("_late_readers", {})
        number = fd if isinstance(fd, int) else fd.fileno()

        def resume() -> None:
            if current.get(number) is registered and not loop.is_closed():
                add(loop, number, ready)
                callback(*args)

        def ready() -> None:
            if chance.random() >= SHARE:
                callback(*args)
                return
            remove(loop, number)  # else the selector would tell of it again and again
            loop.call_later(chance.random() * most_s, resume)

        current[number] = registered
        return add(loop, fd, ready)

    def late_remove(loop: Any, fd: Any) -> Any:
        number = fd if isinstance(fd, int) else fd.fileno()
        waiting = loop.__dict__.get("_late_readers", {}).pop(number, None) is not None
        return remove(loop, fd) or waiting

    loop_class._add_reader, loop_class._remove_reader = late_add, late_remove
