"""Merges the workers of all coordinators, and derives the pools' signals from them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from autoscaler.actuators.actuator import ActualReplica, Presence
from autoscaler.snapshot import Replica, ReplicaState
from splitserve.config.engine import MAX_ADAPTERS
from splitserve.latency_model import DecodeLatency, LatencyModel, mean_latency
from splitserve.roles import POOLS, PoolName
from splitserve.v1 import registry_pb2, scaling_pb2

_STATES: Mapping[int, ReplicaState] = {
    scaling_pb2.WORKER_STATE_STARTING: ReplicaState.STARTING,
    scaling_pb2.WORKER_STATE_STANDBY: ReplicaState.STANDBY,
    scaling_pb2.WORKER_STATE_READY: ReplicaState.READY,
    scaling_pb2.WORKER_STATE_DRAINING: ReplicaState.DRAINING,
}
"""When coordinators differ, the last state in this order counts: a worker that one coordinator uses is in use."""
_RANK = {state: rank for rank, state in enumerate(_STATES)}
_ROLES: Mapping[int, tuple[PoolName, ...]] = {
    registry_pb2.ROLE_PREFILL: ("prefill",),
    registry_pb2.ROLE_DECODE: ("decode",),
    registry_pb2.ROLE_BOTH: POOLS,
}
"""The pools that a worker of each role is in."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """One worker, as reported by the coordinator that has it in the highest state by `_RANK`."""

    signals: scaling_pb2.WorkerSignals
    since_s: float
    """When it entered its state."""

    @property
    def pools(self) -> tuple[PoolName, ...]:
        """The pools that it serves by its role."""
        return _ROLES[self.signals.role]

    @property
    def state(self) -> ReplicaState:
        """The worker's state. A worker with a notice is leaving, even if a coordinator has not heard of the notice."""
        if self.signals.HasField("preempted_in_seconds"):
            return ReplicaState.PREEMPTED
        return _STATES[self.signals.state]

    @property
    def load(self) -> float:
        """Sequences that run, wait, or wait for a reservation."""
        load = self.signals.load
        return load.running_requests + load.waiting_requests + load.waiting_reservations

    def replica(self, *, ours: bool) -> Replica:
        """The worker as a replica."""
        both = len(self.pools) > 1
        return Replica(
            self.signals.worker_id,
            self.state,
            self.since_s,
            self.load,
            ours=ours,
            both=both,
            can_change_role=not both and self.signals.changes_role,
        )


def merged(answers: Iterable[tuple[Iterable[scaling_pb2.ModelSignals], float]]) -> dict[str, Sighting]:
    """Each worker once, by name. `answers`: the models of each coordinator and the time of its answer."""
    sightings: dict[str, Sighting] = {}
    for models, at_s in answers:
        for worker in (worker for model in models for worker in model.workers):
            if worker.role not in _ROLES or worker.state not in _STATES:
                continue
            known = sightings.get(worker.worker_id)
            if known is None or _RANK[worker.state] > _RANK[known.signals.state]:
                sightings[worker.worker_id] = Sighting(worker, at_s - worker.state_seconds)
    return dict(sorted(sightings.items()))


def joined(
    seen: Mapping[str, Sighting], actual: Sequence[ActualReplica] | None, now_s: float, wall_s: float
) -> dict[PoolName, tuple[Replica, ...]]:
    """The replicas of each pool in order of their names, including those that only the actuator knows yet. A worker is
    in the pools of its role, wherever it was started.

    Replicas that were given up are left out, unless a coordinator still sees them. Without an actuator (`actual` None)
    every worker counts as ours.
    """
    listed = {
        replica.name: replica
        for replica in actual or ()
        if replica.presence is not Presence.GIVEN_UP or replica.name in seen
    }
    pools: dict[PoolName, list[Replica]] = {pool: [] for pool in POOLS}
    for name in sorted(listed.keys() | seen.keys()):
        worker, ordered = seen.get(name), listed.get(name)
        if worker is not None:
            replica, its_pools = worker.replica(ours=actual is None), worker.pools
        if ordered is not None:
            if worker is None:
                since_s = now_s - max(0.0, wall_s - ordered.created_wall_s)
                replica = Replica(name, ReplicaState.STARTING, since_s, registered=False)
                its_pools = (ordered.pool,)
            replica = replace(
                replica,
                state=ReplicaState.DRAINING if ordered.stopping else replica.state,
                ours=True,
                created_wall_s=ordered.created_wall_s,
                placeholder=ordered.placeholder,
                reachable=ordered.presence is Presence.HERE,
            )
        for pool in its_pools:
            pools[pool].append(replica)
    return {pool: tuple(members) for pool, members in pools.items()}


def of_pool(pool: PoolName, seen: Mapping[str, Sighting]) -> list[scaling_pb2.WorkerSignals]:
    """The workers of one pool, those with both roles included."""
    return [worker.signals for worker in seen.values() if pool in worker.pools]


def prefill_tokens_per_s(workers: Sequence[scaling_pb2.WorkerSignals]) -> float | None:
    """Mean of the rates by the workers' latency models."""
    rates = [LatencyModel.from_proto(worker.load.latency).prefill_tokens_per_s for worker in workers]
    measured = [rate for rate in rates if rate > 0]
    return fmean(measured) if measured else None


def decode_latency(workers: Sequence[scaling_pb2.WorkerSignals]) -> DecodeLatency | None:
    """Mean of the workers' models of a decode step; None without any."""
    return mean_latency([LatencyModel.from_proto(worker.load.latency) for worker in workers]).decode


def context_tokens(workers: Sequence[scaling_pb2.WorkerSignals]) -> int:
    """KV tokens that live sequences and reservations hold, in whole blocks."""
    return sum(
        (worker.load.referenced_blocks + worker.load.reserved_blocks) * worker.block_size_tokens
        for worker in workers
    )


def lane_gb_per_s(workers: Sequence[scaling_pb2.WorkerSignals]) -> float | None:
    """Median speed of the measured lanes, 10^9 bytes per second."""
    lanes = [worker.lane_gb_per_second for worker in workers if worker.HasField("lane_gb_per_second")]
    return median(lanes) if lanes else None


def mean_reported(values: Iterable[int]) -> int | None:
    """Rounded mean of the reported values; None without any. A worker reports 0 for a value that it does not know."""
    known = [value for value in values if value]
    return round(fmean(known)) if known else None


def with_served(
    before: Mapping[str, registry_pb2.ServedModel], models: Iterable[scaling_pb2.ModelSignals]
) -> dict[str, registry_pb2.ServedModel]:
    """The models as they were last served, by name. Earlier adapters are kept, up to MAX_ADAPTERS of a model: after a
    restart a coordinator knows only those of the workers that have registered since."""
    models_served = dict(before)
    for model in models:
        if model.HasField("served"):
            served, earlier = registry_pb2.ServedModel(), models_served.get(model.model)
            served.CopyFrom(model.served)
            if earlier is not None:
                names = {adapter.name for adapter in model.served.adapters}
                kept = [adapter for adapter in earlier.adapters if adapter.name not in names]
                del served.adapters[:]
                served.adapters.extend([*kept, *model.served.adapters][-MAX_ADAPTERS:])
            models_served[model.model] = served
    return models_served
