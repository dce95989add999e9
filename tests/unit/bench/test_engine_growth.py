"""The cost of a step, a request and a report does not grow with the queue, the pool or the context.

Counted is work, not time: bytecodes executed, which are the same on any machine. What runs inside one call of a
built-in (a copy, a search through a list) does not show in them, so time is looked at as well, with a wide bound.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from bench.engine.growth import BASE, MeasuredEngine, prompt_of, running
from decode_worker.requests import ReservationQueue, WaitingReservation
from engine.core.engine import EngineRequest, StopParams
from engine.core.model_runner import SamplingParams
from engine.core.scheduler import KVCacheManager, Scheduler
from engine.core.sequence import Sequence
from engine.kv_cache.block_pool import BlockPool, KvEventLog
from kv_transfer.handoff.checksums import KvMemory
from kv_transfer.handoff.messages import KvTicket
from kv_transfer.handoff.pusher import KvPusher
from kv_transfer.transports.regions import KvMemoryRegion
from kv_transfer.transports.transport import TransferEndpoint
from tests.support.transfer.numpy_pool import LAYOUT
from tests.support.transfer.scripted_transport import ScriptedTransport

FEW, MANY = 100, 10_000
MEMORY = KvMemoryRegion(4096, 256, LAYOUT)
SMALL = replace(BASE, batch=4, context=64, pool=1000)
MUCH_SLOWER = 3.0
"""Tolerated slowdown at a hundred times the size, on a machine with other load."""


def bytecodes(work: Callable[[], object]) -> int:
    """Number of bytecodes a call executes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def least_s(work: Callable[[], object]) -> float:
    """CPU time of the fastest of a few calls."""
    times = []
    for _ in range(15):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return min(times)


def assert_alike(few: Callable[[], object], many: Callable[[], object], slack: float = 1.1) -> None:
    """Asserts that the second costs no more than the first."""
    counted_few, counted_many = bytecodes(few), bytecodes(many)
    assert counted_few > 0
    assert counted_many <= slack * counted_few + 200, f"{counted_few} bytecodes became {counted_many}"
    assert least_s(many) <= MUCH_SLOWER * least_s(few) + 20e-6


@pytest.fixture(scope="module")
def queues() -> tuple[MeasuredEngine, MeasuredEngine]:
    return running(replace(SMALL, waiting=FEW)), running(replace(SMALL, waiting=MANY))


def test_a_step_costs_the_same_however_many_wait_for_a_slot(
    queues: tuple[MeasuredEngine, MeasuredEngine],
) -> None:
    few, many = queues
    assert_alike(few.core.step, many.core.step)


def test_a_step_costs_the_same_however_many_wait_for_blocks() -> None:
    short = replace(SMALL, waiting_for="blocks", pool=SMALL.batch * 14)
    few, many = running(replace(short, waiting=FEW)), running(replace(short, waiting=MANY))
    assert_alike(few.core.step, many.core.step)


class AskedPool(BlockPool):
    """Counts queries of the prefix cache."""

    asked = 0

    def lookup(self, block_hash: bytes) -> int | None:
        self.asked += 1
        return super().lookup(block_hash)


def test_long_prompts_that_do_not_fit_are_not_all_looked_up_in_each_step() -> None:
    pool = AskedPool(5000)
    kv = KVCacheManager(pool, 4)
    scheduler = Scheduler(kv, max_step_tokens=10**6, max_running=64, max_bypasses=16)
    sampling, stop = SamplingParams(), StopParams(max_tokens=1000)
    first = Sequence(EngineRequest("first", prompt_of(1, 16_000), sampling, stop), 0)
    scheduler.enqueue(first)
    scheduler.schedule()
    first.num_computed = 15_999
    kv.cache_computed(first)
    misfit = first.request.token_ids + prompt_of(2, 8000)
    queued = [Sequence(EngineRequest(str(n), misfit, sampling, stop), n) for n in range(1, 20)]
    for sequence in queued:
        scheduler.enqueue(sequence)
    pool.asked = 0
    scheduler.schedule()
    assert len(first.block_hashes) == 3999
    # The first in line is looked up in full, which reaches the bound. What follows the first miss is not hashed.
    assert pool.asked == 4000
    assert [len(sequence.block_hashes) for sequence in queued] == [4000] + [0] * 18


def test_a_step_costs_the_same_in_any_pool() -> None:
    small, large = running(SMALL), running(replace(SMALL, pool=1_000_000))
    assert_alike(small.core.step, large.core.step)


def test_a_decode_step_costs_the_same_at_any_context() -> None:
    short, long = running(SMALL), running(replace(SMALL, context=6400, pool=4000))
    assert_alike(short.core.step, long.core.step)


def test_a_step_grows_with_the_batch_and_no_faster() -> None:
    small, large = running(SMALL), running(replace(SMALL, batch=64, pool=4000))
    assert bytecodes(large.core.step) <= 64 / 4 * 1.1 * bytecodes(small.core.step)


def came_and_went(engine: MeasuredEngine) -> None:
    engine.core.abort(engine.add(prompt_of(7, 32)))


@pytest.mark.parametrize(
    "work",
    [
        came_and_went,
        lambda engine: engine.core.load(),
        lambda engine: engine.core.has_work(),
        lambda engine: engine.core.next_deadline(),
        lambda engine: engine.core.abort("unknown"),
    ],
    ids=["add and abort", "load", "has_work", "next_deadline", "abort unknown"],
)
def test_what_happens_between_steps_costs_the_same_however_many_wait(
    work: Callable[[MeasuredEngine], object], queues: tuple[MeasuredEngine, MeasuredEngine]
) -> None:
    few, many = queues
    assert_alike(lambda: work(few), lambda: work(many))


def test_aborting_all_that_wait_costs_the_same_each() -> None:
    def abort_all(engine: MeasuredEngine, waiting: int) -> float:
        names = [engine.add(prompt_of(9, 8)) for _ in range(waiting)]
        return bytecodes(lambda: [engine.core.abort(name) for name in names]) / waiting

    few, many = (abort_all(MeasuredEngine(1000, 1), count) for count in (FEW, MANY // 10))
    assert many <= 1.5 * few


def waiting_queue(entries: int) -> ReservationQueue:
    queue = ReservationQueue(max_waiting=10**6, max_bypasses=4)
    for number in range(entries):
        queue.add(reservation(str(number)))
    return queue


def reservation(name: str) -> WaitingReservation:
    request = EngineRequest(name, (1,), SamplingParams(), StopParams(max_tokens=1), deadline_s=1e9)
    return WaitingReservation(request, "c", "", 0.0, lambda _: None)


def looked_at(queue: ReservationQueue) -> None:
    queue.expire(0.0)
    queue.grant((), 0.0, lambda _: False)
    queue.add(reservation("new"))
    assert queue.remove("new")
    len(queue)


def test_reservations_that_wait_cost_a_step_the_same_however_many() -> None:
    few, many = waiting_queue(FEW), waiting_queue(MANY)
    assert_alike(lambda: looked_at(few), lambda: looked_at(many))


def pusher_of(prompts: int) -> KvPusher:
    """A producer with many handoffs: the first prompt is partly written, the others wait."""
    pusher = KvPusher(ScriptedTransport("decode"), KvMemory(MEMORY, lambda _: []))
    endpoint = TransferEndpoint("decode", "scripted", b"", MEMORY)
    for number in range(prompts):
        ticket = KvTicket("decode", 9, number + 1, (100, 101), 0, 2 * LAYOUT.block_bytes, 1e9)
        pusher.start(str(number), ticket, endpoint, now=0.0)
    pusher.on_progress("0", LAYOUT.block_size_tokens, [7], is_last=False, first_token=None, now=0.0)
    pusher.poll(0.0, [])
    return pusher


def test_handoffs_whose_prompts_wait_cost_a_poll_nothing() -> None:
    few, many = pusher_of(FEW), pusher_of(MANY)
    assert_alike(lambda: few.poll(1.0, []), lambda: many.poll(1.0, []))
    assert many.active == MANY
    # Their time runs out all the same.
    assert len(many.poll(1e9, [])) == MANY - 1


def test_news_of_the_cache_cost_what_is_new() -> None:
    def log_of(changes: int) -> KvEventLog:
        log = KvEventLog()
        for number in range(changes):
            log.stored(number.to_bytes(32, "big"))
        return log

    few, many = log_of(FEW), log_of(MANY * 3)
    assert_alike(lambda: few.since(FEW - 1), lambda: many.since(MANY * 3 - 1))
    assert many.since(MANY * 3 - 1) == ({(MANY * 3 - 1).to_bytes(32, "big")[:8]: True}, MANY * 3)


def test_a_pool_of_a_million_blocks_is_made_of_a_few_bytes_each() -> None:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        pool = BlockPool(1_000_000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 8 * pool.total
    assert bytecodes(lambda: BlockPool(1_000_000)) < 2000


def test_blocks_cost_the_same_in_any_pool() -> None:
    small, large = BlockPool(1000), BlockPool(1_000_000)
    # Holes everywhere: every second block is owned.
    for pool in (small, large):
        owned = pool.allocate(pool.total)
        pool.release(owned[::2])
    # Twice the bits in a number of blocks are twice the lists of free runs to look into.
    assert_alike(lambda: small.release(small.allocate(50)), lambda: large.release(large.allocate(50)), 1.5)


def test_counts_do_not_look_at_blocks() -> None:
    small, large = BlockPool(1000), BlockPool(1_000_000)
    assert_alike(small.counts, large.counts)
