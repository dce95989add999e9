"""Since when each worker is in its state. Pure; forgets workers that left."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from coordinator.pools import PoolName, PoolSnapshot, WorkerKey, WorkerState
from splitserve.v1 import scaling_pb2

POOLS: tuple[PoolName, PoolName] = ("prefill", "decode")
STATE_NAMES: Mapping[WorkerState, str] = MappingProxyType(
    {
        scaling_pb2.WORKER_STATE_STARTING: "starting",
        scaling_pb2.WORKER_STATE_STANDBY: "standby",
        scaling_pb2.WORKER_STATE_READY: "ready",
        scaling_pb2.WORKER_STATE_DRAINING: "draining",
    }
)


class WorkerStates:
    """The states of all workers, as of the last `update`. What is read is replaced, never changed in place."""

    def __init__(self) -> None:
        self._since: Mapping[WorkerKey, tuple[WorkerState, float]] = {}

    def update(self, snapshot: PoolSnapshot, now: float) -> None:
        """Notes who has come into another state."""
        states = {worker.key: snapshot.state_of(worker) for worker in snapshot.workers}
        before = self._since
        self._since = {
            key: before[key] if key in before and before[key][0] == state else (state, now)
            for key, state in states.items()
        }

    def of(self, key: WorkerKey) -> tuple[WorkerState, float]:
        """State and the time it began; raises KeyError for a worker that was not in the last snapshot."""
        return self._since[key]


def state_counts(snapshot: PoolSnapshot) -> dict[tuple[str, str], int]:
    """How many workers by (pool, state), zeros included."""
    counts: dict[tuple[str, str], int] = {
        (pool, state): 0 for pool in POOLS for state in STATE_NAMES.values()
    }
    for worker in snapshot.workers:
        counts[worker.pool, STATE_NAMES[snapshot.state_of(worker)]] += 1
    return counts
