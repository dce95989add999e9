"""What the decode worker's book of reservations answers: actions to carry out, verdicts on notifications."""

from __future__ import annotations

from dataclasses import dataclass

REJECTION_REASONS = (
    "malformed",
    "stale_epoch",
    "unknown_reservation",
    "wrong_bytes",
    "duplicate",
    "not_live",
    "foreign_writer",
    "checksum_mismatch",
)


@dataclass(frozen=True, slots=True)
class Abort:
    """End the request in the engine; keep its blocks in quarantine if `writer_alive`, else free them."""

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
class Fence:
    """The writer never let go; `agent_id` is None when it was never known. Say so loudly.

    Whoever writes to that agent too must disconnect it. One that only receives need not: a later message
    for this reservation is dropped anyway, and a disconnect would drop the agent's next handoffs as well.
    """

    number: int
    request_id: str
    agent_id: str | None


Action = Abort | ReleaseWriter | Fence


@dataclass(frozen=True, slots=True)
class Admit:
    """Every byte is here and the writer has let go: start decoding from `first_token`."""

    number: int
    request_id: str
    first_token: int


@dataclass(frozen=True, slots=True)
class WriterDone:
    """The writer has let go without a live request gaining from it: apply `actions`."""

    number: int
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """Refused and counted; `reason` is one of REJECTION_REASONS. Apply `actions`, if there are any."""

    reason: str
    actions: tuple[Action, ...] = ()


Verdict = Admit | WriterDone | Rejected
