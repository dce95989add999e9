"""How an entrypoint takes an answer: message by message, or delta by delta where nothing has to be waited for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from splitserve.v1 import generation_pb2, inference_pb2

Send = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]


class DirectSend(Protocol):
    """Sends deltas without a wait, between those that `Send` gets; for entrypoints whose writes need no task."""

    def is_ready(self) -> bool:
        """Whether a delta can be sent now: the answer has begun, and its client reads."""

    def send(self, delta: generation_pb2.OutputDelta) -> None:
        """Sends a delta; only while `is_ready`."""
