"""What tests look up in a reservation table."""

from __future__ import annotations

from kv_transfer.handoff.reservation_table import HandoffState, ReservationTable


def state_of(table: ReservationTable, number: int) -> HandoffState | None:
    """The state of a reservation; None once it has ended."""
    entry = table._open.get(number)
    return None if entry is None else entry.state


def quarantined_blocks(table: ReservationTable) -> int:
    """The number of blocks in quarantine."""
    entries = table._open.values()
    return sum(entry.block_count for entry in entries if entry.state is HandoffState.QUARANTINED)
