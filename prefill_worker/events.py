"""What the engine thread tells the event loop about one prefill."""

from __future__ import annotations

from dataclasses import dataclass

from engine.types import RequestOutput
from splitserve.errors import SplitserveError


@dataclass(frozen=True, slots=True)
class FirstTokenReady:
    """The prompt is computed. Times in seconds; `last` when no handoff follows."""

    output: RequestOutput
    cached_tokens: int
    queue_s: float
    compute_s: float
    last: bool


@dataclass(frozen=True, slots=True)
class HandedOff:
    """The last byte was acknowledged."""

    written_bytes: int
    descriptors: int
    transfer_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The request is over without an answer."""

    error: SplitserveError


PrefillEvent = FirstTokenReady | HandedOff | Failed
