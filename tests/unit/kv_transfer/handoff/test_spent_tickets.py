"""A ticket is accepted once, however late it is sent again."""

from __future__ import annotations

from kv_transfer.handoff.ticket import MAX_OWNERS, REMEMBER_S, SpentTickets


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
