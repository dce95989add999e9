"""The registered workers: soft state that the workers rebuild after a restart of the coordinator.

No I/O and no clock: `now` is an argument, in seconds on the monotonic clock. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from coordinator.workers.load import WorkerLoads
from coordinator.workers.prefix_index import PrefixIndex
from coordinator.workers.registration import ReplacedBoots, check_beside, checked_worker
from coordinator.workers.rotation import NO_PLAN, Joining, RotationPlan, after_plan
from coordinator.workers.snapshot import (
    CLOSED_CIRCUIT,
    COUNTED_REQUESTS,
    CircuitStatus,
    Model,
    ModelCatalog,
    PoolSnapshot,
    Worker,
    WorkerKey,
)
from splitserve.errors import NotFoundError
from splitserve.logs import log_event
from splitserve.roles import ROLE_NAMES
from splitserve.v1 import kv_transfer_pb2, registry_pb2

MAX_ENDED = 256
"""Ended boots announced to workers that take KV. A worker that misses one waits until the ticket expires."""
SWEPT_SHARDS = 64
"""Shards of the prefix index swept per call of `expire`."""

T = TypeVar("T")


class Registry:
    """The registered workers.

    `version` grows with every change that can alter which pairs may serve (membership, readiness, draining,
    connections, circuit breakers, rotation, roles); load reports alone do not change it. `prefixes` has the workers'
    caches, `loads` their loads.
    """

    def __init__(self, heartbeat_timeout_s: float, prefixes: PrefixIndex | None = None) -> None:
        self.version = 0
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.prefixes = PrefixIndex() if prefixes is None else prefixes
        self.loads = WorkerLoads()
        self._workers: dict[str, Worker] = {}
        """Sorted by id, so that a snapshot is a plain copy."""
        self._snapshot: PoolSnapshot | None = None
        self._joining = Joining()
        self._silent: set[WorkerKey] = set()
        """Workers without a report stream whose output stream is open."""
        self._endpoints: dict[WorkerKey, kv_transfer_pb2.TransferEndpoint] = {}
        self._last_seen_s: dict[WorkerKey, float] = {}
        self._catalog = ModelCatalog()
        self._ended: dict[str, None] = {}
        self._replaced = ReplacedBoots()
        self._plan = NO_PLAN
        self._listeners: list[Callable[[Worker | None], None]] = []
        self._changed = asyncio.Event()

    @property
    def plan(self) -> RotationPlan:
        """The rotation plan in force; `NO_PLAN` if there is none."""
        return self._plan

    def subscribe(self, listener: Callable[[Worker | None], None]) -> None:
        """Calls `listener` with a worker after each of its load reports, and with None when `version` has changed. It
        must be cheap and must not raise."""
        self._listeners.append(listener)

    def apply_plan(self, plan: RotationPlan) -> None:
        """Replaces the plan in force."""
        before, self._plan = self._plan, plan
        for on_demand in plan.on_demand.values():
            self._catalog.know(on_demand.model, on_demand.adapters)
        if plan.differs_beyond_rotation(before):
            self._bump_version()
        self._set_rotation(plan.in_rotation)

    def register(self, request: registry_pb2.RegisterRequest, now: float, certificate: str = "") -> Worker:
        """Adds a worker and replaces an older boot of the same id. Idempotent for the same boot.

        `certificate`: fingerprint of the caller's certificate. While a worker is registered, its id cannot register
        with another certificate: UnavailableError (WORKER_ID_TAKEN). Raises InvalidArgumentError for a wrong field, and
        FailedPreconditionError (LAYOUT_MISMATCH, TRANSPORT_MISMATCH, MODEL_MISMATCH, ADAPTER_MISMATCH, WORKER_REPLACED)
        if the worker does not fit the others. The registry is unchanged after an error.
        """
        worker = checked_worker(request, certificate)
        older = self._workers.get(worker.worker_id)
        if older is not None:
            self._replaced.check_takes(worker, older)
        others = ((other, self._endpoints[other.key]) for other in self._workers.values())
        check_beside(worker, request.endpoint, others)
        if older is not None and older.key == worker.key:
            self._last_seen_s[worker.key] = now
            return older
        if older is not None:
            self._replaced.add(older.key)
            self.drop(older.key, "replaced by a new boot")
        worker = dataclasses.replace(worker, in_rotation=self._plan.in_rotation(worker))
        self._workers = dict(sorted({**self._workers, worker.worker_id: worker}.items()))
        self._catalog.add(worker.model.name, worker.adapters)
        self.loads.take_role(worker)
        cold = worker.computes_prompts and bool(self.prefixes.recent.of(worker.model.name))
        self._joining.add(worker, cold=cold)
        self._endpoints[worker.key] = request.endpoint
        self._last_seen_s[worker.key] = now
        self._bump_version()
        log_event("worker.registered", worker_id=worker.worker_id, role=worker.role, model=worker.model.name)
        return worker

    def report(self, request: registry_pb2.ReportRequest, now: float) -> Worker:
        """Takes a load report, which is also the heartbeat. Raises NotFoundError if the boot must register again."""
        worker = self._workers.get(request.worker_id)
        if worker is None or worker.epoch != request.epoch:
            message = f"worker {request.worker_id!r} is not registered under this epoch"
            raise NotFoundError(message, reason="WORKER_NOT_REGISTERED", field="worker_id")
        role = ROLE_NAMES.get(request.role, worker.role)
        self._last_seen_s[worker.key] = now
        self._silent.discard(worker.key)
        if request.HasField("cache_events"):
            self.prefixes.apply(worker.key, request.cache_events)
        reported = worker.reported_as(request, role, self.prefixes.slot_of(worker.key), now)
        self.loads.on_report(worker.key, request.load)
        self._put(reported)
        if role != worker.role:
            self.loads.take_role(reported)
            changed: dict[str, Any] = {"from": worker.role, "to": role}
            log_event("worker.role_changed", worker_id=worker.worker_id, **changed)
        if worker.preempted_by_s is None and (left_s := reported.preempted_in_s(now)) is not None:
            source = request.preemption.source
            log_event("worker.preempted", worker_id=worker.worker_id, source=source, left_s=round(left_s, 3))
        if self._join(now) or _serving_state(reported) != _serving_state(worker):
            self._bump_version()
        reported = self._workers[worker.worker_id]
        for listener in self._listeners:
            listener(reported)
        return reported

    def report_ended(self, key: WorkerKey) -> None:
        """Drops a worker whose report stream has ended. A worker whose output stream is open still lives: it gets no
        new requests until it reports again, and is dropped when its output stream ends, too, or by `expire`."""
        worker = self.get(key)
        if worker is not None and worker.output_open:
            self._silent.add(key)
            self._put(dataclasses.replace(worker, reported=False))
            self._bump_version()
        else:
            self.drop(key, "its report stream ended")

    def cold_workers(self) -> list[Worker]:
        """The usable workers that wait to be warmed before they join."""
        workers = (self.get(key) for key in self._joining.cold)
        return [worker for worker in workers if worker is not None and worker.usable]

    def warmed(self, key: WorkerKey) -> None:
        """Ends the warming of a worker, which joins once its lanes are measured."""
        self._joining.cold.discard(key)
        if self._join():
            self._bump_version()

    def set_output_open(self, key: WorkerKey, is_open: bool) -> None:
        """Sets whether a worker's output stream is open. Unknown workers are ignored."""
        worker = self.get(key)
        if not is_open and key in self._silent:
            self.drop(key, "its streams have ended")
        elif worker is not None and worker.output_open != is_open:
            self._put(dataclasses.replace(worker, output_open=is_open))
            self._join()
            self._bump_version()

    def set_circuit_statuses(self, circuits: Mapping[WorkerKey, CircuitStatus]) -> None:
        """Sets the circuit status of all workers; the status of a worker that is not named is closed."""
        changed = []
        for worker in self._workers.values():
            status = circuits.get(worker.key, CLOSED_CIRCUIT)
            if status != worker.circuit:
                changed.append(dataclasses.replace(worker, circuit=status))
        self._replace(changed)

    def count_request(self, key: WorkerKey) -> None:
        """Counts a request as sent to a worker, up to `COUNTED_REQUESTS`. Its work is counted in `loads`."""
        worker = self.get(key)
        if worker is not None and worker.total_requests < COUNTED_REQUESTS:
            self._put(dataclasses.replace(worker, total_requests=worker.total_requests + 1))

    def drop(self, key: WorkerKey, why: str) -> bool:
        """Removes a worker. False if this boot is not registered."""
        worker = self.get(key)
        if worker is None:
            return False
        del self._workers[worker.worker_id], self._endpoints[key], self._last_seen_s[key]
        self._joining.remove(worker)
        self._silent.discard(key)
        self.prefixes.forget(key)
        self.loads.remove(key)
        self._bump_version()
        log_event("worker.dropped", worker_id=worker.worker_id, role=worker.role, why=why)
        return True

    def expire(self, now: float, absent_s: float = 0.0) -> None:
        """Drops workers that exceeded the heartbeat timeout, ends an expired plan, sweeps part of the prefix index.

        `absent_s`: seconds since the last call in which this process did not run, so that it could hear no worker.
        """
        self.prefixes.sweep(SWEPT_SHARDS)
        for key, seen_s in self._last_seen_s.items():
            self._last_seen_s[key] = min(now, seen_s + absent_s)
        if now >= self._plan.expires_s:
            log_event("plan.expired", standby=len(self._plan.standby))
            self._plan = NO_PLAN
            self._set_rotation(after_plan)
            self._bump_version()
        for key, seen_s in list(self._last_seen_s.items()):
            if now - seen_s > self.heartbeat_timeout_s:
                self.drop(key, f"silent for more than {self.heartbeat_timeout_s:g} s")

    def mark_ended(self, worker: Worker) -> None:
        """Records that the process of a boot has ended, so that it writes no more."""
        self._ended[worker.agent_id] = None
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        self._bump_version()

    def has_ended(self, worker: Worker) -> bool:
        """Whether this boot's process was recorded as ended."""
        return worker.agent_id in self._ended

    def ended_writers_for(self, worker: Worker) -> list[str]:
        """Agent ids of the latest MAX_ENDED ended writers, for a worker that takes KV and can release their blocks;
        else empty."""
        return list(self._ended) if worker.takes_kv else []

    def get(self, key: WorkerKey) -> Worker | None:
        """The worker in its current state, if this boot is registered."""
        worker = self._workers.get(key[0])
        return worker if worker is not None and worker.epoch == key[1] else None

    def snapshot(self) -> PoolSnapshot:
        """All workers as they are now. The same object until one of them changes."""
        if self._snapshot is None:
            self._snapshot = PoolSnapshot(tuple(self._workers.values()))
        return self._snapshot

    def known_models(self) -> Mapping[str, Model]:
        """All models and adapters that have had a worker since the start, or were in a plan, by name."""
        return self._catalog.models

    def peers_of(self, worker: Worker) -> list[kv_transfer_pb2.TransferEndpoint]:
        """Transfer endpoints of the workers of its model to which this worker writes KV."""
        return [
            self._endpoints[peer.key]
            for peer in self._workers.values()
            if peer.model.name == worker.model.name
            and peer.worker_id != worker.worker_id
            and worker.writes_to(peer)
        ]

    async def wait_change(self, version: int) -> int:
        """Waits until `version` differs from the given one; returns the new one."""
        while self.version == version:
            await self._changed.wait()
        return self.version

    async def wait_until(self, condition: Callable[[], T], wait_s: float) -> T:
        """The first truthy result of `condition`, evaluated at each change of `version`, or its last result after
        `wait_s` seconds."""
        clock, version, result = asyncio.get_running_loop().time, self.version, condition()
        deadline_s = clock() + wait_s
        while not result and (left_s := deadline_s - clock()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self.wait_change(version)
            version, result = self.version, condition()
        return result

    def _join(self, now: float = 0.0) -> bool:
        """Joins the workers that may join. Returns whether any did."""
        joining = self._joining.ready(self._workers, now)
        for worker in joining:
            self._put(dataclasses.replace(worker, joined=True))
            log_event("worker.joined", worker_id=worker.worker_id, role=worker.role)
        return bool(joining)

    def _set_rotation(self, in_rotation: Callable[[Worker], bool]) -> None:
        moved = [
            dataclasses.replace(worker, in_rotation=not worker.in_rotation)
            for worker in self._workers.values()
            if in_rotation(worker) != worker.in_rotation
        ]
        for worker in moved:
            state = "active" if worker.in_rotation else "standby"
            log_event("worker.rotated", worker_id=worker.worker_id, role=worker.role, state=state)
        self._replace(moved)

    def _replace(self, changed: Sequence[Worker]) -> None:
        if changed:
            self._workers.update((worker.worker_id, worker) for worker in changed)
            self._bump_version()

    def _put(self, worker: Worker) -> None:
        self._workers[worker.worker_id] = worker
        self._snapshot = None

    def _bump_version(self) -> None:
        self.version += 1
        self._snapshot = None
        self._catalog.update(self.snapshot().models())
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for listener in self._listeners:
            listener(None)


def _serving_state(worker: Worker) -> tuple[object, ...]:
    """The part of a report that can alter which pairs may serve, or for which a request may wait."""
    has_notice = worker.preempted_by_s is not None
    return worker.reported, worker.draining, worker.role, worker.connected_agents, has_notice
