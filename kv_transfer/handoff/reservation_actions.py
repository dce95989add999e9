"""What `ReservationTable` returns: actions for the engine and transport, verdicts on notifications."""

from __future__ import annotations

from dataclasses import dataclass

REJECTION_REASONS = (
    "malformed",
    "stale_epoch",
    "unknown_reservation",
    "wrong_bytes",
    "unknown_order",
    "duplicate",
    "not_live",
    "foreign_writer",
    "checksum_mismatch",
)


@dataclass(frozen=True, slots=True)
class Abort:
    """End the request in the engine. Quarantine its blocks if `writer_alive`, else free them."""

    number: int
    request_id: str
    reason: str
    message: str
    writer_alive: bool


@dataclass(frozen=True, slots=True)
class ReleaseWriter:
    """Free the quarantined blocks of an aborted request."""

    number: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Silence:
    """The writer never let go; `agent_id` is None if it was never known. To be logged as a warning.

    The agent is not refused for it: later messages for this reservation are dropped anyway, and its other handoffs go
    on. Nor are writes to it ended, which have nothing to do with what it writes here.
    """

    number: int
    request_id: str
    agent_id: str | None


Action = Abort | ReleaseWriter | Silence


@dataclass(frozen=True, slots=True)
class Admit:
    """All bytes have arrived and the writer has let go: start decoding from `first_token`.

    `axis_order`: the blocks are in this order; empty: in the owner's.
    """

    number: int
    request_id: str
    first_token: int
    axis_order: str = ""


@dataclass(frozen=True, slots=True)
class WriterDone:
    """The writer has let go and no request can start from it: apply `actions`."""

    number: int
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """Refused and counted under `reason`, one of REJECTION_REASONS. Apply `actions`, if any."""

    reason: str
    actions: tuple[Action, ...] = ()


Verdict = Admit | WriterDone | Rejected
