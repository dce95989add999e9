"""Waits for a device while transfers go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

POLL_S = 5e-5
"""Sleep between two looks: leaves the interpreter to the event loop, and adds little to a step."""


class DeviceEvent(Protocol):
    """What `torch.cuda.Event` is to `wait_for`."""

    def query(self) -> bool:
        """Whether the device has come to it."""

    def synchronize(self) -> None:
        """Waits until the device has."""


def wait_for(
    event: DeviceEvent, poll: Callable[[], None] | None, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Waits for the event. `poll` is called meanwhile, on this thread; None: the device alone is waited for."""
    if poll is None:
        event.synchronize()
        return
    while not event.query():
        poll()
        sleep(POLL_S)
