"""Which workers take requests: rotation plans, and workers that join. Pure; time is an argument.

A plan replaces the previous one and expires, so that the cluster recovers if the autoscaler dies: workers that the
plan took out of rotation come back, and those that it put in stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from coordinator.workers.registration import checked_adapters, checked_model
from coordinator.workers.snapshot import NO_ADAPTERS, Model, Worker, WorkerKey
from splitserve.errors import InvalidArgumentError
from splitserve.generation.kv_blocks import Adapter
from splitserve.roles import ROLE_NAMES, RoleName
from splitserve.v1 import scaling_pb2

DEFAULT_VALID_S = 30.0
MAX_VALID_S = 3600.0
MAX_NAMES = 65536
MAX_ON_DEMAND = 64


@dataclass(frozen=True, slots=True)
class OnDemand:
    """A model whose workers are started when requests wait for them, until `expires_s` on the monotonic clock."""

    model: Model
    expires_s: float
    adapters: Mapping[str, Adapter] = field(default_factory=lambda: NO_ADAPTERS)
    """By name."""


@dataclass(frozen=True, slots=True)
class RotationPlan:
    """A plan; see `ApplyPlanRequest` in the protos. `expires_s` is on the coordinator's monotonic clock."""

    standby: frozenset[str] = frozenset()
    active: frozenset[str] = frozenset()
    expires_s: float = float("inf")
    roles: Mapping[str, RoleName] = field(default_factory=dict)
    """The roles that workers are to take, by worker id. A worker that is not named keeps its role."""
    on_demand: Mapping[str, OnDemand] = field(default_factory=dict)
    """The models that are started on demand, by name. Includes those of earlier plans, perhaps of another autoscaler,
    that have not expired."""

    def role_change_of(self, worker: Worker) -> RoleName | None:
        """The role that the worker is to change to; None if it has that role already, is not named in the plan, or
        cannot change its role."""
        role = self.roles.get(worker.worker_id)
        return role if role != worker.role and worker.changes_role else None

    def in_rotation(self, worker: Worker) -> bool:
        """Whether the worker is in rotation under this plan. A worker that is not named stays as it is."""
        if worker.worker_id in self.standby:
            return False
        return worker.in_rotation or worker.worker_id in self.active

    def differs_beyond_rotation(self, before: RotationPlan) -> bool:
        """Whether the roles or the models on demand differ from those of the plan `before`."""
        return (self.roles, self.names_on_demand) != (before.roles, before.names_on_demand)

    @property
    def names_on_demand(self) -> Mapping[str, Mapping[str, Adapter]]:
        """The adapters of each model that is started on demand."""
        return {name: model.adapters for name, model in self.on_demand.items()}


NO_PLAN = RotationPlan()


def after_plan(worker: Worker) -> bool:
    """Whether the worker is in rotation once its plan has expired."""
    return worker.in_rotation or not worker.registered_standby


def checked_plan(
    request: scaling_pb2.ApplyPlanRequest, now: float, before: RotationPlan = NO_PLAN
) -> RotationPlan:
    """The plan of a request at the monotonic time `now`, which replaces `before`. Raises InvalidArgumentError naming
    field and bound."""
    valid_s = DEFAULT_VALID_S
    if request.HasField("valid_for"):
        valid_s = request.valid_for.seconds + request.valid_for.nanos / 1e9
    if not 0 < valid_s <= MAX_VALID_S:
        message = f"valid_for must be above 0 and at most {MAX_VALID_S:g} s, not {valid_s:g} s"
        raise InvalidArgumentError(message, field="valid_for")
    standby, active = frozenset(request.standby_worker_ids), frozenset(request.active_worker_ids)
    if len(standby) + len(active) > MAX_NAMES:
        message = f"standby_worker_ids and active_worker_ids may hold {MAX_NAMES} ids together"
        raise InvalidArgumentError(message, field="standby_worker_ids")
    if both := sorted(standby & active):
        message = f"standby_worker_ids and active_worker_ids both name {both[0]!r}"
        raise InvalidArgumentError(message, field="active_worker_ids")
    return RotationPlan(
        standby=standby,
        active=active,
        expires_s=now + valid_s,
        roles=_checked_roles(request),
        on_demand={name: model for name, model in before.on_demand.items() if now < model.expires_s}
        | _checked_on_demand(request, now + valid_s),
    )


def _checked_on_demand(request: scaling_pb2.ApplyPlanRequest, expires_s: float) -> dict[str, OnDemand]:
    if len(request.on_demand) > MAX_ON_DEMAND:
        raise InvalidArgumentError(f"on_demand may hold {MAX_ON_DEMAND} models", field="on_demand")
    models = [
        OnDemand(checked_model(model, "on_demand"), expires_s, checked_adapters(model, "on_demand"))
        for model in request.on_demand
    ]
    return {on_demand.model.name: on_demand for on_demand in models}


def _checked_roles(request: scaling_pb2.ApplyPlanRequest) -> dict[str, RoleName]:
    if len(request.roles) > MAX_NAMES:
        raise InvalidArgumentError(f"roles may hold {MAX_NAMES} workers", field="roles")
    roles: dict[str, RoleName] = {}
    for named in request.roles:
        if named.role not in ROLE_NAMES:
            message = f"roles must give {named.worker_id[:64]!r} ROLE_PREFILL, ROLE_DECODE or ROLE_BOTH"
            raise InvalidArgumentError(message, field="roles.role")
        if roles.setdefault(named.worker_id, ROLE_NAMES[named.role]) != ROLE_NAMES[named.role]:
            message = f"roles names {named.worker_id[:64]!r} twice"
            raise InvalidArgumentError(message, field="roles.worker_id")
    return roles


JOIN_WAIT_S = 10.0
"""How long a worker waits for its lanes, and to be warmed, before it joins without them: a peer may be stuck."""


class Joining:
    """Workers that have not joined, and since when each of them is usable. Time is an argument, in seconds."""

    def __init__(self) -> None:
        self._waiting: set[str] = set()
        self._usable_since_s: dict[WorkerKey, float] = {}
        self._now = 0.0
        self.cold: set[WorkerKey] = set()
        """The workers that are to be warmed before they join; see `coordinator.routing.warming`."""

    def add(self, worker: Worker, *, cold: bool = False) -> None:
        """Adds a worker that has registered. `cold`: it is to be warmed before it joins."""
        self._waiting.add(worker.worker_id)
        if cold:
            self.cold.add(worker.key)

    def remove(self, worker: Worker) -> None:
        """Forgets a worker that is gone."""
        self._waiting.discard(worker.worker_id)
        self.cold.discard(worker.key)
        self._usable_since_s.pop(worker.key, None)

    def ready(self, workers: Mapping[str, Worker], now: float) -> list[Worker]:
        """The workers among all `workers` that join now; they are no longer waiting. A `now` before the latest call's
        counts as the latest call's."""
        self._now = max(self._now, now)
        if not self._waiting:
            return []
        joining = []
        for worker in workers.values():
            if worker.usable and not worker.joined:
                since_s = self._usable_since_s.setdefault(worker.key, self._now)
                cold = worker.key in self.cold
                if may_join(worker, workers.values(), self._now - since_s, cold=cold):
                    joining.append(worker)
        for worker in joining:
            self.remove(worker)
        return joining


def may_join(worker: Worker, others: Iterable[Worker], waited_s: float, *, cold: bool = False) -> bool:
    """Whether a usable worker may join: all its lanes are settled, or it has waited long enough. A cold worker waits
    to be warmed while another worker computes its model's prompts.

    `others` are all workers; `waited_s` is how long `worker` has been usable.
    """
    if waited_s >= JOIN_WAIT_S:
        return True
    peers = [peer for peer in others if peer.joined and peer.usable and peer.model.name == worker.model.name]
    if cold and any(peer.computes_prompts and peer.accepts for peer in peers):
        return False
    return all(
        _is_settled(worker, peer) and _is_settled(peer, worker)
        for peer in peers
        if peer.worker_id != worker.worker_id
    )


def _is_settled(source: Worker, target: Worker) -> bool:
    """Whether the lane from `source` to `target`, if KV may take it, is up or was refused as too slow."""
    takes_prompts = source.sends_kv and source.computes_prompts and target.decodes
    if not takes_prompts or source.reaches(target):
        return True
    return any(lane.refused and lane.agent_id == target.agent_id for lane in source.lanes)
