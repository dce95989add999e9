"""Runs the batches of a folder: checks their input, serves line by line, ends them.

Each unfinished batch has a task. Few lines run at a time, of all tenants in turn. A batch has a window, too: how many
of its lines may run. It is one after a refusal for load, and grows by one with each result. No line begins while
requests of a higher class wait for its model.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from coordinator.entrypoints.batch.door import Door, Verdict
from coordinator.entrypoints.batch.folder import BatchFolder, InputReading
from coordinator.entrypoints.batch.lines import InputCheck, RequestLine, line_id, result_line
from coordinator.entrypoints.batch.records import FOLLOWING, Batch, Status
from coordinator.request.inference_request import Caller
from splitserve.errors import SplitserveError
from splitserve.logs import log_event, log_exception
from splitserve.metrics import counters, gauges
from splitserve.runtime.fair_lane import FairLane

YIELD_S = 0.25
"""How long a batch waits while others go first."""
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0
"""Pause after a refusal for load, or an error of the disk. It doubles, unless there is a hint."""
MAX_TRIES = 3
"""How often a line is served under which something breaks, such as a worker, before it fails."""
EXPIRED = "batch_expired", "the completion window ended before this request was served"


@dataclass(eq=False, slots=True)
class _Progress:
    """What a batch does now. Times are on the event loop's clock."""

    reading: InputReading
    window: int = 1
    running: int = 0
    at_end: bool = False
    """Whether all lines have been read, and none is to be read again."""
    paused_until_s: float = 0.0
    refusals: int = 0
    """In a row; those of lines that ran together count once."""
    tries: Counter[int] = field(default_factory=Counter)
    """Of lines under which something broke, by number."""
    failure: SplitserveError | None = None
    """Why results cannot be kept now."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a line ends."""

    @property
    def pause_s(self) -> float:
        """How much longer no line begins."""
        return self.paused_until_s - asyncio.get_running_loop().time()

    def pause(self, seconds: float) -> None:
        self.paused_until_s = asyncio.get_running_loop().time() + seconds

    def put_back(self, line: RequestLine) -> None:
        self.reading.again.append((line.number, line.offset))
        self.at_end = False

    def refused(self, line: RequestLine, hint_s: float | None) -> None:
        self.put_back(line)
        self.window = 1
        if self.pause_s <= 0:
            self.pause(min(max(hint_s or 0.0, FIRST_PAUSE_S * 2**self.refusals), LAST_PAUSE_S))
            self.refusals = min(self.refusals + 1, 16)

    def line_ended(self, _: object) -> None:
        self.running -= 1
        self.changed.set()


class BatchRunner:
    """Serves the batches of a folder through a door, at most `concurrency` lines at a time. `most_bytes`: of a line.
    `clock` gives seconds since the epoch."""

    def __init__(
        self,
        folder: BatchFolder,
        door: Door,
        concurrency: int,
        most_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder, self._door, self.clock = folder, door, clock
        self._concurrency, self._most_bytes = concurrency, most_bytes
        self._turns = FairLane(concurrency)
        self._of_tenant: Counter[str] = Counter()
        """Lines that run, by tenant."""
        self._scopes: dict[str, asyncio.Timeout] = {}
        self._added = asyncio.Event()
        self._lines = {"completed": 0, "failed": 0, "retried": 0}

    async def run(self) -> None:
        """Runs all batches, until cancelled."""
        tasks: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                self._added.clear()
                tasks = {batch_id: task for batch_id, task in tasks.items() if not task.done()}
                for batch in list(self.folder.batches.values()):
                    if not batch.is_over and batch.id not in tasks:
                        tasks[batch.id] = group.create_task(self._drive(batch), name=batch.id)
                await self._added.wait()

    def added(self) -> None:
        """Takes notice of a new batch."""
        self._added.set()

    async def cancel(self, batch: Batch) -> bool:
        """Cancels a batch and the lines that run. Returns False if it is too late."""
        cancelled = await self.folder.run(self.folder.set_status, batch, "cancelling", self.clock())
        if cancelled and (scope := self._scopes.get(batch.id)) is not None:
            scope.reschedule(asyncio.get_running_loop().time())
        return cancelled

    def metrics(self) -> list[Metric]:
        """Batches by status, and lines by what became of them."""
        counts = Counter(batch.status for batch in list(self.folder.batches.values()))
        states: Mapping[str, float] = {status: counts[status] for status in FOLLOWING}
        return [
            gauges("splitserve_batches", "Unfinished batches", "status", states),
            counters("splitserve_batch_lines", "Lines of batches that were served", "outcome", self._lines),
        ]

    async def _drive(self, batch: Batch) -> None:
        """Serves a batch to its end, whatever happens."""
        pauses, broken = 0, False
        while not batch.is_over:
            try:
                if broken:
                    await self._end(batch, "failed")
                else:
                    await self._advance(batch)
                continue
            except SplitserveError as error:
                log_event("batch.paused", batch=batch.id, reason=error.reason, error=error.message)
            except Exception as error:
                log_exception("batch.broken", error, batch=batch.id)
                batch.errors = [
                    {"code": "internal_error", "message": "see the log", "line": None, "param": None}
                ]
                broken = True
            await asyncio.sleep(min(FIRST_PAUSE_S * 2**pauses, LAST_PAUSE_S))
            pauses = min(pauses + 1, 16)

    async def _advance(self, batch: Batch) -> None:
        """Does what is to be done in the batch's status. Raises SplitserveError if results cannot be kept now."""
        left_s = batch.expires_at - self.clock()
        if batch.status in ("validating", "in_progress") and left_s > 0:
            try:
                async with asyncio.timeout(left_s) as scope:
                    self._scopes[batch.id] = scope
                    await (
                        self._validate(batch) if batch.status == "validating" else self._serve_lines(batch)
                    )
                return
            except TimeoutError:
                if not scope.expired():
                    raise
            finally:
                del self._scopes[batch.id]
        if batch.status == "validating":
            await self._end(batch, "expired")
            return
        reading = await self.folder.run(self.folder.recover, batch)
        if batch.status == "in_progress":
            while (line := await self.folder.run(self.folder.next_line, batch, reading)) is not None:
                await self._keep(batch, reading, line, EXPIRED)
            await self._end(batch, "expired")
        elif batch.status == "finalizing":
            await self._end(batch, "completed")
        else:
            await self._end(batch, "cancelled")

    async def _end(self, batch: Batch, status: Status) -> None:
        await self.folder.run(self.folder.end_batch, batch, status, self.clock())
        counts = {"lines": batch.total, "completed": batch.completed, "failed": batch.failed}
        log_event("batch.ended", batch=batch.id, tenant=batch.tenant, status=batch.status, **counts)

    async def _validate(self, batch: Batch) -> None:
        check = InputCheck(batch.endpoint, self._most_bytes)
        while not check.ended:
            await self.folder.run(self.folder.check_some, batch, check)
        if check.errors:
            batch.errors = check.errors
            await self._end(batch, "failed")
            return
        counts = {"lines": check.lines, "total": check.requests}
        await self.folder.run(self.folder.set_status, batch, "in_progress", self.clock(), **counts)
        log_event("batch.started", batch=batch.id, tenant=batch.tenant, lines=check.requests)

    async def _serve_lines(self, batch: Batch) -> None:
        """Serves the lines without a result. Raises SplitserveError if results cannot be kept now."""
        progress = _Progress(await self.folder.run(self.folder.recover, batch))
        async with asyncio.TaskGroup() as lines:
            while progress.failure is None:
                progress.changed.clear()
                if progress.pause_s > 0:
                    await asyncio.sleep(progress.pause_s)
                elif progress.running < progress.window and not progress.at_end:
                    progress.running += 1
                    lines.create_task(self._next_line(batch, progress)).add_done_callback(progress.line_ended)
                elif progress.running:
                    await progress.changed.wait()
                elif batch.completed + batch.failed >= batch.total:
                    break
                else:  # a line was cancelled by what it awaited: it has no result, and is read again
                    progress.reading.number = progress.reading.offset = 0
                    progress.at_end = False
                    progress.pause(FIRST_PAUSE_S)
        if progress.failure is not None:
            raise progress.failure
        await self.folder.run(self.folder.set_status, batch, "finalizing", self.clock())

    async def _next_line(self, batch: Batch, progress: _Progress) -> None:
        """Serves the next line in the tenant's turn, unless the batch has to wait."""
        async with self._turns.turn(batch.tenant):
            if progress.pause_s > 0 or progress.failure is not None:
                return
            found = self._door.caller(batch.tenant)  # for each line: the tenants file may have changed
            if found is None or (
                found[1] is not None and self._of_tenant[batch.tenant] >= max(1, found[1] // 2)
            ):
                progress.pause(YIELD_S)
                return
            self._of_tenant[batch.tenant] += 1
            try:
                line = await self.folder.run(self.folder.next_line, batch, progress.reading)
                if line is None:
                    progress.at_end = True
                elif self._door.is_crowded(line.model, found[0]):
                    progress.put_back(line)
                    progress.pause(YIELD_S)
                else:
                    await self._serve(batch, progress, line, found[0])
            except SplitserveError as failure:
                progress.failure = failure
            finally:
                self._of_tenant[batch.tenant] -= 1

    async def _serve(self, batch: Batch, progress: _Progress, line: RequestLine, caller: Caller) -> None:
        verdict: Verdict
        result: tuple[int, bytes] | tuple[str, str]
        try:
            own_id = line_id(batch.id, line.number)
            answer = await self._door.serve(batch.endpoint, line.body, caller, own_id)
            verdict, result = answer.verdict(self._door.uptime_s), (answer.status, answer.body)
        except Exception as fault:  # a line that cannot be served must not end the others
            log_exception("batch.line_broken", fault, batch=batch.id, line=line.number)
            verdict, result = "answered", ("internal_error", "the request could not be served")
        progress.tries[line.number] += verdict == "broken"
        if verdict == "refused" or (verdict == "broken" and progress.tries[line.number] < MAX_TRIES):
            self._lines["retried"] += 1
            progress.refused(line, answer.retry_after_s)
            return
        await self._keep(batch, progress.reading, line, result)
        progress.refusals, progress.window = 0, min(progress.window + 1, self._concurrency)

    async def _keep(
        self,
        batch: Batch,
        reading: InputReading,
        line: RequestLine,
        answer: tuple[int, bytes] | tuple[str, str],
    ) -> None:
        """Appends a line's result; see `result_line`."""
        result = result_line(line_id(batch.id, line.number), line.custom_id, answer)
        failed = answer[0] != 200
        if await self.folder.run(self.folder.append, batch, reading, line.number, result, failed=failed):
            self._lines["failed" if failed else "completed"] += 1
