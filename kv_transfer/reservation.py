"""One reservation of a decode worker: whose it is, where it stands, and when time alone moves it on."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.handoff_state import WAITING, HandoffState
from kv_transfer.ticket import WRITE_GRACE_S


@dataclass(slots=True)
class Reservation:
    """An entry of `ReservationTable`, which alone changes it. Times in seconds on the caller's clock."""

    number: int
    request_id: str
    coordinator_id: str
    block_count: int
    total_bytes: int
    deadline_s: float
    writer_end_s: float
    """From then on nothing of the writer can arrive any more."""
    state: HandoffState = HandoffState.RESERVED
    writer_alive: bool = True
    writer_agent_id: str | None = None
    writer_lost: bool = False
    quarantine_end_s: float = 0.0

    @property
    def due_s(self) -> float:
        """When time alone ends the present state."""
        if self.state is HandoffState.QUARANTINED:
            return self.quarantine_end_s
        if self.state in WAITING:  # a completion may be under way a little longer than the ticket
            return min(self.deadline_s, self.writer_end_s)
        return self.deadline_s

    def lose_writer(self, lost_s: float) -> None:
        """The writer's process ended at `lost_s`: what it had sent may arrive for `WRITE_GRACE_S` more."""
        self.writer_lost = True
        self.writer_end_s = min(self.writer_end_s, lost_s + WRITE_GRACE_S)
        if self.state is HandoffState.QUARANTINED:
            self.quarantine_end_s = min(self.quarantine_end_s, self.writer_end_s)

    def hold(self, least_end_s: float) -> None:
        """The quarantine begins: until the writer's end, and if it may still live, `least_end_s` at least."""
        self.quarantine_end_s = self.writer_end_s if self.writer_lost else max(least_end_s, self.writer_end_s)
