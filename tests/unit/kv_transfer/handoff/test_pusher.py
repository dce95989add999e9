"""`KvPusher` over a transport that completes writes in any order, late or with errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.handoff.checksums import KvMemory, digests_of, verified_positions
from kv_transfer.handoff.messages import WRITE_GRACE_S, Drained, KvTicket, WriteCompletion, decode
from kv_transfer.handoff.pusher import (
    MAX_OWNERS,
    REMEMBER_S,
    KvPusher,
    PushDone,
    PushDrained,
    PushEvent,
    PushFailed,
    SpentTickets,
)
from kv_transfer.transports.regions import KvMemoryRegion
from kv_transfer.transports.transport import TransferEndpoint
from splitserve.errors import FailedPreconditionError, InvalidArgumentError
from tests.support.transfer.numpy_pool import LAYOUT, NumpyPool
from tests.support.transfer.scripted_transport import ScriptedTransport

SIZE = LAYOUT.block_size_tokens
ENDPOINT = TransferEndpoint("decode", "scripted", b"", KvMemoryRegion(4096, 256, LAYOUT))
KV = KvMemory(KvMemoryRegion(4096, 256, LAYOUT), lambda _: [])
"""For tickets that ask for no checksums."""
DEADLINE_S = 100.0
TABLE = list(range(40, 60))
"""Local blocks; the block that pairs with a ticket's is 40 + its position in the sequence."""


def a_ticket(blocks: int = 4, cached: int = 0, first: int = 100) -> KvTicket:
    indices = tuple(range(first, first + blocks))
    return KvTicket("decode", 9, 5, indices, cached * SIZE, blocks * LAYOUT.block_bytes, DEADLINE_S)


def a_pusher(ticket: KvTicket) -> tuple[KvPusher, ScriptedTransport]:
    transport = ScriptedTransport("decode")
    pusher = KvPusher(transport, KV)
    pusher.start("r", ticket, ENDPOINT, now=0.0)
    return pusher, transport


def completions(transport: ScriptedTransport) -> list[WriteCompletion]:
    return [m for _, data in transport.sent if isinstance(m := decode(data), WriteCompletion)]


def drained(transport: ScriptedTransport) -> list[Drained]:
    return [m for _, data in transport.sent if isinstance(m := decode(data), Drained)]


def test_one_chunk_is_one_write_with_the_completion() -> None:
    pusher, transport = a_pusher(a_ticket())
    pusher.on_progress("r", 4 * SIZE - 3, TABLE[:4], True, 17, now=1.0)
    assert pusher.poll(1.5, transport.poll().writes) == []
    assert pusher.in_flight == 1
    transport.end_all()
    assert pusher.poll(3.0, transport.poll().writes) == [PushDone("r", 4 * LAYOUT.block_bytes, 1, 1, 2.0)]
    assert completions(transport) == [WriteCompletion(9, 5, 4 * LAYOUT.block_bytes, 17)]
    assert (pusher.active, pusher.in_flight) == (0, 0)
    assert drained(transport) == []


def test_only_full_blocks_go_early_and_the_completion_waits_for_all() -> None:
    pusher, transport = a_pusher(a_ticket())
    pusher.on_progress("r", 2 * SIZE + 5, TABLE[:3], False, None, now=1.0)
    assert transport.writes[1].local == (40, 41)
    pusher.on_progress("r", 3 * SIZE + 1, TABLE[:4], True, 17, now=2.0)
    pusher.poll(2.5, transport.poll().writes)
    assert len(transport.writes) == 1
    transport.end(1)
    assert pusher.poll(3.0, transport.poll().writes) == []
    assert transport.writes[2].local == (42, 43)
    assert transport.writes[2].notification is not None
    transport.end(2)
    assert pusher.poll(4.0, transport.poll().writes) == [PushDone("r", 4 * LAYOUT.block_bytes, 2, 1, 2.0)]


def test_cached_blocks_are_not_sent() -> None:
    pusher, transport = a_pusher(a_ticket(blocks=2, cached=3))
    pusher.on_progress("r", 3 * SIZE, TABLE[:3], False, None, now=1.0)
    assert transport.writes == {}
    pusher.on_progress("r", 4 * SIZE + 1, TABLE[:5], True, 1, now=1.0)
    assert (transport.writes[1].local, transport.writes[1].remote) == ((43, 44), (100, 101))


def test_groups_of_layers_are_sent_whole_and_each_gives_its_last_blocks() -> None:
    ticket = replace(a_ticket(blocks=5), group_blocks=(3, 2))
    pusher, transport = a_pusher(ticket)
    held = [40, 41, 42, 43, 50, 51]
    pusher.on_progress("r", 2 * SIZE, held, False, None, now=1.0, group_blocks=(4, 2))
    assert transport.writes == {}
    pusher.on_progress("r", 4 * SIZE, held, True, 17, now=1.0, group_blocks=(4, 2))
    assert transport.writes[1].local == (41, 42, 43, 50, 51)
    assert transport.writes[1].remote == ticket.block_indices
    transport.end_all()
    assert [type(event) for event in pusher.poll(2.0, transport.poll().writes)] == [PushDone]
    assert completions(transport) == [WriteCompletion(9, 5, 5 * LAYOUT.block_bytes, 17)]


@pytest.mark.parametrize("held", [(3,), (2, 2), (3, 1), (3, 2, 1)])
def test_a_ticket_for_other_groups_is_refused(held: tuple[int, ...]) -> None:
    pusher, transport = a_pusher(replace(a_ticket(blocks=5), group_blocks=(3, 2)))
    pusher.on_progress("r", 4 * SIZE, TABLE[: sum(held)], True, 17, now=1.0, group_blocks=held)
    (event,) = pusher.poll(1.0, transport.poll().writes)
    assert isinstance(event, PushFailed)
    assert event.reason == "TICKET_MISMATCH"
    assert (transport.writes, drained(transport)) == ({}, [Drained(9, 5)])


def test_nothing_to_write_is_a_bare_completion() -> None:
    pusher, transport = a_pusher(a_ticket(blocks=0, cached=2))
    pusher.on_progress("r", 2 * SIZE, TABLE[:2], True, 8, now=1.0)
    assert pusher.poll(1.0, transport.poll().writes) == [PushDone("r", 0, 0, 0, 0.0)]
    assert completions(transport) == [WriteCompletion(9, 5, 0, 8)]


def test_progress_that_ends_on_written_blocks() -> None:
    pusher, transport = a_pusher(a_ticket(blocks=2))
    pusher.on_progress("r", 2 * SIZE, TABLE[:2], False, None, now=1.0)
    pusher.on_progress("r", 2 * SIZE, TABLE[:2], True, 8, now=1.0)
    assert completions(transport) == []
    transport.end_all()
    assert [type(e) for e in pusher.poll(2.0, transport.poll().writes)] == [PushDone]
    assert completions(transport) == [WriteCompletion(9, 5, 2 * LAYOUT.block_bytes, 8)]


@pytest.mark.parametrize("blocks", [3, 5])
def test_a_ticket_of_another_length_is_refused(blocks: int) -> None:
    pusher, transport = a_pusher(a_ticket(blocks=blocks))
    pusher.on_progress("r", 4 * SIZE, TABLE[:4], True, 17, now=1.0)
    events = pusher.poll(1.0, transport.poll().writes)
    assert isinstance(events[0], PushFailed)
    assert events[0].reason == "TICKET_MISMATCH"
    assert drained(transport) == [Drained(9, 5)]
    assert completions(transport) == []


def test_abort_lets_writes_end_then_says_drained() -> None:
    pusher, transport = a_pusher(a_ticket())
    pusher.on_progress("r", SIZE, TABLE[:1], False, None, now=1.0)
    pusher.abort("r")
    pusher.on_progress("r", 4 * SIZE, TABLE[:4], True, 17, now=2.0)
    assert pusher.poll(2.0, transport.poll().writes) == []
    assert len(transport.writes) == 1
    assert transport.sent == []
    transport.end_all()
    assert pusher.poll(3.0, transport.poll().writes) == [PushDrained("r")]
    assert drained(transport) == [Drained(9, 5)]
    pusher.abort("r")
    assert pusher.poll(4.0, transport.poll().writes) == []


def test_abort_after_the_completion_left_is_done() -> None:
    pusher, transport = a_pusher(a_ticket())
    pusher.on_progress("r", 4 * SIZE, TABLE[:4], True, 17, now=1.0)
    pusher.abort("r")
    transport.end_all()
    assert [type(e) for e in pusher.poll(2.0, transport.poll().writes)] == [PushDone]


def test_a_failed_write_waits_for_the_others() -> None:
    pusher, transport = a_pusher(a_ticket())
    pusher.on_progress("r", SIZE, TABLE[:1], False, None, now=1.0)
    pusher.on_progress("r", 2 * SIZE, TABLE[:2], False, None, now=1.0)
    transport.end(2, "lane broke")
    assert pusher.poll(2.0, transport.poll().writes) == []
    pusher.on_progress("r", 3 * SIZE, TABLE[:3], False, None, now=2.0)
    assert len(transport.writes) == 2
    transport.end(1)
    (event,) = pusher.poll(3.0, transport.poll().writes)
    assert isinstance(event, PushFailed)
    assert "lane broke" in event.message
    assert drained(transport) == [Drained(9, 5)]


def test_nothing_is_said_of_a_write_in_doubt() -> None:
    pusher, transport = a_pusher(a_ticket())
    pusher.on_progress("r", SIZE, TABLE[:1], False, None, now=1.0)
    pusher.on_progress("r", 2 * SIZE, TABLE[:2], False, None, now=1.0)
    transport.end(1, "the second of three descriptors was refused", in_doubt=True)
    assert pusher.poll(2.0, transport.poll().writes) == []
    transport.end(2)
    assert [type(e) for e in pusher.poll(3.0, transport.poll().writes)] == [PushFailed]
    assert transport.sent == []
    assert transport.connected() == frozenset(), "the connection is closed, which ends what is in flight"


def test_nothing_is_said_of_an_aborted_push_in_doubt() -> None:
    pusher, transport = a_pusher(a_ticket())
    pusher.on_progress("r", SIZE, TABLE[:1], False, None, now=1.0)
    pusher.abort("r")
    transport.end(1, "lane broke", in_doubt=True)
    assert pusher.poll(2.0, transport.poll().writes) == [PushDrained("r")]
    assert transport.sent == []


def test_a_connection_that_came_back_proves_nothing_of_writes_before() -> None:
    pusher, transport = a_pusher(a_ticket())
    pusher.on_progress("r", SIZE, TABLE[:1], False, None, now=1.0)
    pusher.peer_lost("decode")
    transport.connect(ENDPOINT)
    assert [type(e) for e in pusher.poll(2.0, transport.poll().writes)] == [PushFailed]
    assert transport.sent == []


def test_a_peer_with_a_write_in_doubt_is_kept_while_others_need_it() -> None:
    pusher, transport = a_pusher(a_ticket())
    other = replace(a_ticket(first=110), reservation=6)
    pusher.start("s", other, ENDPOINT, now=0.0)
    pusher.on_progress("r", SIZE, TABLE[:1], False, None, now=1.0)
    transport.end(1, "lane broke", in_doubt=True)
    assert [type(e) for e in pusher.poll(2.0, transport.poll().writes)] == [PushFailed]
    pusher.on_progress("s", 4 * SIZE, TABLE[:4], True, 3, now=3.0)
    transport.end_all()
    assert [type(e) for e in pusher.poll(4.0, transport.poll().writes)] == [PushDone]
    assert completions(transport) == [WriteCompletion(9, 6, other.total_bytes, 3)]
    assert transport.connected() == frozenset()


def test_a_write_in_doubt_is_cut_off_after_the_grace_whoever_needs_the_peer() -> None:
    pusher, transport = a_pusher(a_ticket())
    pusher.start("s", replace(a_ticket(), reservation=6, deadline_s=10 * DEADLINE_S), ENDPOINT, now=0.0)
    pusher.on_progress("r", SIZE, TABLE[:1], False, None, now=1.0)
    transport.end(1, "lane broke", in_doubt=True)
    pusher.poll(2.0, transport.poll().writes)
    pusher.poll(DEADLINE_S + WRITE_GRACE_S - 0.1, transport.poll().writes)
    assert transport.connected() == {"decode"}
    pusher.poll(DEADLINE_S + WRITE_GRACE_S, transport.poll().writes)
    assert transport.connected() == frozenset()
    assert transport.refused == set()


def test_a_refused_post_fails_the_push() -> None:
    pusher, transport = a_pusher(a_ticket())
    transport.refuse_writes = "no lane"
    pusher.on_progress("r", 4 * SIZE, TABLE[:4], True, 17, now=1.0)
    assert pusher.poll(1.0, transport.poll().writes) == [PushFailed("r", "TRANSFER_FAILED", "no lane")]
    assert drained(transport) == [Drained(9, 5)]


def test_nothing_is_posted_from_the_deadline_on() -> None:
    pusher, transport = a_pusher(a_ticket())
    pusher.on_progress("r", SIZE, TABLE[:1], False, None, now=DEADLINE_S - 0.001)
    pusher.on_progress("r", 2 * SIZE, TABLE[:2], False, None, now=DEADLINE_S)
    assert len(transport.writes) == 1
    transport.end_all()
    (event,) = pusher.poll(DEADLINE_S, transport.poll().writes)
    assert isinstance(event, PushFailed)
    assert event.reason == "TICKET_EXPIRED"
    assert drained(transport) == [Drained(9, 5)]


def test_a_held_completion_is_not_posted_late() -> None:
    pusher, transport = a_pusher(a_ticket())
    pusher.on_progress("r", SIZE, TABLE[:1], False, None, now=1.0)
    pusher.on_progress("r", 4 * SIZE, TABLE[:4], True, 17, now=2.0)
    transport.end_all()
    assert [type(e) for e in pusher.poll(DEADLINE_S, transport.poll().writes)] == [PushFailed]
    assert completions(transport) == []


def test_a_stuck_write_is_cut_off_after_the_grace() -> None:
    pusher, transport = a_pusher(a_ticket())
    pusher.on_progress("r", SIZE, TABLE[:1], False, None, now=1.0)
    assert pusher.poll(DEADLINE_S + WRITE_GRACE_S - 0.1, transport.poll().writes) == []
    assert "decode" in transport.connected()
    pusher.poll(DEADLINE_S + WRITE_GRACE_S, transport.poll().writes)
    assert "decode" not in transport.connected()
    assert transport.refused == set(), "what the peer itself writes goes on"
    assert [type(e) for e in pusher.poll(DEADLINE_S + WRITE_GRACE_S, transport.poll().writes)] == [PushFailed]
    assert transport.sent == []


def test_peer_lost() -> None:
    pusher, transport = a_pusher(a_ticket())
    pusher.on_progress("r", SIZE, TABLE[:1], False, None, now=1.0)
    pusher.peer_lost("decode")
    (event,) = pusher.poll(1.0, transport.poll().writes)
    assert isinstance(event, PushFailed)
    assert event.reason == "PEER_LOST"
    assert transport.sent == []
    assert transport.refused == {"decode"}


def test_start_refuses_what_does_not_fit() -> None:
    pusher, transport = a_pusher(a_ticket())
    with pytest.raises(InvalidArgumentError):
        pusher.start("r", a_ticket(), ENDPOINT, 0.0)
    with pytest.raises(InvalidArgumentError):
        pusher.start("s", a_ticket(first=254), ENDPOINT, 0.0)
    transport.disconnect("decode")
    with pytest.raises(FailedPreconditionError):
        pusher.start("t", a_ticket(), ENDPOINT, 0.0)
    assert pusher.active == 1


@given(st.data())
def test_any_chunking_and_any_order_of_ends(data: st.DataObject) -> None:
    """Each block is written exactly once, to its place; the completion comes after all other writes are done."""
    tokens = data.draw(st.integers(1, 12 * SIZE))
    blocks = -(-tokens // SIZE)
    cached = data.draw(st.integers(0, tokens // SIZE))
    pusher, transport = a_pusher(a_ticket(blocks=blocks - cached, cached=cached))
    end, events = 0, list[PushEvent]()
    while end < tokens:
        end = min(tokens, end + data.draw(st.integers(1, 5 * SIZE)))
        pusher.on_progress("r", end, TABLE[: -(-end // SIZE)], end == tokens, 3, now=1.0)
        if data.draw(st.booleans()) and transport.open:
            transport.end(data.draw(st.sampled_from(sorted(transport.open))))
            events += pusher.poll(1.0, transport.poll().writes)
    events += pusher.poll(1.0, transport.poll().writes)
    while transport.open:
        handle = data.draw(st.sampled_from(sorted(transport.open)))
        if transport.writes[handle].notification is not None:
            assert transport.open == {handle}
        transport.end(handle)
        events += pusher.poll(1.0, transport.poll().writes)
    assert [type(e) for e in events] == [PushDone]
    pairs = [p for w in transport.writes.values() for p in zip(w.local, w.remote, strict=True)]
    assert pairs == [(40 + i, 100 + i - cached) for i in range(cached, blocks)]
    assert completions(transport) == [WriteCompletion(9, 5, (blocks - cached) * LAYOUT.block_bytes, 3)]


@pytest.mark.parametrize("one_in", [0, 1, 2])
def test_a_completion_carries_the_checksums_that_its_ticket_asks_for(one_in: int) -> None:
    pool = NumpyPool(64)
    pool.stamp(1)
    read: list[int] = []

    def reader(blocks: Sequence[int]) -> list[memoryview]:
        read.extend(blocks)
        return [memoryview(pool.data[block]) for block in blocks]

    transport = ScriptedTransport("decode")
    pusher = KvPusher(transport, KvMemory(pool.memory, reader))
    ticket = replace(a_ticket(), verify_one_in=one_in)
    pusher.start("r", ticket, ENDPOINT, now=0.0)
    chosen = [TABLE[p] for p in verified_positions(ticket.epoch, ticket.reservation, 4, one_in)]
    pusher.on_progress("r", 2 * SIZE, TABLE[:2], False, None, now=1.0)
    assert read == [block for block in chosen if block in TABLE[:2]], "each chunk's blocks when it is final"
    pusher.on_progress("r", 4 * SIZE, TABLE[:4], True, 17, now=2.0)
    assert read == chosen
    transport.end_all()
    pusher.poll(3.0, transport.poll().writes)
    transport.end_all()
    (done,) = completions(transport)
    assert done.checksums == tuple(digests_of(memoryview(pool.data[block]) for block in chosen))


def test_a_declined_ticket_is_drained_once_and_never_used() -> None:
    transport = ScriptedTransport("decode")
    pusher = KvPusher(transport, KV)
    pusher.decline(a_ticket(), 0.0)
    pusher.decline(a_ticket(), 0.0)
    assert drained(transport) == [Drained(9, 5)]
    with pytest.raises(FailedPreconditionError, match="used before"):
        pusher.start("r", a_ticket(), ENDPOINT, 1.0)


def test_a_ticket_in_use_is_not_declined() -> None:
    pusher, transport = a_pusher(a_ticket())
    pusher.decline(a_ticket(), 0.0)
    assert drained(transport) == []


def test_a_ticket_is_used_once() -> None:
    spent = SpentTickets()
    assert spent.spend("d", 5, 10.0, 0.0)
    assert not spent.spend("d", 5, 10.0, 1.0)
    assert spent.spend("d", 4, 10.0, 1.0)
    assert spent.spend("other", 5, 10.0, 1.0)


def test_what_is_forgotten_leaves_a_floor() -> None:
    spent = SpentTickets()
    assert spent.spend("d", 5, 10.0, 0.0)
    later = 10.0 + REMEMBER_S
    assert not spent.spend("d", 5, later + 9, later)
    assert not spent.spend("d", 4, later + 9, later)
    assert spent.spend("d", 6, later + 9, later)


def test_memory_is_bounded() -> None:
    spent = SpentTickets()
    for number in range(MAX_OWNERS + 10):
        assert spent.spend(f"d{number}", 1, 0.0, 2 * REMEMBER_S * number)
    assert len(spent._floors) <= MAX_OWNERS
    assert len(spent._spent) == len(spent._ends) == 1
