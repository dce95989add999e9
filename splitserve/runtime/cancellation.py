"""Who cancels: the present task's owner, or what it awaits."""

from __future__ import annotations

import asyncio


def is_being_cancelled() -> bool:
    """Whether somebody cancels the present task; else a CancelledError comes from what it awaits."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
