"""How long replicas take to start: measured from outside, and the phases that they report."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from autoscaler.snapshot import UP, Replica, ReplicaStart, ReplicaState
from splitserve.roles import POOLS, PoolName
from splitserve.v1 import scaling_pb2

MAX_COLD_STARTS = 5
"""How many of the latest cold starts of a pool count."""


class ColdStarts:
    """Measured cold starts. Only replicas that were observed starting and then up count, not adopted ones."""

    def __init__(self) -> None:
        self._starting: set[str] = set()
        self._were_up: set[tuple[str, float]] = set()
        """Replicas that have been up, by name and creation time: one whose host was cut off does not start again."""
        self._took_s: dict[PoolName, deque[float]] = {pool: deque(maxlen=MAX_COLD_STARTS) for pool in POOLS}

    def look(self, pools: Mapping[PoolName, Sequence[Replica]], wall_ahead_s: float) -> None:
        """Updates with the existing replicas. `wall_ahead_s`: the wall clock less the clock of `Replica.since_s`."""
        starting: set[str] = set()
        were_up: set[tuple[str, float]] = set()
        ours = [(pool, replica) for pool, members in pools.items() for replica in members if replica.managed]
        for pool, replica in ours:
            start = replica.name, replica.created_wall_s
            if start in self._were_up or replica.state in UP:
                were_up.add(start)
            elif replica.state is ReplicaState.STARTING:
                starting.add(replica.name)
            if replica.state in UP and replica.name in self._starting:
                up_wall_s = replica.since_s + wall_ahead_s
                self._took_s[pool].append(max(0.0, up_wall_s - replica.created_wall_s))
        self._starting, self._were_up = starting, were_up

    def of(self, pool: PoolName) -> float | None:
        """Median of the latest cold starts, seconds; None before the first."""
        took_s = self._took_s[pool]
        return median(took_s) if took_s else None


def start_phases(workers: Sequence[scaling_pb2.WorkerSignals]) -> ReplicaStart | None:
    """Medians of the phases that workers report of their starts; None when none reports any."""
    starts = [worker.start for worker in workers if worker.HasField("start")]
    if not starts:
        return None
    return ReplicaStart(
        median(start.process_seconds for start in starts),
        median(start.weights_seconds for start in starts),
        median(start.warm_up_seconds for start in starts),
    )
