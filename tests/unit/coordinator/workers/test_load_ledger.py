"""The ledger of loads: one account per boot, for all readers."""

from __future__ import annotations

import dataclasses

from coordinator.workers.load_ledger import LoadLedger
from coordinator.workers.snapshot import PoolName, PoolSnapshot
from tests.support.clients.admission_parts import MODEL, admission, entry, load, worker

PREFILL, DECODE = worker("p0", "prefill"), worker("d0", "decode")


def test_what_was_sent_counts_for_routing_until_the_next_report() -> None:
    loads = LoadLedger.of([PREFILL, DECODE])
    worker_load = loads.decode[DECODE.key]
    before = worker_load.batch_requests, worker_load.free_blocks
    loads.count_stream(DECODE.key, 17)
    assert (worker_load.batch_requests, worker_load.free_blocks) == (before[0] + 1, before[1] - 2)
    loads.on_report(DECODE.key, load(running_requests=1, free_blocks=4000))
    assert (worker_load.batch_requests, worker_load.free_blocks) == (1, 4000)


def test_no_reported_block_is_free_for_newcomers_while_reservations_wait() -> None:
    loads = LoadLedger.of([DECODE])
    account = loads.decode[DECODE.key]
    loads.on_report(DECODE.key, load(waiting_reservations=1, free_blocks=8))
    assert account.free_blocks == 0
    loads.count_stream(DECODE.key, 17)
    assert account.free_blocks == -2
    loads.on_report(DECODE.key, load(free_blocks=8))
    assert account.free_blocks == 8


def test_a_prompt_that_waits_for_decode_counts_at_its_prefill_worker_whatever_is_reported() -> None:
    loads = LoadLedger.of([PREFILL, DECODE])
    worker_load = loads.prefill[PREFILL.key]
    first, second = (loads.expect(PREFILL.key, 100) for _ in range(2))
    assert first is not None
    assert second is not None
    assert loads.expect(("gone", 1), 5) is None
    loads.on_report(PREFILL.key, load())
    assert worker_load.queued_tokens == 200
    first.begin()
    second.withdraw()
    for _ in range(2):  # idempotent
        first.withdraw()
        second.begin()
    assert (worker_load.queued_tokens, worker_load.sent_requests) == (100, 1)
    loads.on_report(PREFILL.key, load(waiting_tokens=100))
    assert worker_load.queued_tokens == 100


def test_changes_are_logged_in_order() -> None:
    loads = LoadLedger()
    loads.add(PREFILL)
    loads.count_prompt(PREFILL.key, 5)
    loads.count_prompt(("gone", 1), 5)
    loads.on_report(PREFILL.key, PREFILL.load)
    loads.remove(PREFILL.key)
    assert loads.changes == [PREFILL.key] * 3
    assert (loads.prefill, loads.decode) == ({}, {})


def test_a_worker_that_takes_no_requests_for_a_while_keeps_what_is_in_flight() -> None:
    loads = LoadLedger.of([PREFILL, DECODE])
    model = admission((PREFILL, DECODE), loads)
    one = entry()
    assert model.arrive(one, 0.0).started
    model.set_workers(PoolSnapshot((dataclasses.replace(PREFILL, in_rotation=False), DECODE)), MODEL.name)
    assert not model.prefill.workers
    model.set_workers(PoolSnapshot((PREFILL, DECODE)), MODEL.name)
    assert model.prefill.workers[PREFILL.key].requests == 1
    model.sent(one, 1, 0.1)
    assert model.prefill.workers[PREFILL.key].requests == 0


def test_others_are_known_before_the_first_request() -> None:
    """Reports count from a worker's registration, not from the first request of its model."""
    busy = worker("d0", "decode", slots=8, running_requests=8, referenced_blocks=100)
    loads = LoadLedger.of([PREFILL, busy])
    loads.on_report(busy.key, busy.load)
    model = admission((PREFILL, busy), loads)
    assert not model.arrive(entry(), 0.0).started
    assert model.held_by == "decode"


def test_a_host_pair_of_neutral_workers_follows_their_leanings() -> None:
    left, right = (
        dataclasses.replace(worker(name, "prefill"), host_id="h", neutral=True) for name in ("n0", "n1")
    )
    loads = LoadLedger.of([left, right])
    assert {load.host_peer for load in (*loads.prefill.values(), *loads.decode.values())} == {None}
    for leaning in ("decode", "prefill"):
        loads.lean(right.key, leaning)
        is_pair = leaning == "decode"
        assert (loads.decode[right.key].host_peer is loads.prefill[left.key]) == is_pair
        assert (loads.prefill[left.key].host_peer is loads.decode[right.key]) == is_pair
        assert loads.decode[left.key].host_peer is None
        assert loads.prefill[right.key].host_peer is None
    loads.lean(("unknown", 1), "decode")


def test_a_host_pair_is_two_workers_alone_on_a_host() -> None:
    names: tuple[tuple[str, PoolName], ...] = (("p0", "prefill"), ("d0", "decode"), ("d1", "decode"))
    prefill, decode, third = (dataclasses.replace(worker(name, pool), host_id="h") for name, pool in names)
    loads = LoadLedger.of([prefill, decode])
    assert loads.decode[decode.key].host_peer is loads.prefill[prefill.key]
    assert loads.prefill[prefill.key].host_peer is loads.decode[decode.key]
    loads.add(third)
    assert {load.host_peer for load in loads.decode.values()} == {None}
    assert loads.prefill[prefill.key].host_peer is None
    loads.remove(decode.key)
    assert loads.decode[third.key].host_peer is loads.prefill[prefill.key]
    again = dataclasses.replace(prefill, epoch=2)
    loads.remove(prefill.key)
    assert loads.decode[third.key].host_peer is None
    loads.add(again)
    assert loads.decode[third.key].host_peer is loads.prefill[again.key]
    for each in (third, again, third):
        loads.remove(each.key)
