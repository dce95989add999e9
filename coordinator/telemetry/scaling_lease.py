"""Leases of autoscalers: of several, one acts. Pure; `now` is on the coordinator's monotonic clock, in seconds.

The fencing number of a lease is greater than all earlier numbers, also those of earlier coordinator processes, since it
begins at the time of day. A plan with another number is refused, so an autoscaler that slept through the end of its
lease changes nothing.

A coordinator that has just started does not know the holder. Until the requested length has passed since its start, it
only confirms leases that their holders still hold by their own clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from splitserve.client.scaling_client import MAX_LEASE_S
from splitserve.errors import FailedPreconditionError, InvalidArgumentError
from splitserve.v1 import scaling_pb2

MAX_HOLDER_BYTES = 128
MAX_LEASES = 1024
"""Most models with a lease at the same time."""


@dataclass(frozen=True, slots=True)
class ScalingLease:
    """The right of `holder` to scale `model` (empty: all models) until `expires_s`."""

    holder: str
    model: str
    number: int
    expires_s: float


class ScalingLeases:
    """The leases in force, by model."""

    def __init__(self, booted_s: float, first_number: Callable[[], int]) -> None:
        self._booted_s = booted_s
        self._first_number = first_number
        self._last_number = 0
        self._leases: dict[str, ScalingLease] = {}

    def acquire(
        self, request: scaling_pb2.AcquireLeaseRequest, now: float
    ) -> scaling_pb2.AcquireLeaseResponse:
        """Takes, extends or gives up a lease. Raises InvalidArgumentError naming field and bound."""
        valid_s = _checked(request)
        others = [lease for lease in self._in_force(request.model, now) if lease.holder != request.holder]
        if others:
            return _response(False, others[0], now)
        own = self._leases.get(request.model)
        if valid_s <= 0:
            self._leases.pop(request.model, None)
            return _response(False, None, now)
        if request.number and request.number == (
            own.number if own else max(request.number, self._last_number)
        ):
            number = request.number  # in force, or given by an earlier coordinator process
        elif now - self._booted_s < valid_s and own is None:
            return scaling_pb2.AcquireLeaseResponse(expires_in_seconds=self._booted_s + valid_s - now)
        elif len(self._leases) >= MAX_LEASES and own is None:
            raise InvalidArgumentError(f"at most {MAX_LEASES} models may have a lease at once", field="model")
        else:
            number = max(self._last_number + 1, self._first_number())
        self._last_number = max(self._last_number, number)
        lease = ScalingLease(request.holder, request.model, number, now + valid_s)
        self._leases[request.model] = lease
        return _response(True, lease, now)

    def check_plan(self, lease_number: int, now: float) -> None:
        """Raises FailedPreconditionError (STALE_LEASE) unless a lease in force has this number, or the number is 0 and
        no lease is in force."""
        for model in list(self._leases):
            self._in_force(model, now)
        if lease_number == 0 and not self._leases:
            return
        if any(lease.number == lease_number for lease in self._leases.values()):
            return
        holders = ", ".join(sorted(lease.holder for lease in self._leases.values())) or "nobody"
        message = f"lease_number {lease_number} is not in force; {holders} may scale"
        raise FailedPreconditionError(message, reason="STALE_LEASE", field="lease_number")

    def _in_force(self, model: str, now: float) -> list[ScalingLease]:
        """The leases that concern this model. Forgets ended ones."""
        self._leases = {name: lease for name, lease in self._leases.items() if now < lease.expires_s}
        return [lease for name, lease in self._leases.items() if not name or not model or name == model]


def _checked(request: scaling_pb2.AcquireLeaseRequest) -> float:
    if not 1 <= len(request.holder.encode()) <= MAX_HOLDER_BYTES:
        raise InvalidArgumentError(f"holder must have 1 to {MAX_HOLDER_BYTES} bytes", field="holder")
    valid_s = request.valid_for.seconds + request.valid_for.nanos / 1e9
    if not 0 <= valid_s <= MAX_LEASE_S:
        message = f"valid_for must be at least 0 and at most {MAX_LEASE_S:g} s, not {valid_s:g} s"
        raise InvalidArgumentError(message, field="valid_for")
    return valid_s


def _response(granted: bool, lease: ScalingLease | None, now: float) -> scaling_pb2.AcquireLeaseResponse:
    if lease is None:
        return scaling_pb2.AcquireLeaseResponse(granted=granted)
    return scaling_pb2.AcquireLeaseResponse(
        granted=granted,
        number=lease.number,
        holder=lease.holder,
        expires_in_seconds=lease.expires_s - now,
    )
