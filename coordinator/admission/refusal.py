"""Why a request is not served, and when it may come again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coordinator.admission.entry import Entry

RefusalReason = Literal["QUEUE_FULL", "WOULD_MISS_DEADLINE", "WOULD_MISS_SLO", "WAITED_TOO_LONG"]
REFUSAL_REASONS: tuple[RefusalReason, ...] = (
    "QUEUE_FULL",
    "WOULD_MISS_DEADLINE",
    "WOULD_MISS_SLO",
    "WAITED_TOO_LONG",
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that is not served."""

    entry: Entry
    reason: RefusalReason
    message: str
    retry_after_s: float
