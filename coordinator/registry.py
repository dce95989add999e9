"""Which workers there are: soft state, rebuilt by the workers themselves after every restart.

No I/O and no clock in here: time is an argument. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping

from coordinator.joining import may_join
from coordinator.pools import CLOSED_CIRCUIT, ChangeLog, Circuit, Model, PoolSnapshot, Worker, WorkerKey
from coordinator.prefix_index import PrefixIndex
from coordinator.registration_checks import check_fits, checked_worker
from coordinator.rotation import NO_PLAN, RotationPlan, after_plan
from splitserve.errors import NotFoundError
from splitserve.logs import log_event
from splitserve.v1 import kv_transfer_pb2, registry_pb2

MAX_ENDED = 256
"""Ended boots told to decode workers. A decode worker that missed one waits for the ticket's end."""
MAX_CHANGES = 2**14
"""Of one change log."""
SWEPT_SHARDS = 64
"""Of the prefix index, each time that silent workers are looked for."""


class Registry:
    """The registered workers.

    `version` grows with every change that can alter who may serve whom (membership, readiness, draining,
    connections); load reports alone do not move it. `prefixes` knows what the workers hold.
    """

    def __init__(self, heartbeat_timeout_s: float, prefixes: PrefixIndex | None = None) -> None:
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.prefixes = PrefixIndex() if prefixes is None else prefixes
        self.version = 0
        self._workers: dict[str, Worker] = {}
        """In order of their ids, so that a snapshot is a copy."""
        self._snapshot: PoolSnapshot | None = None
        self._changes: list[str] = []
        self._unjoined: set[str] = set()
        self._endpoints: dict[WorkerKey, kv_transfer_pb2.TransferEndpoint] = {}
        self._last_seen_s: dict[WorkerKey, float] = {}
        self._models: dict[str, Model] = {}
        self._ended: dict[str, None] = {}
        self._changed = asyncio.Event()
        self._plan = NO_PLAN
        self._usable_since_s: dict[WorkerKey, float] = {}
        self._now = 0.0
        self._watchers: list[Callable[[Worker | None], None]] = []

    @property
    def plan(self) -> RotationPlan:
        """The plan in force, `NO_PLAN` when there is none."""
        return self._plan

    def watch(self, heard: Callable[[Worker | None], None]) -> None:
        """Calls `heard` from now on: with a worker after each of its load reports, with None when who may serve whom
        has changed. It must be cheap and must not raise."""
        self._watchers.append(heard)

    def apply_plan(self, plan: RotationPlan) -> None:
        """Replaces the plan in force."""
        self._plan = plan
        self._set_rotation(plan.in_rotation)

    def register(self, request: registry_pb2.RegisterRequest, now: float) -> Worker:
        """Adds a worker, in place of an older boot of the same id. Idempotent for the same boot.

        Raises InvalidArgumentError for a bad field and FailedPreconditionError (LAYOUT_MISMATCH,
        TRANSPORT_MISMATCH, MODEL_MISMATCH) against the others that serve the model; nothing changes then.
        """
        worker = checked_worker(request)
        for other in self._workers.values():
            if other.worker_id != worker.worker_id and other.model.name == worker.model.name:
                check_fits(worker, request.endpoint, other, self._endpoints[other.key])
        older = self._workers.get(worker.worker_id)
        if older is not None and older.key == worker.key:
            self._last_seen_s[worker.key] = now
            return older
        if older is not None:
            self.drop(older.key, "replaced by a new boot")
        worker = dataclasses.replace(worker, in_rotation=self._plan.in_rotation(worker))
        self._workers = dict(sorted({**self._workers, worker.worker_id: worker}.items()))
        self._unjoined.add(worker.worker_id)
        self._endpoints[worker.key] = request.endpoint
        self._last_seen_s[worker.key] = now
        self._bump()
        log_event("worker.registered", worker_id=worker.worker_id, pool=worker.pool, model=worker.model.name)
        return worker

    def report(self, request: registry_pb2.ReportRequest, now: float) -> Worker:
        """Takes a load report, which is the heartbeat too. Raises NotFoundError: register again."""
        worker = self._workers.get(request.worker_id)
        if worker is None or worker.epoch != request.epoch:
            message = f"worker {request.worker_id!r} is not registered under this epoch"
            raise NotFoundError(message, reason="WORKER_NOT_REGISTERED", field="worker_id")
        self._last_seen_s[worker.key] = now
        if request.HasField("cache_events"):
            self.prefixes.apply(worker.key, request.cache_events)
        reported = dataclasses.replace(
            worker,
            prefix_slot=self.prefixes.slot_of(worker.key),
            load=request.load,
            reported=True,
            connected_agents=frozenset(request.connected_agent_ids),
            lanes=tuple(request.lanes),
            draining=worker.draining or request.draining,
            sent_requests=0,
            sent_tokens=0,
        )
        self._put(reported)
        if self._join(now) or _standing(reported) != _standing(worker):
            self._bump()
        reported = self._workers[worker.worker_id]
        for heard in self._watchers:
            heard(reported)
        return reported

    def set_output_open(self, key: WorkerKey, is_open: bool) -> None:
        """Notes whether a decode worker's output stream is open. Unknown workers are ignored."""
        worker = self.get(key)
        if worker is not None and worker.output_open != is_open:
            self._put(dataclasses.replace(worker, output_open=is_open))
            self._join(self._now)
            self._bump()

    def set_circuits(self, circuits: Mapping[WorkerKey, Circuit]) -> None:
        """Notes what circuit breakers say of workers; those that are not named are closed all round."""
        changed = [
            dataclasses.replace(worker, circuit=circuits.get(worker.key, CLOSED_CIRCUIT))
            for worker in self._workers.values()
            if worker.circuit != circuits.get(worker.key, CLOSED_CIRCUIT)
        ]
        for worker in changed:
            self._workers[worker.worker_id] = worker
        if changed:
            self._bump()

    def note_sent(self, key: WorkerKey, tokens: int) -> None:
        """Counts a request of so many prompt tokens as sent, until the worker's next report."""
        worker = self.get(key)
        if worker is not None:
            self._put(worker.with_sent(tokens))

    def drop(self, key: WorkerKey, why: str) -> bool:
        """Forgets a worker; False when this boot was not registered."""
        worker = self.get(key)
        if worker is None:
            return False
        del self._workers[worker.worker_id], self._endpoints[key], self._last_seen_s[key]
        self._unjoined.discard(worker.worker_id)
        self._usable_since_s.pop(key, None)
        self.prefixes.forget(key)
        self._bump()
        log_event("worker.dropped", worker_id=worker.worker_id, pool=worker.pool, why=why)
        return True

    def expire(self, now: float) -> None:
        """Drops every worker that was silent for longer than the heartbeat timeout; ends a plan whose time is up."""
        self.prefixes.sweep(SWEPT_SHARDS)
        if now >= self._plan.expires_s:
            log_event("plan.expired", standby=len(self._plan.standby), lent=self._plan.lend)
            self._plan = NO_PLAN
            self._set_rotation(after_plan)
        for key, seen_s in list(self._last_seen_s.items()):
            if now - seen_s > self.heartbeat_timeout_s:
                self.drop(key, f"silent for more than {self.heartbeat_timeout_s:g} s")

    def note_ended(self, worker: Worker) -> None:
        """Records that a boot's process has ended for certain."""
        self._ended[worker.agent_id] = None
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        self._bump()

    def ended_writers_for(self, worker: Worker) -> list[str]:
        """Agent ids that a decode worker need not fear any more, the latest ones; none for a prefill worker."""
        return list(self._ended) if worker.pool == "decode" else []

    def get(self, key: WorkerKey) -> Worker | None:
        """The worker as it is now, if this boot of it is registered."""
        worker = self._workers.get(key[0])
        return worker if worker is not None and worker.epoch == key[1] else None

    def snapshot(self) -> PoolSnapshot:
        """All workers as they are now. The same object until one of them changes."""
        if self._snapshot is None:
            changes = ChangeLog(self._changes, len(self._changes))
            self._snapshot = PoolSnapshot(tuple(self._workers.values()), changes)
        return self._snapshot

    def known_models(self) -> Mapping[str, Model]:
        """Every model that had a worker since the start, so that one whose workers are gone is still known."""
        return self._models

    def peers_of(self, worker: Worker) -> list[kv_transfer_pb2.TransferEndpoint]:
        """The decode pools that a prefill worker should connect to; none for a decode worker."""
        if worker.pool != "prefill":
            return []
        return [
            self._endpoints[peer.key]
            for peer in self._workers.values()
            if peer.pool == "decode" and peer.model.name == worker.model.name
        ]

    async def wait_change(self, version: int) -> int:
        """Waits until `version` is no longer the given one; returns the new one."""
        while self.version == version:
            await self._changed.wait()
        return self.version

    def _join(self, now: float) -> bool:
        """Lets those join that may; whether any did."""
        self._now = max(self._now, now)
        if not self._unjoined:
            return False
        workers = list(self._workers.values())
        joining = []
        for worker in workers:
            if worker.usable and not worker.joined:
                since_s = self._usable_since_s.setdefault(worker.key, self._now)
                if may_join(worker, workers, self._now - since_s):
                    joining.append(worker)
        for worker in joining:
            del self._usable_since_s[worker.key]
            self._unjoined.discard(worker.worker_id)
            self._put(dataclasses.replace(worker, joined=True))
            log_event("worker.joined", worker_id=worker.worker_id, pool=worker.pool)
        return bool(joining)

    def _set_rotation(self, in_rotation: Callable[[Worker], bool]) -> None:
        moved = [
            dataclasses.replace(worker, in_rotation=not worker.in_rotation)
            for worker in self._workers.values()
            if in_rotation(worker) != worker.in_rotation
        ]
        for worker in moved:
            self._put(worker)
            state = "active" if worker.in_rotation else "standby"
            log_event("worker.rotated", worker_id=worker.worker_id, pool=worker.pool, state=state)
        if moved:
            self._bump()

    def _put(self, worker: Worker) -> None:
        self._workers[worker.worker_id] = worker
        self._snapshot = None
        if len(self._changes) >= MAX_CHANGES:
            self._changes = []
        self._changes.append(worker.worker_id)

    def _bump(self) -> None:
        self.version += 1
        self._snapshot = None
        self._changes = []
        self._models |= self.snapshot().models()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for heard in self._watchers:
            heard(None)


def _standing(worker: Worker) -> tuple[object, ...]:
    """What of a report can alter who may serve whom."""
    return worker.reported, worker.draining, worker.connected_agents
