"""Cancellation: whether the present task is cancelled, or only what it awaits; and ending tasks within a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

from splitserve.logs import log_event

END_S = 10.0
"""How long cancelled tasks may take to end."""


def is_being_cancelled() -> bool:
    """Whether the present task is cancelled. If it is not, a CancelledError comes from what the task awaits."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def raise_if_cancelled() -> None:
    """Raises CancelledError if the present task is cancelled. For loops that go on after an error of a call: a gRPC
    stream that is cancelled while its status arrives raises the status, and the cancellation is lost."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks and waits for them, END_S at most; those that do not end are logged by name."""
    ending = [task for task in tasks if not task.done()]
    for task in ending:
        task.cancel()
    if not ending:
        return
    _, unended = await asyncio.wait(ending, timeout=END_S)
    if unended:
        log_event("tasks.do_not_end", level=logging.ERROR, tasks=sorted(task.get_name() for task in unended))


async def run_beside(
    front: Coroutine[Any, Any, object], background: Iterable[tuple[str, Coroutine[Any, Any, object]]]
) -> None:
    """Runs `front` to its end with tasks beside it, by name, which `end_tasks` then ends.

    Raises the first error of any task, which ends the others, or an error of a task while it was ended. A TaskGroup
    would wait without limit for a task that does not end.
    """
    first = asyncio.create_task(front)
    tasks = [first, *(asyncio.create_task(coroutine, name=name) for name, coroutine in background)]
    try:
        running = set(tasks)
        while not first.done():
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            _raise_errors(ended)
    finally:
        await end_tasks(tasks)
    _raise_errors(tasks)
    first.result()


def _raise_errors(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()
