"""The account of work under way: one load per boot and kind, for all readers."""

from __future__ import annotations

import dataclasses

from coordinator.workers.load import Flight, WorkerLoads
from coordinator.workers.snapshot import PoolSnapshot
from tests.support.clients.admission_parts import MODEL, admission, entry, load, sent, worker

PREFILL, DECODE = worker("p0", "prefill"), worker("d0", "decode")


def test_what_was_sent_counts_for_routing_until_the_next_report() -> None:
    loads = WorkerLoads.of([PREFILL, DECODE])
    worker_load = loads.decode[DECODE.key]
    before = worker_load.batch_requests, worker_load.free_blocks
    loads.count_stream(DECODE.key, 17)
    assert (worker_load.batch_requests, worker_load.free_blocks) == (before[0] + 1, before[1] - 2)
    loads.on_report(DECODE.key, load(running_requests=1, free_blocks=4000))
    assert (worker_load.batch_requests, worker_load.free_blocks) == (1, 4000)


def test_no_reported_block_is_free_for_newcomers_while_reservations_wait() -> None:
    loads = WorkerLoads.of([DECODE])
    account = loads.decode[DECODE.key]
    loads.on_report(DECODE.key, load(waiting_reservations=1, free_blocks=8))
    assert account.free_blocks == 0
    loads.count_stream(DECODE.key, 17)
    assert account.free_blocks == -2
    loads.on_report(DECODE.key, load(free_blocks=8))
    assert account.free_blocks == 8


def flight(tokens: int = 100) -> Flight:
    return Flight(prompt_tokens=tokens, uncached_tokens=tokens, expected_output=9, max_output=9)


def test_a_prompt_that_waits_for_decode_counts_at_its_prefill_worker_whatever_is_reported() -> None:
    loads = WorkerLoads.of([PREFILL, DECODE])
    worker_load = loads.prefill[PREFILL.key]
    first, second, unknown = (flight() for _ in range(3))
    for one in (first, second):
        loads.route(one, PREFILL.key, DECODE.key, 100)
    loads.route(unknown, ("gone", 1), DECODE.key, 5)
    assert unknown.awaited_by is None
    loads.on_report(PREFILL.key, load())
    assert worker_load.queued_tokens == 200
    loads.prompt_begun(first, PREFILL.key, 100)
    loads.attempt_ended(second)
    for _ in range(2):  # idempotent
        loads.attempt_ended(first)
        loads.prompt_begun(second, PREFILL.key, 100)
    assert (worker_load.queued_tokens, worker_load.sent_requests) == (100, 1)
    loads.on_report(PREFILL.key, load(waiting_tokens=100))
    assert worker_load.queued_tokens == 100


def test_a_prompt_that_decode_computes_is_its_work_until_the_first_token() -> None:
    loads = WorkerLoads.of([PREFILL, DECODE])
    prefill, decode, one = loads.prefill[PREFILL.key], loads.decode[DECODE.key], flight()
    loads.reserve(one, PREFILL.key, DECODE.key)
    loads.route(one, PREFILL.key, DECODE.key, 100, local_tokens=60)
    assert (prefill.queued_tokens, prefill.requests, decode.waiting_prompt_tokens) == (0, 0, 60)
    loads.prompt_begun(one, None, 100)
    assert decode.waiting_prompt_tokens == 60
    assert loads.output(one, 1)
    assert (decode.waiting_prompt_tokens, decode.computed) == (0, 1)
    assert not loads.output(one, 1)
    loads.ended(one)
    loads.ended(one)  # idempotent
    assert (decode.requests, decode.context_tokens, prefill.prompt_tokens) == (0, 0, 0)


def test_a_prompt_that_decode_lacks_more_of_goes_to_the_prefill_worker_after_all() -> None:
    loads = WorkerLoads.of([PREFILL, DECODE])
    prefill, decode, one = loads.prefill[PREFILL.key], loads.decode[DECODE.key], flight()
    loads.route(one, PREFILL.key, DECODE.key, 100, local_tokens=10)
    loads.prompt_begun(one, PREFILL.key, 100)
    assert (decode.waiting_prompt_tokens, prefill.queued_tokens, prefill.requests) == (0, 100, 1)


def test_one_that_was_thought_to_be_computed_by_prefill_leaves_it_where_decode_computes_it() -> None:
    loads = WorkerLoads.of([PREFILL, DECODE])
    prefill, one = loads.prefill[PREFILL.key], flight()
    loads.route(one, PREFILL.key, DECODE.key, 100)
    assert (prefill.queued_tokens, prefill.requests) == (100, 1)
    loads.prompt_begun(one, None, 100)
    assert (prefill.queued_tokens, prefill.requests) == (0, 0)


def test_a_prompt_of_a_worker_that_keeps_the_request_is_its_work_until_the_first_token() -> None:
    both = dataclasses.replace(worker("b", "prefill"), role="both")
    loads = WorkerLoads.of([both])
    load_there, one = loads.prefill[both.key], flight()
    loads.reserve(one, both.key, both.key)
    loads.route(one, both.key, both.key, 100)
    loads.prompt_begun(one, None, 100)
    assert (load_there.requests, load_there.queued_tokens) == (1, 100)
    loads.output(one, 1)
    assert (load_there.requests, loads.decode[both.key].computed) == (0, 1)


def test_a_further_attempt_is_work_of_its_own_workers() -> None:
    other = worker("p1", "prefill")
    loads = WorkerLoads.of([PREFILL, other, DECODE])
    one = flight()
    loads.reserve(one, PREFILL.key, DECODE.key)
    loads.route(one, PREFILL.key, DECODE.key, 100)
    assert loads.prefill[PREFILL.key].requests == loads.decode[DECODE.key].requests == 1
    loads.output(one, 3)
    loads.attempt_ended(one)
    loads.route(one, other.key, DECODE.key, 103)
    assert (loads.prefill[PREFILL.key].requests, loads.prefill[other.key].requests) == (0, 1)
    assert (loads.decode[DECODE.key].context_tokens, loads.decode[DECODE.key].computed) == (103, 0)
    loads.remove(other.key)
    loads.ended(one)
    assert loads.decode[DECODE.key].requests == 0


def test_changes_are_logged_in_order() -> None:
    loads = WorkerLoads()
    loads.take_role(PREFILL)
    loads.count_prompt(PREFILL.key, 5)
    loads.count_prompt(("gone", 1), 5)
    loads.on_report(PREFILL.key, PREFILL.load)
    loads.remove(PREFILL.key)
    assert loads.changes == [PREFILL.key] * 3
    assert (loads.prefill, loads.decode) == ({}, {})


def test_a_worker_that_takes_no_requests_for_a_while_keeps_what_is_in_flight() -> None:
    loads = WorkerLoads.of([PREFILL, DECODE])
    model = admission((PREFILL, DECODE), loads)
    one = entry()
    assert model.arrive(one, 0.0).started
    model.set_workers(PoolSnapshot((dataclasses.replace(PREFILL, in_rotation=False), DECODE)), MODEL.name)
    assert not model.prefill.workers
    model.set_workers(PoolSnapshot((PREFILL, DECODE)), MODEL.name)
    assert model.prefill.workers[PREFILL.key].requests == 1
    sent(model, one, 1)
    assert model.prefill.workers[PREFILL.key].requests == 0


def test_others_are_known_before_the_first_request() -> None:
    """Reports count from a worker's registration, not from the first request of its model."""
    busy = worker("d0", "decode", slots=8, running_requests=8, referenced_blocks=100)
    loads = WorkerLoads.of([PREFILL, busy])
    loads.on_report(busy.key, busy.load)
    model = admission((PREFILL, busy), loads)
    assert not model.arrive(entry(), 0.0).started
    assert model.held_by == "decode"
