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
    """The writer never let go. Disconnect `agent_id`; None: it was never known, only say so loudly."""

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
    """Dropped and counted; `reason` is one of REJECTION_REASONS."""

    reason: str


Verdict = Admit | WriterDone | Rejected
