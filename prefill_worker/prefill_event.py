"""What the engine thread tells the call of a prompt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.core.types import RequestOutput
from splitserve.errors import SplitserveError

TOKEN_FIRST_S = 100e-6
"""Maximum seconds that writes wait for a first token to leave the process."""


@dataclass(frozen=True, slots=True)
class FirstTokenReady:
    """The prompt is computed. `last`: no handoff follows."""

    output: RequestOutput
    cached_tokens: int
    queue_s: float
    compute_s: float
    chunks: int
    last: bool
    sent: threading.Event = field(default_factory=threading.Event, compare=False)
    """Set when the token has left the process; the engine thread waits up to TOKEN_FIRST_S for it."""


@dataclass(frozen=True, slots=True)
class HandedOff:
    """The handoff is complete: the last write was acknowledged."""

    written_bytes: int
    descriptors: int
    transfer_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The request has failed."""

    error: SplitserveError


PrefillEvent = FirstTokenReady | HandedOff | Failed

EmitEvents = Callable[[list[tuple[str, PrefillEvent]]], None]
