"""Connections of the ucx transport that nobody needs any more, until they can be closed.

Over TCP, UCX joins two connections that both sides set up at once, and takes the peer's even if the peer has closed it
meanwhile: then the side that goes on loses its own (decision 89). So a connection is not closed in the middle of its
handshake. A message that has left it shows that the handshake is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kv_transfer.transports.ucx.binding import Operation, UcxEndpoint

PARTING_S = 5.0
"""How long a connection stays at most for its last messages to leave, in seconds."""
MAX_PARTINGS = 4096


@dataclass(frozen=True, slots=True)
class _Parting:
    endpoint: UcxEndpoint
    sends: tuple[Operation, ...]
    until_s: float
    for_peer: bool

    def over(self, now: float) -> bool:
        left = not self.for_peer and all(send.done for send in self.sends)
        return left or now >= self.until_s or not self.endpoint.alive


class Partings:
    """All of them on one transport. Times are of `clock`, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: list[_Parting] = []
        self._unfinished: list[Operation] = []

    def part(self, endpoint: UcxEndpoint, sends: Iterable[Operation], *, for_peer: bool = False) -> None:
        """Closes a connection once `sends` have left it, `PARTING_S` later at the latest. `for_peer`: once the peer has
        closed it, as UCX may have joined it with the one that this side writes through, which would end as well."""
        until_s = float("inf") if for_peer else self._clock() + PARTING_S
        self._open.append(_Parting(endpoint, tuple(sends), until_s, for_peer))

    def cut(self, endpoint: UcxEndpoint, sends: Iterable[Operation]) -> None:
        """Closes a connection at once. Buffers that UCX has not given back are kept."""
        endpoint.close()
        self.keep(sends)

    def keep(self, operations: Iterable[Operation]) -> None:
        """Keeps the buffers of operations that nobody waits for any more until UCX has given them back."""
        self._unfinished += [operation for operation in operations if not operation.done]

    def poll(self, most: int = MAX_PARTINGS) -> None:
        """Closes those that can be closed, and the oldest beyond `most`."""
        self._unfinished = [operation for operation in self._unfinished if not operation.done]
        if not self._open:
            return
        now, over = self._clock(), len(self._open) - most
        gone = [number < over or parting.over(now) for number, parting in enumerate(self._open)]
        before, self._open = self._open, [p for p, ends in zip(self._open, gone, strict=True) if not ends]
        for parting, ends in zip(before, gone, strict=True):
            if ends:
                self.cut(parting.endpoint, parting.sends)

    def close(self) -> None:
        """Closes all of them."""
        self.poll(most=0)
        self._unfinished.clear()
