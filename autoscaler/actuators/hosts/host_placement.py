"""Chooses the host on which a replica is started. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from autoscaler.actuators.actuator import Room
from splitserve.errors import FailedPreconditionError, ResourceExhaustedError, SplitserveError
from splitserve.roles import OTHER_POOL, PoolName


class HostLane(IntEnum):
    """How KV travels between two hosts; more is faster."""

    TCP = 0
    RDMA = 1
    """Both hosts are on one fabric."""
    SAME_HOST = 2
    """NVLink or shared memory."""


@dataclass(frozen=True, slots=True)
class HostCandidate:
    """A host at this moment."""

    name: str
    room: Room
    replicas: Mapping[PoolName, int] = field(default_factory=dict)
    """Replicas on the host by pool, ordered ones included."""
    fabric: str = ""


def lane(host: HostCandidate, other: HostCandidate) -> HostLane:
    """The best lane between workers of two hosts."""
    if host.name == other.name:
        return HostLane.SAME_HOST
    return HostLane.RDMA if host.fabric and host.fabric == other.fabric else HostLane.TCP


def choose_host(pool: PoolName, candidates: Sequence[HostCandidate], silent: Sequence[str] = ()) -> str:
    """The host for one more replica of this pool.

    An unpaired peer is a worker of the other pool on a host that has fewer workers of this pool. Of the hosts with
    room the choice is, in this order: most NVLink pairs inside the replica, the best lane to an unpaired peer, most
    unpaired peers on the host, most room, fewest replicas, first in order. All GPUs of a replica are on one host, since
    each host's room is counted in whole replicas.

    `silent` names the hosts that do not answer. Raises, with every host's reason, if no host has room:
    ResourceExhaustedError (NO_GPU, NO_ROOM) or FailedPreconditionError (NO_TEMPLATE; GPU_KIND with field `gpu`).
    """
    fit = [candidate for candidate in candidates if candidate.room.replicas > 0]
    if not fit:
        raise _nowhere(pool, candidates, silent)

    def unpaired(host: HostCandidate) -> int:
        return max(0, host.replicas.get(OTHER_POOL[pool], 0) - host.replicas.get(pool, 0))

    def best_lane(host: HostCandidate) -> int:
        return max((lane(host, other) for other in candidates if unpaired(other)), default=HostLane.TCP)

    def rank(host: HostCandidate) -> tuple[float, ...]:
        replicas = sum(host.replicas.values())
        return host.room.linked, best_lane(host), unpaired(host), host.room.replicas, -replicas

    return max(fit, key=rank).name


def _nowhere(pool: PoolName, candidates: Sequence[HostCandidate], silent: Sequence[str]) -> SplitserveError:
    reasons = {candidate.room.reason for candidate in candidates}
    explained = [f"{candidate.name}: {candidate.room.why}" for candidate in candidates]
    explained += [f"{name}: does not answer" for name in silent]
    message = f"no host has room for a {pool} replica: {'; '.join(explained)}"
    if reasons == {"NO_TEMPLATE"} and not silent:
        return FailedPreconditionError(message, reason="NO_TEMPLATE")
    if reasons == {"GPU_KIND"} and not silent:
        return FailedPreconditionError(message, reason="GPU_KIND", field="gpu")
    lacks_gpus = "NO_GPU" in reasons and reasons <= {"NO_GPU", "GPU_KIND"}
    return ResourceExhaustedError(message, reason="NO_GPU" if lacks_gpus else "NO_ROOM")
