"""When a worker, or the lane between two, has failed too often to be asked for now. Pure: events and time in.

closed -> open     after `consecutive_failures`, or when `failure_rate` of the last requests within `window_s` failed
open -> half-open  after a time that doubles from `open_s` to `max_open_s` as long as it is not well in between
half-open -> closed  when the one request that is let through gets an answer; -> open when it fails

Requests that began before a breaker opened say nothing about it afterwards.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from coordinator.pools import CircuitState
from splitserve.errors import (
    CancelledByPeerError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    SplitserveError,
    UnauthenticatedError,
)
from splitserve.traffic_settings import CircuitBreakerConfig

Blamed = Literal["worker", "pair"]

LONGEST_WINDOW = 256
"""Requests that the failure rate looks back at most."""
PAIR_REASONS = frozenset(
    {"TRANSFER_FAILED", "PEER_LOST", "UNKNOWN_PEER", "COMPLETION_LOST", "CHECKSUM_MISMATCH"}
)
"""KV did not get from one worker to the other: either may be well beside another partner."""
INNOCENT_REASONS = frozenset({"DRAINING", "LEASE_EXPIRED"})
INNOCENT = (
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    ResourceExhaustedError,
    DeadlineExceededError,
    CancelledByPeerError,
    FailedPreconditionError,
)
"""The request's own fault, its end, or load: nothing that a worker should rest for."""


def blamed(error: SplitserveError) -> Blamed | None:
    """Whose failure an attempt's error is: the culprit's, the pair's, or nobody's."""
    if error.reason in PAIR_REASONS:
        return "pair"
    if isinstance(error, INNOCENT) or error.reason in INNOCENT_REASONS:
        return None
    return "worker"


class CircuitBreaker:
    """The breaker of one boot of a worker, or of one pair. Times are of one monotonic clock."""

    def __init__(self, policy: CircuitBreakerConfig) -> None:
        self.state: CircuitState = "closed"
        self.half_open_s = 0.0
        """When an open breaker becomes half-open."""
        self._policy = policy
        self._probe: str | None = None
        self._opened_s = self._closed_s = float("-inf")
        self._openings = 0
        self._consecutive = 0
        self._ended: deque[tuple[float, bool]] = deque(maxlen=LONGEST_WINDOW)

    @property
    def admits(self) -> bool:
        """Whether a request may be sent now."""
        return self.state == "closed" or (self.state == "half-open" and self._probe is None)

    def tick(self, now: float) -> None:
        """Lets time pass."""
        if self.state == "open" and now >= self.half_open_s:
            self.state, self._probe = "half-open", None

    def began(self, attempt_id: str) -> None:
        """An attempt was sent here; half-open, the first one is the probe."""
        if self.state == "half-open" and self._probe is None:
            self._probe = attempt_id

    def let_go(self, attempt_id: str) -> None:
        """An attempt ended without saying anything of the worker, or has ended after it did."""
        if self._probe == attempt_id:
            self._probe = None

    def answered(self, began_s: float, now: float) -> None:
        """Output came for an attempt: whatever happens to it later, the worker is back."""
        if self.state != "closed" and began_s >= self._opened_s:
            self.state, self._probe, self._closed_s = "closed", None, now

    def succeeded(self, began_s: float, now: float) -> None:
        """An attempt ended as it should."""
        self.answered(began_s, now)
        if self.state == "closed" and began_s >= self._opened_s:
            self._consecutive = 0
            self._ended.append((now, True))

    def failed(self, began_s: float, now: float) -> None:
        """An attempt failed, and the blame is here."""
        if began_s < self._opened_s or self.state == "open":
            return
        self._consecutive += 1
        self._ended.append((now, False))
        if self.state == "half-open" or self._too_often(now):
            self._open(now)

    def _too_often(self, now: float) -> bool:
        policy = self._policy
        if self._consecutive >= policy.consecutive_failures:
            return True
        recent = [ok for ended_s, ok in self._ended if now - ended_s <= policy.window_s]
        return len(recent) >= policy.min_requests and recent.count(False) >= policy.failure_rate * len(recent)

    def _open(self, now: float) -> None:
        relapsed = self.state == "half-open" or now - self._closed_s < self._policy.window_s
        self._openings = self._openings + 1 if relapsed else 1
        rest_s = min(self._policy.max_open_s, self._policy.open_s * 2.0 ** min(self._openings - 1, 64))
        self.state, self._probe, self._opened_s, self.half_open_s = "open", None, now, now + rest_s
        self._consecutive = 0
        self._ended.clear()
