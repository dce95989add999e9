"""What stands between a valid request and the workers: each gate lets it in, makes it wait, or refuses it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from coordinator.pools import WorkerKey
from coordinator.request_validation import Generation


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds that a request waited at a gate, by the pool that had no room for it."""

    prefill_s: float = 0.0
    decode_s: float = 0.0

    def __add__(self, other: Waits) -> Waits:
        return Waits(self.prefill_s + other.prefill_s, self.decode_s + other.decode_s)


NO_WAITS = Waits()


class Passage:
    """One request's stay behind a gate, to be derived from: a gate overrides what it wants to hear of.

    All of it is called on the request's way, so it must be cheap and must not raise.
    """

    __slots__ = ()

    @property
    def waits(self) -> Waits:
        """What the request waited for at this gate."""
        return NO_WAITS

    def routed(self, prefill: WorkerKey, decode: WorkerKey | None) -> None:
        """An attempt has got its workers; once for each attempt."""

    def sent(self, output_tokens: int) -> None:
        """So many more tokens go to the client. The first time, the prompt has been computed."""

    def decoded(self) -> None:
        """The decode worker has ended its part. The client may have to read some of it still."""


class Gate(Protocol):
    """Admission of one kind, for example a tenant's quota or the queue."""

    def entered(self, generation: Generation) -> AbstractAsyncContextManager[Passage]:
        """A context around the request's life. Entering may wait; it raises ResourceExhaustedError with a retry hint,
        or PermissionDeniedError. Leaving gives back what the request held, whatever way it ended."""


async def pass_gates(stay: AsyncExitStack, gates: Sequence[Gate], generation: Generation) -> list[Passage]:
    """Passes all gates in order. `stay` leaves them, in the reverse."""
    return [await stay.enter_async_context(gate.entered(generation)) for gate in gates]
