"""The fetches that are under way: who may wait for one in place of fetching or computing the same again, and what they
take of their workers' lanes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from coordinator.background_tasks import BackgroundTasks
from coordinator.peer_fetch.prefix_fetch import too_slow
from coordinator.workers.snapshot import Worker, WorkerKey
from splitserve.errors import SplitserveError, UnavailableError


@dataclass(eq=False, slots=True)
class UnderWay:
    """A fetch that goes on as long as anybody waits for it. Times in seconds on the monotonic clock."""

    holder: Worker
    taker: Worker
    keys: Sequence[int]
    """Of the prefix's blocks at the taker, in the prefix index: each stands for all before it."""
    began_s: float
    due_s: float
    """When it is predicted to end."""
    lane_s: float
    """What its lane is predicted to be busy with it."""
    is_seed: bool = False
    waiters: int = 0
    task: asyncio.Task[None] | None = None
    outcome: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The blocks that travelled, or the SplitserveError."""

    @property
    def given_up(self) -> bool:
        """Whether it is being ended, as nobody waits for it any more."""
        return self.task is not None and self.task.cancelling() > 0

    def common_tokens(self, keys: Sequence[int]) -> int:
        """Leading tokens that a prompt with these keys, of the same size, will find at the taker."""
        low, high = 0, min(len(keys), len(self.keys))
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] == self.keys[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low * self.taker.block_size_tokens

    async def wait(self, limit_s: float) -> int:
        """The blocks that travelled. The last one that does not wait any more ends the fetch.

        Raises SplitserveError: the fetch's, or DeadlineExceededError (FETCH_TOO_SLOW).
        """
        self.waiters += 1
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(self.outcome)
        except TimeoutError:
            raise too_slow(limit_s) from None
        finally:
            self.waiters -= 1
            if not self.waiters and self.task is not None:
                self.task.cancel()


class FetchesUnderWay:
    """All fetches of one coordinator that have not ended, seeds included."""

    def __init__(self, background: BackgroundTasks) -> None:
        self._background = background
        self._fetches: dict[UnderWay, None] = {}
        self._changed = asyncio.Event()

    def begin(self, fetch: UnderWay, bring: Callable[[], Awaitable[int]]) -> UnderWay:
        """Starts a fetch. `wait` for it at once: one that nobody waits for ends with the first who gives it up."""
        self._fetches[fetch] = None
        fetch.task = self._background.start(self._run(fetch, bring))
        fetch.task.add_done_callback(lambda _: self._over(fetch))
        return fetch

    def at(self, taker: WorkerKey) -> Iterator[UnderWay]:
        """Those whose blocks go to this worker."""
        return (fetch for fetch in self._fetches if fetch.taker.key == taker and not fetch.given_up)

    def busy_s(self, holder: WorkerKey, taker: WorkerKey, now: float) -> float:
        """Seconds for which fetches keep the lanes of either worker busy still. Seeds give way."""
        return sum(
            min(fetch.lane_s, max(0.0, fetch.due_s - now))
            for fetch in self._fetches
            if not fetch.is_seed and (fetch.holder.key == holder or fetch.taker.key == taker)
        )

    def may_seed(self, holder: WorkerKey, taker: WorkerKey) -> bool:
        """Whether no request's fetch needs either worker now."""
        return not any(
            not fetch.is_seed and {fetch.holder.key, fetch.taker.key} & {holder, taker}
            for fetch in self._fetches
        )

    async def changed(self, limit_s: float) -> None:
        """Waits until a fetch has ended, at most `limit_s`."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._changed.wait()

    async def _run(self, fetch: UnderWay, bring: Callable[[], Awaitable[int]]) -> None:
        try:
            moved = await bring()
        except SplitserveError as error:
            if not fetch.outcome.done():
                fetch.outcome.set_exception(error)
                fetch.outcome.exception()  # also where nobody waits any more
        else:
            if not fetch.outcome.done():
                fetch.outcome.set_result(moved)

    def _over(self, fetch: UnderWay) -> None:
        self._fetches.pop(fetch, None)
        self._changed.set()
        if not fetch.outcome.done():
            fetch.outcome.set_exception(UnavailableError("the fetch was ended", reason="FETCH_ENDED"))
            fetch.outcome.exception()
