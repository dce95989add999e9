"""Whether a coordinator reads its outputs, and how long its requests outlive it if it does not. Pure.

Coordinators number their streams upwards. Messages of two connections may overtake each other, so a number that is not
above the last one is an older stream that arrives late, and a reservation under another number than the present one
belongs to a stream that is gone.
"""

from __future__ import annotations

from splitserve.errors import FailedPreconditionError

UNNUMBERED = 0
"""Number of the streams of a coordinator that resumes none: its requests end with its stream."""


class Attachment:
    """The streams of one coordinator, one at a time. Times in seconds on the caller's clock."""

    def __init__(self, lease_s: float) -> None:
        self.number = UNNUMBERED
        """Number of the latest stream."""
        self._lease_s = lease_s
        self._stream = 0
        """Counts the streams, also those without a number."""
        self._detached_s: float | None = float("-inf")
        """Since when no stream is open; None while one is."""

    @property
    def is_open(self) -> bool:
        """Whether a stream is open."""
        return self._detached_s is None

    @property
    def resumes(self) -> bool:
        """Whether the coordinator will resume the stream if it breaks."""
        return self.number != UNNUMBERED

    def open(self, number: int) -> int:
        """Opens a stream in place of the present one. Returns what `close` takes.

        Raises FailedPreconditionError (STALE_ATTACHMENT) if a newer one was opened before.
        """
        if UNNUMBERED < number <= self.number:
            raise FailedPreconditionError(
                f"attachment {self.number} was opened before attachment {number}", reason="STALE_ATTACHMENT"
            )
        self.number = number
        self._stream += 1
        self._detached_s = None
        return self._stream

    def close(self, stream: int, now: float) -> bool:
        """The stream has ended. False if it had been replaced, or had ended before."""
        if stream != self._stream or self._detached_s is not None:
            return False
        self._detached_s = now
        return True

    def takes(self, number: int) -> bool:
        """Whether this is the number of the open stream. Who does not number its streams means any."""
        return self.is_open and number in (UNNUMBERED, self.number)

    @property
    def lease_end_s(self) -> float:
        """When the requests end if no stream is opened before; infinity while one is open."""
        if self._detached_s is None:
            return float("inf")
        return self._detached_s + (self._lease_s if self.resumes else 0.0)
