"""Both parts on one engine: answers in all four ways at once, ids that never meet, faults that stay where they are."""

from __future__ import annotations

import random

import pytest

from decode_worker.requests import Granted
from engine.core.engine import RequestOutput
from engine.core.engine_core import EngineCore
from kv_transfer.handoff.messages import Drained, encode
from prefill_worker.kv_producer import Failed, HandedOff, engine_id, public_id
from splitserve.errors import FailedPreconditionError
from tests.support.engine.connector_pair import COORDINATOR, ticket_of
from tests.support.roles.both_rig import BothRig, answer, expected

pytestmark = pytest.mark.timeout(60)


def prompt(length: int, seed: int) -> list[int]:
    pick = random.Random(seed)
    return [pick.randrange(256) for _ in range(length)]


def test_answers_in_both_directions_and_locally_at_once() -> None:
    rig = BothRig()
    prompts = {name: prompt(50, seed) for seed, name in enumerate(("ab", "ba", "aa", "bb"))}
    rig.hand_off(rig.a, rig.b, "ab", prompts["ab"])
    rig.hand_off(rig.b, rig.a, "ba", prompts["ba"])
    for node, name in ((rig.a, "aa"), (rig.b, "bb")):
        (granted,) = node.reserve(name, prompts[name], local=100)
        assert isinstance(granted, Granted)
        assert granted.ticket is None
    rig.run()
    assert answer(rig.a, rig.b, "ab") == expected(prompts["ab"])
    assert answer(rig.b, rig.a, "ba") == expected(prompts["ba"])
    assert rig.a.streamed("aa") == expected(prompts["aa"])
    assert rig.b.streamed("bb") == expected(prompts["bb"])
    for node in (rig.a, rig.b):
        status = node.connector.status
        assert status.writes is not None
        assert [(outcome, count) for (_, outcome), count in status.writes.items()] == [("completed", 1)]
        assert status.handoffs_completed == 2, "one sent, one admitted"
        assert status.usable_agents == {({rig.a.agent_id, rig.b.agent_id} - {node.agent_id}).pop()}
    rig.assert_empty()


def test_the_transport_is_polled_once_before_a_step() -> None:
    rig = BothRig()
    rig.run(5)  # the lanes are measured
    before = rig.a.transport.polls
    rig.a.connector.before_step(rig.a.core, rig.clock.now)
    assert rig.a.transport.polls == before + 1


def test_a_reservation_says_what_it_has_waited_for_a_step() -> None:
    rig = BothRig()
    (granted,) = rig.a.reserve("prompt", prompt(48, 1), rig.b.agent_id, came_before_s=0.5)
    assert isinstance(granted, Granted)
    assert granted.wait_s == pytest.approx(0.5)


def test_one_request_id_in_both_parts_of_one_worker() -> None:
    """An answer that is resumed comes back with its id, in whichever part."""
    rig = BothRig()
    there, here = prompt(40, 1), prompt(44, 2)
    rig.hand_off(rig.a, rig.b, "r", there)
    rig.hand_off(rig.b, rig.a, "r", here)
    ticket = ticket_of(rig.b.reserve("r2", there, rig.a.agent_id))
    rig.a.start("r", there, ticket, number=2)
    rig.run()
    assert answer(rig.a, rig.b, "r") == expected(there)
    assert answer(rig.b, rig.a, "r") == expected(here)
    assert rig.a.first_tokens("r", 2) + rig.b.streamed("r2") == expected(there)
    rig.assert_empty()


@pytest.mark.parametrize("request_id", ["r", "c/r", "/r", "a/1/2", ""])
def test_ids_of_prompts_are_no_ids_of_reservations(request_id: str) -> None:
    name = engine_id(request_id, 3)
    assert public_id(name) == request_id or not request_id
    assert name.startswith("/"), "a coordinator's id is not empty and has no slash"


def test_tickets_of_one_number_from_both_sides() -> None:
    rig = BothRig()
    to_b = rig.hand_off(rig.a, rig.b, "x", prompt(30, 1))
    to_a = rig.hand_off(rig.b, rig.a, "x", prompt(30, 2))
    assert to_a.reservation == to_b.reservation
    with pytest.raises(FailedPreconditionError, match="used before"):
        rig.a.start("x", prompt(30, 1), to_b, number=2)
    rig.run()
    assert answer(rig.a, rig.b, "x") == expected(prompt(30, 1))
    assert answer(rig.b, rig.a, "x") == expected(prompt(30, 2))
    rig.assert_empty()


def test_a_ticket_for_its_own_blocks_is_refused() -> None:
    rig = BothRig()
    ticket = ticket_of(rig.a.reserve("own", prompt(30, 1), rig.a.agent_id))
    with pytest.raises(FailedPreconditionError) as refused:
        rig.a.start("own", prompt(30, 1), ticket)
    assert (refused.value.reason, refused.value.field) == ("TICKET_OWN", "ticket.decode_agent_id")
    rig.a.producer.end(rig.a.core, engine_id("own", 1), ticket, rig.clock.now)
    rig.a.consumer.abort(rig.a.core, f"{COORDINATOR}/own", COORDINATOR, True, rig.clock.now)
    rig.run(5)
    rig.assert_empty()


def test_a_fault_in_one_part_leaves_the_other_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = BothRig()
    rig.hand_off(rig.a, rig.b, "sent", prompt(40, 1))
    rig.hand_off(rig.b, rig.a, "received", prompt(40, 2))
    producer, consumer = rig.a.producer, rig.a.consumer

    def broken(*_: object, **__: object) -> None:
        raise ValueError("scripted")

    monkeypatch.setattr(producer, "_on_progress", broken)
    rig.run()
    (failed,) = [event for event in rig.a.events[engine_id("sent", 1)] if isinstance(event, Failed)]
    assert failed.error.reason == "INTERNAL"
    assert answer(rig.b, rig.a, "received") == expected(prompt(40, 2))
    assert rig.b.failures("sent") == ["TRANSFER_FAILED"]
    monkeypatch.undo()

    def one_broken(core: EngineCore, output: RequestOutput, now: float) -> None:
        raise ValueError("scripted")

    monkeypatch.setattr(consumer, "_on_output", one_broken)
    rig.hand_off(rig.a, rig.b, "sent again", prompt(40, 3))
    rig.hand_off(rig.b, rig.a, "fails", prompt(40, 4))
    rig.run()
    assert answer(rig.a, rig.b, "sent again") == expected(prompt(40, 3))
    assert rig.a.failures("fails") == ["INTERNAL"]
    monkeypatch.undo()
    rig.run(5)
    rig.assert_empty()


def test_notifications_that_come_with_a_write_s_poll_are_kept() -> None:
    """After a step the producer polls for its writes; the next one may have begun, so nothing may be admitted then."""
    rig = BothRig()
    rig.run(5)  # the lanes are measured
    ticket = rig.hand_off(rig.b, rig.a, "r", prompt(40, 1))
    rig.b.producer.end(rig.b.core, engine_id("r", 1), ticket, rig.clock.now)
    rig.b.round()  # says that it has drained
    rig.a.connector.polls.poll()
    assert rig.a.connector.polls.take_writes() == []
    assert rig.a.failures("r") == []
    rig.a.round()
    assert rig.a.failures("r") == ["TRANSFER_FAILED"]
    rig.run(3)
    rig.assert_empty()


def test_garbage_to_a_worker_that_sends_is_counted_and_nothing_else() -> None:
    rig = BothRig()
    rig.run(5)
    rig.hand_off(rig.a, rig.b, "r", prompt(60, 1))
    for message in (b"\xff garbage", encode(Drained(5, 1)), encode(Drained(77, 9))):
        rig.b.transport.notify(rig.a.agent_id, message)
    rig.run()
    assert answer(rig.a, rig.b, "r") == expected(prompt(60, 1))
    assert sum(rig.a.connector.status.handoffs_rejected.values()) == 3
    assert any(isinstance(event, HandedOff) for event in rig.a.events[engine_id("r", 1)])
    rig.assert_empty()


def test_it_is_idle_when_both_parts_are() -> None:
    rig = BothRig()
    rig.hand_off(rig.a, rig.b, "ab", prompt(40, 1))
    rig.hand_off(rig.b, rig.a, "ba", prompt(40, 2))
    assert rig.a.connector.status.in_progress == 1
    rig.run()
    assert rig.a.idle >= 1
    rig.assert_empty()
