"""What stands between a valid request and the workers: each gate lets it in, makes it wait, or refuses it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Protocol

from coordinator.request_validation import Generation


class Passage(Protocol):
    """One request's stay behind a gate."""

    def sent(self, output_tokens: int) -> None:
        """So many more tokens went to the client. Called often: must be cheap."""


class Gate(Protocol):
    """Admission of one kind, for example a tenant's quota or the queue."""

    def entered(self, generation: Generation) -> AbstractAsyncContextManager[Passage]:
        """A context around the request's life. Entering may wait; it raises ResourceExhaustedError with a retry hint,
        or PermissionDeniedError. Leaving gives back what the request held, whatever way it ended."""


@asynccontextmanager
async def passed(gates: Sequence[Gate], generation: Generation) -> AsyncIterator[Sequence[Passage]]:
    """Passes all gates in order; leaves them in the reverse."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(gate.entered(generation)) for gate in gates]
