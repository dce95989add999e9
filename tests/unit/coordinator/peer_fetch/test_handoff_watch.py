"""What requests teach about fetches, and what a fetch that failed leaves in the books."""

from __future__ import annotations

import time

import pytest

from coordinator.peer_fetch.fetch_times import IDLE_WAIT_S, FetchTimes
from coordinator.peer_fetch.handoff_watch import HandoffWatch
from coordinator.request.candidates import FetchedPrefix
from coordinator.request.observer import RequestEvents, RequestObserver
from coordinator.routing.first_workers import FirstWorkers
from coordinator.routing.pair_selector import PairSelector, make_router
from coordinator.routing.prompt_book import PromptBook, PromptBookkeeper
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import UnavailableError
from splitserve.v1 import prefill_pb2, registry_pb2
from tests.unit.coordinator.peer_fetch.test_policy import worker
from tests.unit.coordinator.request.test_observer import state, workers

P, D = worker(0), worker(1)
BUSY = registry_pb2.WorkerLoad(running_requests=1, decode_step_ms=4.0)


def begun(times: FetchTimes, decode: Worker) -> RequestEvents:
    events = RequestEvents(state(), [HandoffWatch(times)])
    events.routed(P, decode, 0, 0.0)
    return events


def test_calls_count_without_what_they_waited_for() -> None:
    times = FetchTimes()
    events = begun(times, worker(1, load=BUSY))
    report = events.state.attempt.report
    events.emit(RequestObserver.reserve_ended, 0.5)
    assert times.reserves.of(D.key) is None, "it was given up"
    report.reserve_ms, report.reserve_wait_ms = 105.0, 100.0
    events.emit(RequestObserver.reserve_ended, 0.105)
    assert times.reserves.of(D.key) == pytest.approx(0.005 + IDLE_WAIT_S), (
        "the wait for its step is part of what it reports"
    )
    events.prefilling(time.monotonic() - 1.0)
    events.prefilled(prefill_pb2.FirstToken(queue_ms=300.0, compute_ms=690.0, chunks=1))
    assert times.prefills.of(P.key) == pytest.approx(0.01, abs=0.005)


def test_handoffs_of_one_chunk_say_what_the_lane_takes() -> None:
    times = FetchTimes()
    for chunks, size in ((2, 10**9), (1, 0), (1, 10**9), (1, 2 * 10**9), (1, 4 * 10**9)):
        events = begun(times, D)
        events.state.attempt.report.chunks = chunks
        events.transferred(prefill_pb2.HandoffDone(written_bytes=size, transfer_ms=3e3 * size / 1e9))
    assert times.pace((P.key, D.key), time.monotonic()) == pytest.approx(3.0)


def test_a_fetch_that_failed_is_booked_as_work_where_it_was_to_spare_it() -> None:
    registry = Registry(60.0)
    p, d = workers(registry)
    config = CoordinatorConfig(peer_fetch="on")
    first = FirstWorkers(config.admission, registry, lambda model, count: None)
    selector = PairSelector(config, registry, make_router("prefix"), first)
    book = PromptBook()
    events = RequestEvents(state(), [selector, PromptBookkeeper(book)])
    events.routed(p, d, 2, 0.0)
    load = registry.loads.prefill[p.key]
    assert load.queued_tokens == 1
    events.prefix_fetched(FetchedPrefix("h", d.worker_id, 2, 0.1, 0.2, 0.1, "PREFIX_GONE: elsewhere"))
    assert load.queued_tokens == 1, "of the decode worker"
    events.prefix_fetched(FetchedPrefix("h", p.worker_id, 2, 0.1, 0.2, 0.1, "PREFIX_GONE: a block"))
    assert events.state.attempt.expected_cached_tokens == 0
    assert load.queued_tokens == 3
    assert not events.state.attempt.has_fetched
    events.prefilling(1.0)
    assert (load.expected_tokens, load.sent_tokens) == (0, 3)
    events.attempt_failed(UnavailableError("gone"))
    events.attempt_ended()
    assert load.expected_tokens == 0


def test_the_same_where_the_prompt_was_counted_as_sent() -> None:
    registry = Registry(60.0)
    p, _ = workers(registry)
    config = CoordinatorConfig(peer_fetch="on")
    first = FirstWorkers(config.admission, registry, lambda model, count: None)
    events = RequestEvents(state(), [PairSelector(config, registry, make_router("prefix"), first)])
    events.routed(p, None, 2, 0.0)
    events.prefix_fetched(FetchedPrefix("h", p.worker_id, 2, 0.1, 0.2, 0.1, "PREFIX_GONE: a block"))
    assert registry.loads.prefill[p.key].sent_tokens == 3
