"""`ReservationTable`: admission, rejection, quarantine and deadlines."""

from __future__ import annotations

import pytest

from kv_transfer.handoff.messages import WRITE_GRACE_S, Drained, WriteCompletion, encode
from kv_transfer.handoff.reservation_table import (
    REJECTION_REASONS,
    Abort,
    Admit,
    HandoffState,
    Rejected,
    ReleaseWriter,
    ReservationTable,
    Silence,
    WriterDone,
)
from splitserve.errors import InvalidArgumentError

EPOCH, QUARANTINE_S, DEADLINE_S = 11, 45.0, 100.0
BYTES = 3 * 1024


@pytest.fixture
def table() -> ReservationTable:
    return ReservationTable(EPOCH, quarantine_s=QUARANTINE_S)


def reserve(table: ReservationTable, name: str = "r", now: float = 0.0, ticket_s: float | None = None) -> int:
    return table.open(name, "c", 3, 1024, DEADLINE_S, now, ticket_s)


def state_of(table: ReservationTable, number: int) -> HandoffState | None:
    entry = table._open.get(number)
    return None if entry is None else entry.state


def quarantined_blocks(table: ReservationTable) -> int:
    entries = table._open.values()
    return sum(entry.block_count for entry in entries if entry.state is HandoffState.QUARANTINED)


def completion(number: int, *, epoch: int = EPOCH, size: int = BYTES) -> bytes:
    return encode(WriteCompletion(epoch, number, size, 42))


def drained(number: int) -> bytes:
    return encode(Drained(EPOCH, number))


def test_the_whole_life(table: ReservationTable) -> None:
    number = reserve(table)
    assert state_of(table, number) is HandoffState.RESERVED
    table.bind_writer(number, "p")
    assert state_of(table, number) is HandoffState.RECEIVING
    assert table.on_notification("p", completion(number), 1.0) == Admit(number, "r", 42)
    assert state_of(table, number) is HandoffState.READY
    table.started("r")
    assert state_of(table, number) is HandoffState.RUNNING
    table.finished("r")
    assert (len(table._live), quarantined_blocks(table), state_of(table, number)) == (0, 0, None)
    assert sum(table.counters.values()) == 0


def test_numbers_are_never_used_twice(table: ReservationTable) -> None:
    first = reserve(table)
    table.abort("r", "c", True, 0.0)
    assert reserve(table) == first + 1


def test_a_live_request_cannot_be_opened_again(table: ReservationTable) -> None:
    reserve(table)
    with pytest.raises(InvalidArgumentError) as caught:
        reserve(table)
    assert caught.value.field == "request_id"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"garbage!", "malformed"),
        (b"", "malformed"),
        (completion(1, epoch=EPOCH + 1), "stale_epoch"),
        (completion(2), "unknown_reservation"),
        (completion(0), "unknown_reservation"),
        (completion(1, size=BYTES - 1), "wrong_bytes"),
        (completion(1, size=BYTES + 1), "wrong_bytes"),
    ],
)
def test_foreign_completions_are_dropped_and_counted(
    table: ReservationTable, message: bytes, reason: str
) -> None:
    number = reserve(table)
    assert table.on_notification("p", message, 1.0) == Rejected(reason)
    assert table.counters[reason] == sum(table.counters.values()) == 1
    assert set(table.counters) == set(REJECTION_REASONS)
    assert table.on_notification("p", completion(number), 1.0) == Admit(number, "r", 42)


def test_duplicates_are_dropped(table: ReservationTable) -> None:
    number = reserve(table)
    table.on_notification("p", completion(number), 1.0)
    assert table.on_notification("p", completion(number), 1.0) == Rejected("duplicate")
    assert table.on_notification("p", drained(number), 1.0) == Rejected("duplicate")
    table.finished("r")
    assert table.on_notification("p", completion(number), 1.0) == Rejected("not_live")


def test_only_the_bound_writer_counts(table: ReservationTable) -> None:
    number = reserve(table)
    table.bind_writer(number, "p")
    assert table.on_notification("q", completion(number), 1.0) == Rejected("foreign_writer")
    assert table.on_notification("p", completion(number), 1.0) == Admit(number, "r", 42)


def test_drained_ends_a_waiting_request(table: ReservationTable) -> None:
    number = reserve(table)
    verdict = table.on_notification("p", drained(number), 1.0)
    assert isinstance(verdict, WriterDone)
    (action,) = verdict.actions
    assert isinstance(action, Abort)
    assert (action.reason, action.writer_alive) == ("TRANSFER_FAILED", False)
    assert table.on_notification("p", completion(number), 1.0) == Rejected("not_live")


@pytest.mark.parametrize("last_word", [drained, completion])
def test_quarantine_ends_with_the_writers_last_word(table: ReservationTable, last_word) -> None:  # type: ignore[no-untyped-def]
    number = reserve(table)
    (action,) = table.abort("r", "c", False, 1.0)
    assert isinstance(action, Abort)
    assert (action.reason, action.writer_alive) == ("CANCELLED", True)
    assert quarantined_blocks(table) == 3
    assert table.abort("r", "c", False, 1.0) == []
    verdict = table.on_notification("p", last_word(number), 2.0)
    assert verdict == WriterDone(number, (ReleaseWriter(number, "r"),))
    assert quarantined_blocks(table) == 0


def test_a_request_can_come_back_while_its_old_blocks_wait(table: ReservationTable) -> None:
    old = reserve(table)
    table.abort("r", "c", False, 1.0)
    new = reserve(table, now=2.0)
    assert table.on_notification("p", completion(old), 3.0) == WriterDone(old, (ReleaseWriter(old, "r"),))
    assert table.on_notification("p", completion(new), 3.0) == Admit(new, "r", 42)


def test_no_writer_needs_no_quarantine(table: ReservationTable) -> None:
    reserve(table)
    (action,) = table.abort("r", "c", True, 1.0)
    assert isinstance(action, Abort)
    assert not action.writer_alive
    assert table._next_due_s <= DEADLINE_S
    assert table.expire(1000.0) == []


def test_abort_of_another_coordinators_request_is_ignored(table: ReservationTable) -> None:
    reserve(table)
    assert table.abort("r", "other", False, 1.0) == []
    assert table.abort("unknown", "c", False, 1.0) == []
    assert len(table._live) == 1


def test_abort_while_running_needs_no_quarantine(table: ReservationTable) -> None:
    number = reserve(table)
    table.on_notification("p", completion(number), 1.0)
    table.started("r")
    (action,) = table.abort("r", "c", False, 2.0)
    assert isinstance(action, Abort)
    assert not action.writer_alive


def test_deadline(table: ReservationTable) -> None:
    number = reserve(table)
    assert table._next_due_s == DEADLINE_S
    assert table.expire(DEADLINE_S - 0.1) == []
    (action,) = table.expire(DEADLINE_S)
    assert isinstance(action, Abort)
    assert (action.number, action.reason) == (number, "DEADLINE_EXCEEDED")


def test_a_waiting_request_ends_with_its_ticket(table: ReservationTable) -> None:
    reserve(table, ticket_s=20.0)
    end = 20.0 + 2 * WRITE_GRACE_S
    assert table.expire(end - 0.1) == []
    (action,) = table.expire(end)
    assert isinstance(action, Abort)
    assert action.reason == "TICKET_EXPIRED"


def test_a_late_completion_is_not_admitted(table: ReservationTable) -> None:
    number = reserve(table)
    verdict = table.on_notification("p", completion(number), DEADLINE_S)
    assert isinstance(verdict, WriterDone)
    assert isinstance(verdict.actions[0], Abort)
    assert verdict.actions[0].reason == "DEADLINE_EXCEEDED"
    assert len(table._live) == 0


@pytest.mark.parametrize(("ticket_s", "end"), [(5.0, 1.0 + QUARANTINE_S), (90.0, 90.0 + 2 * WRITE_GRACE_S)])
@pytest.mark.parametrize("agent_id", [None, "p"])
def test_quarantine_outlasts_the_ticket_then_fences(
    table: ReservationTable, ticket_s: float, end: float, agent_id: str | None
) -> None:
    number = reserve(table, ticket_s=ticket_s)
    if agent_id:
        table.bind_writer(number, agent_id)
    table.abort("r", "c", False, 1.0)
    assert table._next_due_s <= end
    assert table.expire(end - 0.1) == []
    assert table._next_due_s == end
    assert table.expire(end) == [Silence(number, "r", agent_id), ReleaseWriter(number, "r")]
    assert table.on_notification("p", completion(number), end) == Rejected("not_live")


def test_a_dead_writers_blocks_come_back_after_the_grace(table: ReservationTable) -> None:
    waiting, aborted = reserve(table, "a"), reserve(table, "b")
    other = reserve(table, "x")
    for number, agent_id in ((waiting, "p"), (aborted, "p"), (other, "q")):
        table.bind_writer(number, agent_id)
    table.abort("b", "c", False, 1.0)
    table.writer_lost("p", 2.0)
    table.writer_lost("p", 4.0)
    assert table._next_due_s == 2.0 + WRITE_GRACE_S
    assert table.expire(2.0 + WRITE_GRACE_S - 0.1) == []
    first, second = table.expire(2.0 + WRITE_GRACE_S)
    assert isinstance(first, Abort)
    assert (first.request_id, first.reason, first.writer_alive) == ("a", "TRANSFER_FAILED", False)
    assert second == ReleaseWriter(aborted, "b")
    assert len(table._live) == 1


def test_what_a_dead_writer_had_completed_is_admitted(table: ReservationTable) -> None:
    number = reserve(table)
    table.bind_writer(number, "p")
    table.writer_lost("p", 2.0)
    assert table.on_notification("p", completion(number), 3.0) == Admit(number, "r", 42)
    assert table.expire(2.0 + 2 * WRITE_GRACE_S) == []


@pytest.mark.parametrize("first", ["abort", "note"])
def test_news_of_a_death_may_come_before_everything_else(table: ReservationTable, first: str) -> None:
    number = reserve(table)
    if first == "abort":
        table.bind_writer(number, "p")
    table.writer_lost("p", 2.0)
    if first == "note":
        table.bind_writer(number, "p")
    table.abort("r", "c", False, 3.0)
    assert quarantined_blocks(table) == 3
    assert table.expire(2.0 + WRITE_GRACE_S) == [ReleaseWriter(number, "r")]


def test_no_blocks_need_no_quarantine(table: ReservationTable) -> None:
    number = table.open("r", "c", 0, 1024, DEADLINE_S, 0.0)
    assert table.on_notification("p", completion(number, size=0), 1.0) == Admit(number, "r", 42)
    table.open("s", "c", 0, 1024, DEADLINE_S, 0.0)
    (action,) = table.abort("s", "c", False, 1.0)
    assert isinstance(action, Abort)
    assert not action.writer_alive


def test_wrong_content_is_refused_and_its_blocks_wait_for_late_writes() -> None:
    asked: list[WriteCompletion] = []

    def refuse(done: WriteCompletion) -> bool:
        asked.append(done)
        return False

    table = ReservationTable(EPOCH, quarantine_s=QUARANTINE_S, content_matches=refuse)
    number = reserve(table, ticket_s=10.0)
    assert table.on_notification("p", completion(number, size=BYTES - 1), 1.0) == Rejected("wrong_bytes")
    assert asked == [], "the content is looked at last"
    verdict = table.on_notification("p", completion(number), 1.0)
    assert isinstance(verdict, Rejected)
    assert verdict.reason == "checksum_mismatch"
    (abort,) = verdict.actions
    assert isinstance(abort, Abort)
    assert (abort.reason, abort.writer_alive) == ("CHECKSUM_MISMATCH", True)
    assert table.counters["checksum_mismatch"] == 1
    assert len(asked) == 1
    assert (state_of(table, number), quarantined_blocks(table)) == (HandoffState.QUARANTINED, 3)
    released = table.expire(1.0 + QUARANTINE_S)
    assert ReleaseWriter(number, "r") in released
    assert quarantined_blocks(table) == 0
