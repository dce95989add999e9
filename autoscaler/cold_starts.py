"""How long replicas take from the order until they are ready: measured, for whoever plans ahead. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from autoscaler.actuator import ActualReplica
from autoscaler.snapshot import POOLS, PoolName, ReplicaState

REMEMBERED = 5
_UP = (ReplicaState.READY, ReplicaState.STANDBY)


class ColdStarts:
    """Replicas that were seen starting and then up count; adopted ones, up already, do not."""

    def __init__(self) -> None:
        self._starting: set[str] = set()
        self._took_s: dict[PoolName, deque[float]] = {pool: deque(maxlen=REMEMBERED) for pool in POOLS}

    def look(
        self, actual: Sequence[ActualReplica], up_since: Mapping[str, tuple[ReplicaState, float]]
    ) -> None:
        """Takes what exists, and by name how far it is and since when, in seconds since the epoch."""
        starting = set()
        for replica in actual:
            state, since_s = up_since.get(replica.name, (ReplicaState.STARTING, 0.0))
            if state is ReplicaState.STARTING:
                starting.add(replica.name)
            elif state in _UP and replica.name in self._starting:
                self._took_s[replica.pool].append(max(0.0, since_s - replica.created_wall_s))
        self._starting = starting

    def of(self, pool: PoolName) -> float | None:
        """Median of the latest ones, seconds; None before the first."""
        took_s = self._took_s[pool]
        return median(took_s) if took_s else None
