"""Which host a replica is started on. Pure: what the hosts say of themselves comes in, a host's name goes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from autoscaler.actuators.actuator import Room
from autoscaler.snapshot import OTHER_POOL, PoolName
from splitserve.errors import FailedPreconditionError, ResourceExhaustedError, SplitserveError


class HostLane(IntEnum):
    """How KV travels between two hosts; more is faster."""

    TCP = 0
    RDMA = 1
    """Both are on one fabric."""
    SAME_HOST = 2
    """NVLink or shared memory."""


@dataclass(frozen=True, slots=True)
class HostCandidate:
    """A host at this moment."""

    name: str
    room: Room
    replicas: Mapping[PoolName, int] = field(default_factory=dict)
    """Those that it has, ordered ones included, by pool."""
    fabric: str = ""


def lane(one: HostCandidate, other: HostCandidate) -> HostLane:
    """The best lane between workers of two hosts."""
    if one.name == other.name:
        return HostLane.SAME_HOST
    return HostLane.RDMA if one.fabric and one.fabric == other.fabric else HostLane.TCP


def choose_host(pool: PoolName, candidates: Sequence[HostCandidate], silent: Sequence[str] = ()) -> str:
    """The host for one more replica of this pool.

    Of those that have room the host is chosen by, in this order: most NVLink inside the replica, the best lane to a
    peer without a partner (a host's workers of the other pool beyond those of this one), most such peers on the host,
    most room, fewest replicas, and their order. All GPUs of a replica are on one host, since each host's room is
    counted in whole replicas.

    `silent` hosts do not answer and are no places. Raises ResourceExhaustedError (NO_GPU, NO_ROOM) or
    FailedPreconditionError (NO_TEMPLATE; GPU_KIND with field `gpu`), each with every host's reason, if no
    host has room.
    """
    fit = [candidate for candidate in candidates if candidate.room.replicas > 0]
    if not fit:
        raise _nowhere(pool, candidates, silent)

    def unpaired(host: HostCandidate) -> int:
        return max(0, host.replicas.get(OTHER_POOL[pool], 0) - host.replicas.get(pool, 0))

    def best_lane(host: HostCandidate) -> int:
        return max((lane(host, other) for other in candidates if unpaired(other)), default=HostLane.TCP)

    def rank(host: HostCandidate) -> tuple[float, ...]:
        crowd = sum(host.replicas.values())
        return host.room.linked, best_lane(host), unpaired(host), host.room.replicas, -crowd

    return max(fit, key=rank).name


def _nowhere(pool: PoolName, candidates: Sequence[HostCandidate], silent: Sequence[str]) -> SplitserveError:
    reasons = {candidate.room.reason for candidate in candidates}
    why = [f"{candidate.name}: {candidate.room.why}" for candidate in candidates]
    why += [f"{name}: does not answer" for name in silent]
    message = f"no host has room for a {pool} replica: {'; '.join(why)}"
    if reasons == {"NO_TEMPLATE"} and not silent:
        return FailedPreconditionError(message, reason="NO_TEMPLATE")
    if reasons == {"GPU_KIND"} and not silent:
        return FailedPreconditionError(message, reason="GPU_KIND", field="gpu")
    of_gpus = bool(reasons) and reasons <= {"NO_GPU", "GPU_KIND"} and "NO_GPU" in reasons
    return ResourceExhaustedError(message, reason="NO_GPU" if of_gpus else "NO_ROOM")
