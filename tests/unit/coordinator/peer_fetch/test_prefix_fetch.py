"""One fetch against scripted workers: whatever happens, both are told what they must know, and nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from coordinator.background_tasks import BackgroundTasks
from coordinator.peer_fetch import prefix_fetch
from coordinator.peer_fetch.hot_prefixes import Prefix
from coordinator.peer_fetch.prefix_fetch import FETCH_RANK, SEED_RANK, FetchParts, fetch_prefix
from coordinator.request.caller import CLASS_RANKS
from coordinator.workers.client import WorkerClient
from coordinator.workers.output_collector import OutputCollector, WorkerEvent, WorkerFailed
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker
from splitserve.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    ResourceExhaustedError,
    SplitserveError,
    UnavailableError,
)
from splitserve.generation.kv_blocks import Adapter
from splitserve.v1 import decode_pb2, generation_pb2, kv_transfer_pb2, prefill_pb2, registry_pb2
from tests.support.cluster.registrations import registration
from tests.support.journal import settled

pytestmark = pytest.mark.timeout(10)
PREFIX = Prefix("words", (1, 2, 3, 4), b"salt", Adapter("a", "f" * 64))
WRITTEN = prefill_pb2.HandoffDone(written_bytes=8, transfer_ms=4.0)
ADMITTED = decode_pb2.SequenceOutput(request_id="r", admitted=True)
ENDED = decode_pb2.SequenceOutput(
    request_id="r", delta=generation_pb2.OutputDelta(finish_reason=generation_pb2.FINISH_REASON_LENGTH)
)
FAILED = decode_pb2.SequenceOutput(
    request_id="r",
    delta=generation_pb2.OutputDelta(finish_reason=generation_pb2.FINISH_REASON_ABORT),
    failure=decode_pb2.Failure(reason="TRANSFER_FAILED", message="the writer gave up"),
)

FULL = ResourceExhaustedError("4 reads go on", reason="PREFIX_READS_FULL")


class ScriptedWorker:
    """A WorkerClient; what it answers is the test's."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.collector: OutputCollector | None = None
        self.said_to: OutputCollector | None = None
        """Of the last call to push."""
        self.blocks = 2
        self.refusal: SplitserveError | None = None
        self.reserved: list[decode_pb2.ReserveRequest] = []
        self.pushed: list[prefill_pb2.PrefillRequest] = []
        self.aborts: list[bool] = []
        self.on_push: Callable[[OutputCollector], object] = lambda collector: None
        self.push_refusal: asyncio.Future[SplitserveError] = asyncio.get_running_loop().create_future()
        """Why it does not push, once it says so."""

    @contextmanager
    def attached(self, attempt_id: str, collector: OutputCollector, *, decodes: bool) -> Iterator[None]:
        self.collector = collector
        yield
        self.collector = None

    async def reserve(self, request: Any, timeout_s: float) -> decode_pb2.ReserveResponse:
        self.reserved.append(request)
        if self.refusal is not None:
            raise self.refusal
        ticket = kv_transfer_pb2.KvTicket(reservation=7, block_indices=range(self.blocks))
        return decode_pb2.ReserveResponse(ticket=ticket, wait_ms=3e6)

    async def prefill(self, request: Any, timeout_s: float, collector: OutputCollector) -> None:
        self.pushed.append(request)
        self.said_to = collector
        self.on_push(collector)
        collector.put(WorkerFailed(self.worker.key, await self.push_refusal))

    async def abort(self, attempt_id: str, no_writer: bool, deadline_s: float) -> None:
        self.aborts.append(no_writer)


class Rig:
    def __init__(self) -> None:
        registry = Registry(1.0)
        made = [
            registry.register(registration(n, registry_pb2.POOL_DECODE), 0.0) for n in ("holder", "taker")
        ]
        self.holder, self.taker = (ScriptedWorker(worker) for worker in made)
        self.background = BackgroundTasks()
        self.parts, self.written = FetchParts(), list[prefill_pb2.HandoffDone]()

    async def bring(self, limit_s: float = 5.0) -> int:
        holder, taker = (cast("WorkerClient", worker) for worker in (self.holder, self.taker))
        return await fetch_prefix(
            holder,
            taker,
            PREFIX,
            self.background,
            limit_s,
            rank=FETCH_RANK,
            parts=self.parts,
            on_written=self.written.append,
        )

    def says(self, *events: WorkerEvent) -> None:
        """What both put into the collector once the holder is called."""

        def say(collector: OutputCollector) -> None:
            for event in events:
                collector.put(event)

        self.holder.on_push = say

    async def over(self, *aborts: bool) -> None:
        await settled(lambda: self.background.count == 0)
        assert self.taker.aborts == list(aborts)
        assert self.holder.aborts == []
        assert self.holder.collector is self.taker.collector is None


@pytest.mark.parametrize(
    "order", [(WRITTEN, ADMITTED, ENDED), (ADMITTED, ENDED, WRITTEN), (ENDED,), (WRITTEN, WRITTEN, ENDED)]
)
async def test_the_blocks_are_there_when_the_taker_says_so(
    order: tuple[WorkerEvent, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_fetch, "WRITTEN_PATIENCE_S", 0.01)
    rig = Rig()
    rig.says(*order)
    assert await rig.bring() == 2
    (reserve,), (push,) = rig.taker.reserved, rig.holder.pushed
    for call in (reserve, push):
        assert call.prefix_only
        assert list(call.token_ids) == [1, 2, 3, 4]
        assert call.cache_salt == b"salt", "a tenant's blocks stay its own"
        assert call.adapter.name == "a"
        assert call.stop.max_tokens == 1
        assert SEED_RANK < call.precedence.class_rank < min(CLASS_RANKS.values()), "after requests"
        assert 0 < call.timeout.ToNanoseconds() <= 5e9
    assert reserve.writer_agent_id == rig.holder.worker.agent_id
    assert push.ticket.reservation == 7
    assert reserve.request_id == push.request_id
    assert 0 <= rig.parts.waited_s == rig.parts.reserve_s < 5, (
        "not more than the whole call, whatever it says"
    )
    await rig.over()
    assert rig.written == ([WRITTEN] if WRITTEN in order else []), (
        "a holder that does not say it is not waited for"
    )


async def test_the_holder_s_word_of_its_write_is_heard_after_the_end() -> None:
    rig = Rig()
    rig.says(ENDED)
    assert await rig.bring() == 2
    assert rig.written == []
    collector = rig.holder.said_to
    assert collector is not None
    collector.put(WRITTEN)
    rig.holder.push_refusal.set_result(UnavailableError("the call is over"))
    await rig.over()
    assert rig.written == [WRITTEN]


async def test_nothing_is_pushed_where_the_taker_has_all() -> None:
    rig = Rig()
    rig.taker.blocks = 0
    assert await rig.bring() == 0
    assert rig.holder.pushed == []
    await rig.over(True)


@pytest.mark.parametrize(
    ("events", "reason", "aborts"),
    [
        ([FAILED], "TRANSFER_FAILED", []),
        ([WorkerFailed(("holder", 1), FailedPreconditionError("gone", reason="PREFIX_GONE"))], "PREFIX_GONE", [False]),
        ([WRITTEN, WorkerFailed(("taker", 1), UnavailableError("away"))], "UNAVAILABLE", [True]),
    ],
)  # fmt: skip
async def test_a_failure_of_either_is_raised_and_the_taker_told(
    events: list[WorkerEvent], reason: str, aborts: list[bool]
) -> None:
    rig = Rig()
    rig.says(*events)
    with pytest.raises(SplitserveError) as failed:
        await rig.bring()
    assert failed.value.reason == reason
    await rig.over(*aborts)


async def test_the_holder_s_reason_is_told_though_the_taker_s_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_fetch, "HOLDER_PATIENCE_S", 60.0)
    rig = Rig()
    rig.says(FAILED)
    task = asyncio.create_task(rig.bring())
    await settled(lambda: rig.taker.collector is not None and rig.taker.collector.ended)
    rig.holder.push_refusal.set_result(FULL)
    with pytest.raises(ResourceExhaustedError) as refused:
        await task
    assert refused.value.reason == "PREFIX_READS_FULL"
    await rig.over()


@pytest.mark.parametrize("first", [True, False])
async def test_or_with_it(first: bool) -> None:
    rig = Rig()
    both: list[WorkerEvent] = [FAILED, WorkerFailed(("holder", 1), FULL)]
    rig.says(*(both if first else reversed(both)))
    with pytest.raises(ResourceExhaustedError):
        await rig.bring()
    await rig.over(*([] if first else [False]))


async def test_the_taker_s_own_failure_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_fetch, "HOLDER_PATIENCE_S", 60.0)
    rig = Rig()
    own = decode_pb2.SequenceOutput()
    own.CopyFrom(FAILED)
    own.failure.reason = "TICKET_EXPIRED"
    rig.says(own)
    with pytest.raises(SplitserveError) as failed:
        await rig.bring()
    assert failed.value.reason == "TICKET_EXPIRED"
    await rig.over()


async def test_a_client_that_leaves_while_the_holder_s_reason_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_fetch, "HOLDER_PATIENCE_S", 60.0)
    rig = Rig()
    rig.says(FAILED)
    task = asyncio.create_task(rig.bring())
    await settled(lambda: rig.taker.collector is not None and rig.taker.collector.ended)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rig.over()


async def test_a_taker_that_refuses() -> None:
    rig = Rig()
    rig.taker.refusal = ResourceExhaustedError("full", reason="QUEUE_FULL")
    with pytest.raises(ResourceExhaustedError):
        await rig.bring()
    assert rig.holder.pushed == []
    await rig.over(True)


async def test_a_fetch_that_takes_as_long_as_computing_is_given_up() -> None:
    rig = Rig()
    rig.says(ADMITTED)
    with pytest.raises(DeadlineExceededError) as late:
        await rig.bring(limit_s=0.05)
    assert late.value.reason == "FETCH_TOO_SLOW"
    await rig.over(False)


async def test_a_client_that_leaves_during_a_fetch() -> None:
    rig = Rig()
    task = asyncio.create_task(rig.bring())
    await settled(lambda: bool(rig.holder.pushed))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rig.over(False)
