"""Ends a worker whose engine thread hangs in a native library, so that its supervisor can start it anew.

Steps may take long: a first one compiles kernels. What happens between steps (polls, posts, connections, calls) takes
milliseconds; when it takes `HUNG_S`, it will not come back. A thread in native code cannot be ended, only its process
can. Until then the worker would go on sending heartbeats and draw requests that nobody serves.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
from collections.abc import Callable

from splitserve.logs import log_event

HUNG_S = 30.0
CHECK_S = 1.0
EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h."""


async def watch(
    hanging_s: Callable[[], float],
    worker_id: str,
    *,
    hung_s: float = HUNG_S,
    check_s: float = CHECK_S,
    leave: Callable[[int], object] = os._exit,
) -> None:
    """Runs until cancelled, or calls `leave` once `hanging_s` has reached `hung_s`.

    Writes every thread's Python stack to stderr first.
    """
    while (seconds := hanging_s()) < hung_s:  # noqa: ASYNC110 - nothing can tell us: it hangs
        await asyncio.sleep(check_s)
    log_event("engine.hung", level=logging.ERROR, worker_id=worker_id, seconds=round(seconds, 1))
    faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    leave(EXIT_CODE)
