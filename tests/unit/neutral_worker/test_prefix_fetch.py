"""A prefix that one worker has cached goes to another one's cache: a handoff at whose end nothing is decoded."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from decode_worker.reservation_queue import Granted
from engine.core.sequence import Sequence
from engine.core.types import EngineRequest, SamplingParams, StopParams
from kv_transfer.handoff.ticket import WRITE_GRACE_S, KvTicket
from prefill_worker import prefix_pushes
from prefill_worker.live_prefill import engine_id
from prefill_worker.prefill_event import Failed, HandedOff
from splitserve.errors import InvalidArgumentError, ResourceExhaustedError
from tests.support.engine.connector_pair import COORDINATOR
from tests.support.neutral.neutral_rig import NeutralNode, NeutralRig, expected, ticket_of

pytestmark = pytest.mark.timeout(60)
BLOCK = 8
LENGTH = 6 * BLOCK


def prompt(length: int, seed: int) -> list[int]:
    pick = random.Random(seed)
    return [pick.randrange(256) for _ in range(length)]


def warm(rig: NeutralRig, node: NeutralNode, tokens: list[int], name: str = "warm", **fields: Any) -> None:
    """Has the node compute a prompt, and so cache it."""
    (granted,) = node.reserve(name, tokens, local=1000, **fields)
    assert isinstance(granted, Granted)
    rig.run(20)


def cached(node: NeutralNode, tokens: list[int], salt: bytes = b"") -> int:
    asked = EngineRequest("look", (*tokens, 1), SamplingParams(), StopParams(1), cache_salt=salt)
    return node.core.cached_tokens(asked)


def begin(
    taker: NeutralNode, holder: NeutralNode, name: str, prefix: list[int], salt: bytes = b""
) -> KvTicket:
    ticket = ticket_of(taker.reserve(name, prefix, holder.agent_id, prefix_only=True, cache_salt=salt))
    holder.start(name, prefix, ticket, prefix_only=True, cache_salt=salt)
    return ticket


def reason_of(holder: NeutralNode, name: str) -> str:
    (event,) = holder.events[engine_id(name, 1)]
    assert isinstance(event, Failed)
    return event.error.reason


@pytest.mark.parametrize("has", [0, 2 * BLOCK])
def test_a_fetched_prefix_is_cached_and_gives_the_same_answer(has: int) -> None:
    rig = NeutralRig()
    tokens = prompt(LENGTH + 5, 1)
    if has:
        warm(rig, rig.a, [*tokens[:has], 3], "own")
    warm(rig, rig.b, tokens)
    ticket = begin(rig.a, rig.b, "fetch", tokens[:LENGTH])
    assert ticket.cached_tokens == has
    assert len(ticket.block_indices) == (LENGTH - has) // BLOCK
    rig.run(20)
    (event,) = rig.b.events[engine_id("fetch", 1)]
    assert isinstance(event, HandedOff), "no first token comes"
    assert event.written_bytes == ticket.total_bytes
    *_, last = [output for output in rig.a.outputs[COORDINATOR] if output.request_id == "fetch"]
    assert last.delta.finish_reason
    assert not last.HasField("failure")
    assert rig.a.streamed("fetch") == []
    rig.assert_empty()
    assert cached(rig.a, tokens) == LENGTH
    (granted,) = rig.a.reserve("asked", tokens, local=1000)
    assert isinstance(granted, Granted)
    rig.run(20)
    assert rig.a.streamed("asked") == expected(tokens)
    (reported,) = [
        o for o in rig.a.outputs[COORDINATOR] if o.HasField("local_prefill") and o.request_id == "asked"
    ]
    assert reported.local_prefill.cached_tokens == LENGTH
    rig.assert_empty()


def test_a_long_prefix_goes_in_pieces_and_is_cached_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = NeutralRig()
    monkeypatch.setattr(prefix_pushes, "LEAST_PIECE_BYTES", 1)
    monkeypatch.setattr(prefix_pushes, "PIECE_S", 0.0)
    tokens = prompt(LENGTH + 5, 1)
    warm(rig, rig.b, tokens)
    ticket = begin(rig.a, rig.b, "fetch", tokens[:LENGTH])
    posted = rig.b.transport.descriptors_posted
    rig.run(20)
    (event,) = rig.b.events[engine_id("fetch", 1)]
    assert isinstance(event, HandedOff)
    assert event.written_bytes == ticket.total_bytes
    assert rig.b.transport.descriptors_posted - posted == LENGTH // BLOCK, "a block at a time"
    assert cached(rig.a, tokens) == LENGTH
    (granted,) = rig.a.reserve("asked", tokens, local=1000)
    assert isinstance(granted, Granted)
    rig.run(20)
    assert rig.a.streamed("asked") == expected(tokens)
    rig.assert_empty()


def test_nothing_is_written_where_all_is_cached() -> None:
    rig = NeutralRig()
    tokens = prompt(LENGTH, 2)
    for node in (rig.a, rig.b):
        warm(rig, node, [*tokens, 9])
    assert begin(rig.a, rig.b, "fetch", tokens).block_indices == ()
    rig.run(20)
    assert rig.a.failures("fetch") == []
    rig.assert_empty()


def test_a_prefix_that_is_gone_is_refused_and_the_taker_told() -> None:
    rig = NeutralRig()
    tokens = prompt(LENGTH, 3)
    warm(rig, rig.b, [*tokens[: LENGTH - BLOCK], 9])
    begin(rig.a, rig.b, "fetch", tokens)
    rig.run(20)
    assert reason_of(rig.b, "fetch") == "PREFIX_GONE"
    assert rig.a.failures("fetch") == ["TRANSFER_FAILED"]
    assert cached(rig.a, tokens) == 0
    rig.assert_empty()


def test_another_tenant_s_prefix_is_never_found() -> None:
    rig = NeutralRig()
    tokens = prompt(LENGTH, 4)
    warm(rig, rig.b, [*tokens, 9], cache_salt=b"theirs")
    for name, salt in (("other", b"mine"), ("none", b"")):
        begin(rig.a, rig.b, name, tokens, salt)
        rig.run(20)
        assert reason_of(rig.b, name) == "PREFIX_GONE"
    begin(rig.a, rig.b, "same", tokens, b"theirs")
    rig.run(20)
    assert [cached(rig.a, tokens, salt) for salt in (b"theirs", b"mine", b"")] == [LENGTH, 0, 0]
    rig.assert_empty()


def test_blocks_are_pinned_while_they_are_read() -> None:
    """A prompt that needs all other blocks of the holder evicts none of them."""
    rig = NeutralRig(num_blocks=16)
    tokens = prompt(LENGTH, 5)
    warm(rig, rig.b, [*tokens, 9])
    ticket = ticket_of(rig.a.reserve("fetch", tokens, rig.b.agent_id, prefix_only=True))
    rig.b.start("fetch", tokens, ticket, prefix_only=True)
    assert rig.b.core.load().referenced_blocks == LENGTH // BLOCK
    (granted,) = rig.b.reserve("big", prompt(9 * BLOCK, 6), local=1000, max_tokens=1)
    assert isinstance(granted, Granted)
    rig.run(20)
    assert rig.a.failures("fetch") == []
    assert cached(rig.a, tokens) == LENGTH
    assert rig.b.streamed("big") == expected(prompt(9 * BLOCK, 6))[:1]
    rig.assert_empty()


def test_the_holder_dies_before_it_has_written() -> None:
    rig = NeutralRig()
    tokens = prompt(LENGTH, 7)
    ticket_of(rig.a.reserve("fetch", tokens, rig.b.agent_id, prefix_only=True))
    rig.a.connector.consumer.writers_lost([rig.b.agent_id], rig.clock.now)
    rig.clock.now += WRITE_GRACE_S
    for _ in range(3):
        rig.a.round()
    assert rig.a.failures("fetch") == ["TRANSFER_FAILED"]
    assert cached(rig.a, tokens) == 0
    rig.a.assert_empty()


def test_a_ticket_that_runs_out_frees_its_blocks_and_a_late_push_is_dropped() -> None:
    rig = NeutralRig()
    tokens = prompt(LENGTH, 8)
    warm(rig, rig.b, [*tokens, 9])
    ticket = ticket_of(rig.a.reserve("fetch", tokens, rig.b.agent_id, prefix_only=True))
    rig.clock.now = ticket.deadline_s
    rig.b.start("fetch", tokens, ticket, prefix_only=True)
    for _ in range(3):
        rig.b.round()
    assert reason_of(rig.b, "fetch") == "TICKET_EXPIRED"
    rig.clock.now = ticket.deadline_s + 2 * WRITE_GRACE_S
    rig.run(5)
    assert rig.a.failures("fetch") in (["TICKET_EXPIRED"], ["TRANSFER_FAILED"])
    assert cached(rig.a, tokens) == 0
    rig.assert_empty()


def test_an_abort_at_either_side_leaves_nothing() -> None:
    rig = NeutralRig()
    tokens = prompt(LENGTH, 9)
    warm(rig, rig.b, [*tokens, 9])
    ticket = begin(rig.a, rig.b, "fetch", tokens)
    rig.b.connector.producer.end(rig.b.core, engine_id("fetch", 1), ticket, rig.clock.now)
    rig.a.connector.consumer.abort(rig.a.core, f"{COORDINATOR}/fetch", COORDINATOR, False, rig.clock.now)
    rig.run(10)
    assert cached(rig.a, tokens) == 0
    rig.assert_empty()


def test_a_prefix_does_not_wait_for_room_nor_where_reservations_do() -> None:
    rig = NeutralRig(num_blocks=16)
    tokens = prompt(LENGTH, 10)
    warm(rig, rig.b, [*tokens, 9])
    (granted,) = rig.a.reserve("big", prompt(12 * BLOCK, 11), rig.b.agent_id)
    assert isinstance(granted, Granted)
    (refused,) = rig.a.reserve("full", tokens, rig.b.agent_id, prefix_only=True)
    assert isinstance(refused, ResourceExhaustedError)
    assert refused.reason == "NO_ROOM_FOR_PREFIX"
    assert rig.a.reserve("waits", prompt(12 * BLOCK, 13), rig.b.agent_id) == []
    with pytest.raises(ResourceExhaustedError) as behind:
        rig.a.reserve("behind", tokens[:BLOCK], rig.b.agent_id, prefix_only=True)
    assert behind.value.reason == "NO_ROOM_FOR_PREFIX"
    for name in ("big", "waits"):
        rig.a.connector.consumer.abort(rig.a.core, f"{COORDINATOR}/{name}", COORDINATOR, True, rig.clock.now)
    rig.run(3)
    rig.assert_empty()


def test_a_holder_that_reads_enough_for_others_refuses_and_leaves_nothing() -> None:
    rig = NeutralRig()
    tokens = prompt(LENGTH, 14)
    warm(rig, rig.b, [*tokens, 9])
    ticket = ticket_of(rig.a.reserve("fetch", tokens, rig.b.agent_id, prefix_only=True))

    def full(*_: object) -> None:
        raise ResourceExhaustedError("4 reads go on", reason="PREFIX_READS_FULL")

    rig.b.core._kv.reads = full  # type: ignore[assignment]  # as the tiers' books refuse
    with pytest.raises(ResourceExhaustedError) as refused:
        rig.b.start("fetch", tokens, ticket, prefix_only=True)
    assert refused.value.reason == "PREFIX_READS_FULL"
    rig.run(10)
    assert rig.a.failures("fetch"), "the taker is told, and holds no blocks for it"
    assert cached(rig.a, tokens) == 0
    rig.assert_empty()


def test_a_holder_that_learns_so_later_gives_the_same_reason() -> None:
    rig = NeutralRig()
    tokens = prompt(LENGTH, 14)
    books, answers = rig.b.core._kv, list[Callable[[], None]]()

    def looks_up(sequence: Sequence, then: Callable[[Sequence], None]) -> bool:
        answers.append(partial(books._read_on, sequence, then, -1))
        return True

    def full(*_: object) -> bool:
        raise ResourceExhaustedError("4 reads go on", reason="PREFIX_READS_FULL")

    books._looks_up, books.reads = looks_up, full  # type: ignore[assignment]
    begin(rig.a, rig.b, "fetch", tokens)
    rig.run(3)
    assert not rig.b.events[engine_id("fetch", 1)]
    answers.pop()()
    rig.run(20)
    assert reason_of(rig.b, "fetch") == "PREFIX_READS_FULL"
    assert rig.a.failures("fetch") == ["TRANSFER_FAILED"]
    rig.assert_empty()


def test_what_is_no_prefix_is_refused_with_its_field() -> None:
    rig = NeutralRig()
    (refused,) = rig.a.reserve("odd", prompt(LENGTH + 1, 12), rig.b.agent_id, prefix_only=True)
    assert isinstance(refused, InvalidArgumentError)
    assert refused.field == "token_ids"
    with pytest.raises(InvalidArgumentError) as no_ticket:
        rig.a.start("none", prompt(LENGTH, 12), None, prefix_only=True)
    assert no_ticket.value.field == "ticket"
    rig.run(3)
    rig.assert_empty()


def test_a_coordinator_s_lease_that_ends_while_a_prefix_is_written_frees_its_blocks_behind_the_writer() -> (
    None
):
    rig = NeutralRig()
    tokens = prompt(LENGTH, 14)
    warm(rig, rig.b, [*tokens, 9])
    ticket = ticket_of(rig.a.reserve("fetch", tokens, rig.b.agent_id, prefix_only=True))
    rig.b.start("fetch", tokens, ticket, prefix_only=True)
    rig.a.connector.consumer.coordinator_lost(rig.a.core, COORDINATOR, rig.clock.now)
    assert rig.a.core.load().quarantined_blocks == LENGTH // BLOCK, "its writer does not know yet"
    rig.run(10)
    assert cached(rig.a, tokens) == 0, "nobody waits for it"
    rig.assert_empty()
