"""One question to several at once, of whom the first with an answer is enough."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def first_answer(asked: Iterable[Coroutine[Any, Any, T]], deadline_s: float) -> T | None:
    """The first result that is not empty of those that are all asked at once, the others being cancelled then; None if
    there is none, or none within `deadline_s` seconds. Raises what one of them raises before that."""
    asking = [asyncio.create_task(one) for one in asked]
    try:
        async with asyncio.timeout(deadline_s):
            for answer in asyncio.as_completed(asking):
                if found := await answer:
                    return found
    except TimeoutError:
        pass
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return None
