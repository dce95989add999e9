"""Merges the workers of all coordinators, and derives the pools' signals from them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from autoscaler.actuators.actuator import ActualReplica
from autoscaler.signals.serving_classes import serving_by_class
from autoscaler.snapshot import ClassSignals, PoolName, Replica, ReplicaState, StepTimeModel
from splitserve.config.engine import MAX_ADAPTERS
from splitserve.v1 import registry_pb2, scaling_pb2

_STATES: Mapping[int, ReplicaState] = {
    scaling_pb2.WORKER_STATE_STARTING: ReplicaState.STARTING,
    scaling_pb2.WORKER_STATE_STANDBY: ReplicaState.STANDBY,
    scaling_pb2.WORKER_STATE_READY: ReplicaState.READY,
    scaling_pb2.WORKER_STATE_DRAINING: ReplicaState.DRAINING,
    scaling_pb2.WORKER_STATE_SLEEPING: ReplicaState.STANDBY,
}
_RANK = {
    scaling_pb2.WORKER_STATE_STARTING: 0,
    scaling_pb2.WORKER_STATE_SLEEPING: 1,
    scaling_pb2.WORKER_STATE_STANDBY: 2,
    scaling_pb2.WORKER_STATE_READY: 3,
    scaling_pb2.WORKER_STATE_DRAINING: 4,
}
"""Where coordinators differ, the highest rank counts: a worker that one of them uses is in use."""
_POOLS: Mapping[int, PoolName] = {registry_pb2.POOL_PREFILL: "prefill", registry_pb2.POOL_DECODE: "decode"}


@dataclass(frozen=True, slots=True)
class Sighting:
    """One worker, as reported by the coordinator that sees it in the highest rank."""

    signals: scaling_pb2.WorkerSignals
    since_s: float
    """When it entered its state."""

    @property
    def name(self) -> str:
        """Worker id."""
        return self.signals.worker_id

    @property
    def pool(self) -> PoolName:
        """Its pool."""
        return _POOLS[self.signals.pool]

    @property
    def state(self) -> ReplicaState:
        """Its state. One with a spot notice is leaving, however a coordinator that has not heard of it sees it."""
        return ReplicaState.PREEMPTED if self.is_preempted else _STATES[self.signals.state]

    @property
    def is_preempted(self) -> bool:
        """Whether its machine is taken away."""
        return self.signals.HasField("preempted_in_seconds")

    @property
    def load(self) -> float:
        """Sequences that run, wait, or wait for a reservation."""
        load = self.signals.load
        return load.running_requests + load.waiting_requests + load.waiting_reservations


def merged(answers: Iterable[tuple[Iterable[scaling_pb2.ModelSignals], float]]) -> dict[str, Sighting]:
    """Each worker once, by name. `answers`: the models of each coordinator and the time of its answer."""
    found: dict[str, Sighting] = {}
    for models, at_s in answers:
        for worker in (worker for model in models for worker in model.workers):
            if worker.pool not in _POOLS or worker.state not in _STATES:
                continue
            known = found.get(worker.worker_id)
            if known is None or _RANK[worker.state] > _RANK[known.signals.state]:
                found[worker.worker_id] = Sighting(worker, at_s - worker.state_seconds)
    return dict(sorted(found.items()))


def replicas(
    pool: PoolName,
    seen: Mapping[str, Sighting],
    actual: Sequence[ActualReplica],
    now_s: float,
    wall_s: float,
) -> tuple[Replica, ...]:
    """The replicas of one pool, including those that only the actuator knows yet."""
    ours = {replica.name: replica for replica in actual if replica.pool == pool}
    found = []
    for name in sorted(ours.keys() | {name for name, worker in seen.items() if worker.pool == pool}):
        worker, replica = seen.get(name), ours.get(name)
        if worker is not None and worker.pool == pool:
            state, since_s, load = worker.state, worker.since_s, worker.load
        else:
            created_s = replica.created_wall_s if replica is not None else wall_s
            state, since_s, load = ReplicaState.STARTING, now_s - max(0.0, wall_s - created_s), 0.0
        if replica is not None and replica.stopping:
            state = ReplicaState.DRAINING
        registered = worker is not None and worker.pool == pool
        neutral = worker is not None and worker.signals.neutral
        kind = (worker.signals.replica_class if worker is not None else "") or (
            replica.replica_class if replica is not None else ""
        )
        found.append(Replica(name, state, since_s, load, registered, replica is not None, neutral, kind))
    return tuple(found)


def of_pool(pool: PoolName, seen: Mapping[str, Sighting]) -> list[scaling_pb2.WorkerSignals]:
    """The workers of one pool."""
    return [worker.signals for worker in seen.values() if worker.pool == pool]


def serving(pool: PoolName, seen: Mapping[str, Sighting]) -> list[scaling_pb2.WorkerSignals]:
    """The workers of one pool; where there is none, the neutral ones of the other, which stand in."""
    return of_pool(pool, seen) or [one.signals for one in seen.values() if one.signals.neutral]


def by_class(pool: PoolName, seen: Mapping[str, Sighting]) -> dict[str, ClassSignals]:
    """The figures of each class of a pool, by its workers in rotation; of those that stand in where it has none."""
    there = [one for one in seen.values() if one.pool == pool]
    there = there or [one for one in seen.values() if one.signals.neutral]
    classes = serving_by_class((one.signals.replica_class, one.state, one.signals) for one in there)
    return {
        name: ClassSignals(
            len(members),
            prefill_tokens_per_s(members),
            kv_capacity_tokens(members),
            max_running_requests(members),
            step_fit(members),
        )
        for name, members in classes.items()
    }


def prefill_tokens_per_s(workers: Sequence[scaling_pb2.WorkerSignals]) -> float | None:
    """Mean of the measured rates."""
    rates = [worker.load.prefill_tokens_per_second for worker in workers]
    return _mean([rate for rate in rates if rate > 0])


def step_fit(workers: Sequence[scaling_pb2.WorkerSignals]) -> StepTimeModel | None:
    """Mean of the workers' step-time fits; None without any."""
    fits = [worker.load.step_fit for worker in workers if worker.load.HasField("step_fit")]
    if not fits:
        return None
    return StepTimeModel(
        base_s=fmean(fit.base_ms for fit in fits) / 1e3,
        per_sequence_s=fmean(fit.sequence_ms for fit in fits) / 1e3,
        per_context_token_s=fmean(fit.context_token_ms for fit in fits) / 1e3,
    )


def context_tokens(workers: Sequence[scaling_pb2.WorkerSignals]) -> int:
    """KV tokens that live sequences and reservations hold, in whole blocks."""
    return sum(
        (worker.load.referenced_blocks + worker.load.reserved_blocks) * worker.block_size_tokens
        for worker in workers
    )


def kv_capacity_tokens(workers: Sequence[scaling_pb2.WorkerSignals]) -> int | None:
    """Mean KV capacity of a worker, tokens."""
    return _whole([worker.kv_capacity_tokens for worker in workers if worker.kv_capacity_tokens])


def max_running_requests(workers: Sequence[scaling_pb2.WorkerSignals]) -> int | None:
    """Mean batch limit of a worker, sequences."""
    return _whole([worker.max_running_requests for worker in workers if worker.max_running_requests])


def lane_gb_per_s(workers: Sequence[scaling_pb2.WorkerSignals]) -> float | None:
    """Median speed of the measured lanes, 10^9 bytes per second."""
    lanes = [worker.lane_gb_per_second for worker in workers if worker.HasField("lane_gb_per_second")]
    return median(lanes) if lanes else None


def kv_bytes_per_token(workers: Sequence[scaling_pb2.WorkerSignals]) -> int | None:
    """Bytes of one token's KV."""
    return _whole([worker.kv_bytes_per_token for worker in workers if worker.kv_bytes_per_token])


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _whole(values: Sequence[int]) -> int | None:
    return round(fmean(values)) if values else None


def with_served(
    before: Mapping[str, registry_pb2.ServedModel], models: Iterable[scaling_pb2.ModelSignals]
) -> dict[str, registry_pb2.ServedModel]:
    """What is known of models as they were last served. Their adapters add up, the newest MAX_ADAPTERS of each: a
    coordinator that was restarted knows those of the workers that have registered since."""
    found = dict(before)
    for model in models:
        if model.HasField("served"):
            served, earlier = registry_pb2.ServedModel(), found.get(model.model)
            served.CopyFrom(model.served)
            named = {one.name for one in served.adapters}
            others = [] if earlier is None else [one for one in earlier.adapters if one.name not in named]
            del served.adapters[:]
            served.adapters.extend([*others, *model.served.adapters][-MAX_ADAPTERS:])
            found[model.model] = served
    return found
