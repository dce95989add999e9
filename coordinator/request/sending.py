"""The way of a request's output to its entrypoint: as messages, or as deltas that are taken without a wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from splitserve.v1 import generation_pb2, inference_pb2


class Output(Protocol):
    """Takes the answer to one request, for an entrypoint."""

    async def send(self, response: inference_pb2.GenerateResponse) -> None:
        """Takes the next message, the last of which has `done` set. Waits while the client does not read."""

    def takes_now(self) -> bool:
        """Whether `send_now` may be called: the answer has begun, and its client reads."""
        return False

    def send_now(self, delta: generation_pb2.OutputDelta) -> None:
        """Takes the next delta without a wait."""
        raise AssertionError("it takes nothing without a wait")


@dataclass(frozen=True, slots=True)
class WaitingOutput(Output):
    """The output of an entrypoint that waits for each message."""

    write: Callable[[inference_pb2.GenerateResponse], Awaitable[None]]

    @override
    async def send(self, response: inference_pb2.GenerateResponse) -> None:
        await self.write(response)
