"""When a service should end: the first SIGTERM or SIGINT drains, the second one ends the process at once."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

SECOND_SIGNAL_EXIT_CODE = 130


def stop_signal() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets. To be called on the running event loop."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(SECOND_SIGNAL_EXIT_CODE)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(
            NotImplementedError
        ):  # loops without signal handlers: off the main thread, other systems
            loop.add_signal_handler(number, on_signal)
    return stop
