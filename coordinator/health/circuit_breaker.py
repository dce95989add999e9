"""The circuit breaker of a worker or of a pair of workers. Pure; time is an argument.

closed -> open       after `consecutive_failures`, or when `failure_rate` of the requests within `window_s` failed
open -> half-open    after `open_s`, doubled up to `max_open_s` for each relapse
half-open -> closed  when the one probe request that is let through gets a response
half-open -> open    when the probe fails

Requests that began before the breaker opened do not count afterwards.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from coordinator.attempt_state import MOVED
from coordinator.workers.snapshot import CircuitState
from splitserve.config.coordinator import CircuitBreakerConfig
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

FailedPart = Literal["worker", "pair"]

LONGEST_WINDOW = 256
"""Requests that the failure rate covers, at most."""
PAIR_REASONS = frozenset(
    {"TRANSFER_FAILED", "PEER_LOST", "UNKNOWN_PEER", "COMPLETION_LOST", "CHECKSUM_MISMATCH"}
)
"""KV did not get from one worker to the other; each may work fine with another peer."""
NOT_COUNTED_REASONS = frozenset({"DRAINING", "SLEEPING", "LEASE_EXPIRED", MOVED})
NOT_COUNTED = (
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    ResourceExhaustedError,
    DeadlineExceededError,
    CancelledByPeerError,
    FailedPreconditionError,
)
"""Errors caused by the request itself, its cancellation, or load; they do not count against a worker."""


def failed_part(error: SplitserveError) -> FailedPart | None:
    """The part at fault for an attempt's error: the suspect worker, the pair, or neither (None)."""
    if error.reason in PAIR_REASONS:
        return "pair"
    if isinstance(error, NOT_COUNTED) or error.reason in NOT_COUNTED_REASONS:
        return None
    return "worker"


class CircuitBreaker:
    """The breaker of one boot of a worker, or of one pair. Times are in seconds on the monotonic clock."""

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
        """Moves an open breaker to half-open once its time is over."""
        if self.state == "open" and now >= self.half_open_s:
            self.state, self._probe = "half-open", None

    def began(self, attempt_id: str) -> None:
        """An attempt was sent. The first one while half-open is the probe."""
        if self.state == "half-open" and self._probe is None:
            self._probe = attempt_id

    def release(self, attempt_id: str) -> None:
        """An attempt ended. If it was the probe and had no result, another attempt may be the probe."""
        if self._probe == attempt_id:
            self._probe = None

    def responded(self, began_s: float, now: float) -> None:
        """An attempt produced output: the worker is back, whatever happens to the attempt later."""
        if self.state != "closed" and began_s >= self._opened_s:
            self.state, self._probe, self._closed_s = "closed", None, now

    def succeeded(self, began_s: float, now: float) -> None:
        """An attempt completed."""
        self.responded(began_s, now)
        if self.state == "closed" and began_s >= self._opened_s:
            self._consecutive = 0
            self._ended.append((now, True))

    def failed(self, began_s: float, now: float) -> None:
        """An attempt failed, and this worker or pair is at fault."""
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
