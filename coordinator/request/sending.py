"""The way of a request's output to its entrypoint: deltas and the end, for which it waits, or deltas without a wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from splitserve.generation.output_delta import TokenDelta
from splitserve.v1 import inference_pb2


class Output(Protocol):
    """Takes the answer to one request, for an entrypoint."""

    async def send(self, delta: TokenDelta, started: inference_pb2.GenerationStart | None) -> None:
        """Takes the next delta; with the first one that this coordinator sends, how the request began. Waits while the
        client does not read."""

    async def end(self, done: inference_pb2.GenerationDone) -> None:
        """Takes the end of a complete answer."""

    def takes_now(self) -> bool:
        """Whether `send_now` may be called: the answer has begun, and its client reads."""
        return False

    def send_now(self, delta: TokenDelta) -> None:
        """Takes the next delta without a wait."""
        raise AssertionError("it takes nothing without a wait")


@dataclass(frozen=True, slots=True)
class WaitingOutput(Output):
    """The output of an entrypoint that waits for each message. The last message has `done`."""

    write: Callable[[inference_pb2.GenerateResponse], Awaitable[None]]

    @override
    async def send(self, delta: TokenDelta, started: inference_pb2.GenerationStart | None) -> None:
        await self.write(inference_pb2.GenerateResponse(delta=delta.to_proto(), started=started))

    @override
    async def end(self, done: inference_pb2.GenerationDone) -> None:
        await self.write(inference_pb2.GenerateResponse(done=done))
