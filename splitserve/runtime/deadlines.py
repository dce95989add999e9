"""Deadlines of single steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from splitserve.errors import DeadlineExceededError

T = TypeVar("T")


async def within(deadline_s: float, work: Awaitable[T], what: str) -> T:
    """What the work returns. Raises DeadlineExceededError (naming `what`) unless it is done in time."""
    try:
        async with asyncio.timeout(deadline_s):
            return await work
    except TimeoutError:
        raise DeadlineExceededError(f"{what}: not done within {deadline_s:g} s") from None
