"""One fetch: reserves at the taker, has the holder push, waits until the blocks are in the taker's cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TypeVar

from coordinator.background_tasks import BackgroundTasks
from coordinator.peer_fetch.hot_prefixes import Prefix
from coordinator.request.ids import random_hex
from coordinator.workers.client import WorkerClient
from coordinator.workers.output_collector import OutputCollector, WorkerFailed
from splitserve.errors import DeadlineExceededError, SplitserveError
from splitserve.rpc.status import failure_error
from splitserve.v1 import decode_pb2, generation_pb2, prefill_pb2

FETCH_RANK, SEED_RANK = -100, -101
"""`Precedence.class_rank` on both workers: after the handoffs of all requests, and seeds after fetches."""

TOO_SLOW = "FETCH_TOO_SLOW"
WRITER_GAVE_UP = "TRANSFER_FAILED"
"""The taker's reason for all that the holder, or its end, has told it: the holder's own says more."""
HOLDER_PATIENCE_S = 0.05
"""The holder's own reason is on its way then, by another stream; one that has died gives none."""
WRITTEN_PATIENCE_S = 0.25
"""The holder's word of its write comes about when the taker's does. It is heard out, for what it says of the lane."""
AnyCall = TypeVar("AnyCall", decode_pb2.ReserveRequest, prefill_pb2.PrefillRequest)


@dataclass(slots=True)
class FetchParts:
    """What of a fetch took how long, in seconds, as far as it is known."""

    took_s: float = 0.0
    """All of it, at whoever waits for it."""
    reserve_s: float = 0.0
    waited_s: float = 0.0
    """Of `reserve_s`: at the taker, for the end of a step."""


async def fetch_prefix(
    holder: WorkerClient,
    taker: WorkerClient,
    prefix: Prefix,
    background: BackgroundTasks,
    limit_s: float,
    *,
    rank: int,
    parts: FetchParts,
    on_written: Callable[[prefill_pb2.HandoffDone], object],
) -> int:
    """Brings a prefix into the taker's cache within `limit_s`; the blocks that travelled.

    Fills in `parts`. `on_written` gets the holder's word of its write, once, maybe after the fetch has ended.

    Raises SplitserveError: of either worker, or DeadlineExceededError (FETCH_TOO_SLOW).
    """
    deadline_s = time.monotonic() + limit_s
    fetch = _PrefixFetch(holder, taker, prefix, background, deadline_s, rank, parts, on_written)
    try:
        async with asyncio.timeout(limit_s):
            return await fetch.run()
    except TimeoutError:
        raise too_slow(limit_s) from None
    finally:
        fetch.close()


def too_slow(limit_s: float) -> DeadlineExceededError:
    """The error of a fetch that has not ended within this time."""
    message = f"the prefix was not there within {limit_s:.3f} s, in which it is computed"
    return DeadlineExceededError(message, reason=TOO_SLOW)


class _PrefixFetch:
    """One fetch from its reservation to its end. Call `close` in any case."""

    def __init__(
        self,
        holder: WorkerClient,
        taker: WorkerClient,
        prefix: Prefix,
        background: BackgroundTasks,
        deadline_s: float,
        rank: int,
        parts: FetchParts,
        on_written: Callable[[prefill_pb2.HandoffDone], object],
    ) -> None:
        self._parts, self._on_written = parts, on_written
        self._holder, self._taker, self._prefix = holder, taker, prefix
        self._background, self._deadline_s, self._rank = background, deadline_s, rank
        self._name = f"prefix-{random_hex(16)}"
        self._collector = OutputCollector()
        self._push: asyncio.Task[None] | None = None
        self._ended = self._written = False
        self._failed: SplitserveError | None = None
        """Why, by the taker's word."""
        self._attached = ExitStack()
        for client in (holder, taker):
            here = client.attached(self._name, self._collector, decodes=client is taker)
            self._attached.enter_context(here)

    async def run(self) -> int:
        """The blocks that travelled. Raises what either worker has failed with."""
        left_s, began_s = self._left_s(), time.monotonic()
        reserve = self._filled(decode_pb2.ReserveRequest(writer_agent_id=self._holder.worker.agent_id))
        response = await self._taker.reserve(reserve, left_s)
        self._parts.reserve_s = time.monotonic() - began_s
        self._parts.waited_s = min(self._parts.reserve_s, max(0.0, response.wait_ms / 1e3))
        count = len(response.ticket.block_indices)
        if not count:
            return 0  # it has come by itself meanwhile
        push = self._filled(prefill_pb2.PrefillRequest(ticket=response.ticket))
        call = self._holder.prefill(push, self._left_s(), self._collector)
        holder = self._push = self._background.start(call)
        while not self._ended:
            await self._collector.wait()
            self._accept()
        if self._failed is not None:
            await asyncio.wait({holder}, timeout=min(HOLDER_PATIENCE_S, self._left_s() / 2))
            self._accept()
            raise self._failed
        return count

    def close(self) -> None:
        """Ends what has not ended on both workers. Never blocks."""
        self._attached.close()
        if self._push is not None:
            if self._ended and self._failed is None and not self._written:
                self._background.start(self._hear_out(self._push))
            else:
                self._push.cancel()
        if not self._ended:
            no_writer = self._push is None or self._written
            self._background.start(self._taker.abort(self._name, no_writer, self._deadline_s))

    async def _hear_out(self, push: asyncio.Task[None]) -> None:
        try:
            await asyncio.wait({push}, timeout=WRITTEN_PATIENCE_S)
        finally:
            push.cancel()
        with suppress(SplitserveError):
            self._accept()

    def _accept(self) -> None:
        for event in self._collector.take_all():
            match event:
                case decode_pb2.SequenceOutput():
                    self._ended = self._ended or bool(event.delta.finish_reason)
                    if event.HasField("failure"):
                        self._failed = failure_error(event.failure.reason, event.failure.message)
                        if self._failed.reason != WRITER_GAVE_UP:
                            raise self._failed
                case prefill_pb2.HandoffDone():
                    if not self._written:
                        self._written = True
                        self._on_written(event)
                case WorkerFailed():
                    raise event.error
                case prefill_pb2.FirstToken():
                    pass  # of a holder that does not know of prefixes, and has computed

    def _filled(self, request: AnyCall) -> AnyCall:
        prefix = self._prefix
        request.request_id, request.prefix_only = self._name, True
        request.token_ids.extend(prefix.token_ids)
        request.cache_salt = prefix.cache_salt
        request.sampling.CopyFrom(generation_pb2.SamplingParams(temperature=0.0))
        request.stop.max_tokens = 1
        request.precedence.class_rank = self._rank
        request.timeout.FromNanoseconds(int(self._left_s() * 1e9))
        if prefix.adapter is not None:
            request.adapter.CopyFrom(generation_pb2.AdapterRef(**prefix.adapter._asdict()))
        return request

    def _left_s(self) -> float:
        return max(1e-3, self._deadline_s - time.monotonic())
