"""Which workers take requests: rotation plans, and workers that join. Pure; time is an argument.

A plan replaces the previous one and expires, so that the cluster recovers if the autoscaler dies: workers that the
plan took out of rotation come back, those that it put in stay, and lending ends.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from coordinator.workers.catalog import Model
from coordinator.workers.registration import checked_adapters, checked_model
from coordinator.workers.snapshot import NO_ADAPTERS, NOT_ISOLATED, PoolName, Worker, WorkerKey
from splitserve.errors import InvalidArgumentError
from splitserve.generation.kv_blocks import Adapter
from splitserve.v1 import registry_pb2, scaling_pb2

SleepOrder: TypeAlias = registry_pb2.SleepOrder.ValueType

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
    lend: bool = False
    expires_s: float = float("inf")
    leanings: Mapping[str, PoolName] = field(default_factory=dict)
    """Where neutral workers lean by it, by their ids. Of models that it names none of, the coordinator's planner
    decides."""
    movable: frozenset[str] = frozenset()
    """Those of them that the planner may move, and that are asked nothing by the plan. All others are bound."""
    on_demand: Mapping[str, OnDemand] = field(default_factory=dict)
    """By the model's name; those of an earlier plan among them, which may be another autoscaler's."""
    sleeping: frozenset[str] = frozenset()
    """Those of `standby` that are to sleep."""

    def lends(self, now: float) -> bool:
        """Whether decode workers are lent to prefill, that is, compute prompts too."""
        return self.lend and now < self.expires_s

    def led_models(self, workers: Iterable[Worker]) -> frozenset[str]:
        """The models of which it says where neutral workers lean: of one of these workers at least."""
        return frozenset(w.model.name for w in workers if w.neutral and w.worker_id in self.leanings)

    def bound(self, worker: Worker) -> PoolName | None:
        """Where the worker is to lean, whatever the planner says; None: the plan does not bind it."""
        is_bound = worker.neutral and worker.worker_id not in self.movable
        return self.leanings.get(worker.worker_id) if is_bound else None

    def movable_of(self, model: str, workers: Iterable[Worker]) -> frozenset[WorkerKey] | None:
        """The workers of a model that its planner may move; None: any, as the plan names none of them. None of them
        while one that is bound has not followed yet."""
        ours = [w for w in workers if w.neutral and w.model.name == model]
        if not any(w.worker_id in self.leanings for w in ours):
            return None
        if any(self.bound(w) not in (None, w.pool) for w in ours if w.accepts):
            return frozenset()
        return frozenset(w.key for w in ours if w.worker_id in self.movable)

    def leaning_asked_of(
        self, worker: Worker, asked: Mapping[WorkerKey, PoolName], workers: Collection[Worker]
    ) -> PoolName | None:
        """Where a worker is asked to lean, `asked` being what planners ask for; None: where it does now.

        What is bound goes before, but where the planner has moved others since the sender looked: a plan that leaves it
        any takes the last one from no side, counted as if all that is asked had been followed.
        """
        bound, wanted = self.bound(worker), asked.get(worker.key)
        if bound is not None:
            is_last = bound != worker.pool and self._is_last(worker, asked, workers)
            wanted = worker.pool if is_last else bound
        elif wanted is not None and worker.worker_id not in self.movable:
            wanted = None if worker.model.name in self.led_models(workers) else wanted
        return wanted if worker.neutral and wanted != worker.pool else None

    def _is_last(
        self, worker: Worker, asked: Mapping[WorkerKey, PoolName], workers: Collection[Worker]
    ) -> bool:
        beside = [w for w in workers if w.model.name == worker.model.name and w.key != worker.key]
        if not any(w.worker_id in self.movable for w in beside):
            return False
        leaning = (self.bound(w) or asked.get(w.key, w.pool) for w in beside if w.accepts)
        return worker.pool not in leaning

    def in_rotation(self, worker: Worker) -> bool:
        """Whether the worker is in rotation under this plan. A worker that is not named stays as it is."""
        if worker.worker_id in self.standby:
            return False
        return worker.in_rotation or worker.worker_id in self.active

    def asks_otherwise(self, before: RotationPlan) -> bool:
        """Whether anything but rotation and lending is another than in the plan `before`."""
        mine, theirs = (
            (plan.leanings, plan.movable, plan.names_on_demand, plan.sleeping, plan.standby)
            for plan in (self, before)
        )
        return mine != theirs

    @property
    def names_on_demand(self) -> Mapping[str, Mapping[str, Adapter]]:
        """The adapters of each model that is started on demand."""
        return {name: one.adapters for name, one in self.on_demand.items()}

    def sleep_order(self, worker: Worker, expected: bool = False) -> SleepOrder:
        """Whether the worker is to sleep. What is in rotation is to be awake, whoever put it there. `expected`: prompts
        are under way to it, so that it is not asked to sleep yet."""
        if worker.in_rotation:
            return registry_pb2.SLEEP_ORDER_WAKE
        # Who is isolated stays awake: it would wake up as another boot, of which nothing is known.
        if worker.worker_id in self.sleeping and worker.isolation == NOT_ISOLATED:
            return registry_pb2.SLEEP_ORDER_UNSPECIFIED if expected else registry_pb2.SLEEP_ORDER_SLEEP
        named = worker.worker_id in self.standby
        return registry_pb2.SLEEP_ORDER_WAKE if named else registry_pb2.SLEEP_ORDER_UNSPECIFIED


NO_PLAN = RotationPlan()


def after_plan(worker: Worker) -> bool:
    """Whether the worker is in rotation once its plan has expired."""
    return worker.in_rotation or not worker.registered_standby


def checked_plan(
    request: scaling_pb2.ApplyPlanRequest, now: float, before: RotationPlan = NO_PLAN
) -> RotationPlan:
    """The plan of a request, after the one `before`. Raises InvalidArgumentError naming field and bound."""
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
    leanings = _checked_leanings(request)
    in_leanings = "prefill_leaning_worker_ids or decode_leaning_worker_ids"
    return RotationPlan(
        standby=standby,
        active=active,
        lend=request.lend_decode_to_prefill,
        expires_s=now + valid_s,
        leanings=leanings,
        movable=_named("movable_worker_ids", request.movable_worker_ids, leanings, in_leanings),
        on_demand={n: one for n, one in before.on_demand.items() if now < one.expires_s}
        | _checked_on_demand(request, now + valid_s),
        sleeping=_named("sleeping_worker_ids", request.sleeping_worker_ids, standby, "standby_worker_ids"),
    )


def _named(name: str, ids: Iterable[str], among: Container[str], of: str) -> frozenset[str]:
    """A field's ids, all of which another field must name."""
    found = frozenset(ids)
    if stray := sorted(one for one in found if one not in among):
        raise InvalidArgumentError(f"{name} names {stray[0][:64]!r}, which is not in {of}", field=name)
    return found


def _checked_on_demand(request: scaling_pb2.ApplyPlanRequest, expires_s: float) -> dict[str, OnDemand]:
    if len(request.on_demand) > MAX_ON_DEMAND:
        raise InvalidArgumentError(f"on_demand may hold {MAX_ON_DEMAND} models", field="on_demand")
    models = [
        OnDemand(checked_model(one, "on_demand"), expires_s, checked_adapters(one, "on_demand"))
        for one in request.on_demand
    ]
    return {one.model.name: one for one in models}


def _checked_leanings(request: scaling_pb2.ApplyPlanRequest) -> dict[str, PoolName]:
    prefill, decode = set(request.prefill_leaning_worker_ids), set(request.decode_leaning_worker_ids)
    for name, ids in (("prefill_leaning_worker_ids", prefill), ("decode_leaning_worker_ids", decode)):
        if len(ids) > MAX_NAMES:
            raise InvalidArgumentError(f"{name} may hold {MAX_NAMES} ids", field=name)
    if both := sorted(prefill & decode):
        message = f"prefill_leaning_worker_ids and decode_leaning_worker_ids both name {both[0]!r}"
        raise InvalidArgumentError(message, field="decode_leaning_worker_ids")
    to_prefill: Iterable[tuple[str, PoolName]] = ((name, "prefill") for name in prefill)
    to_decode: Iterable[tuple[str, PoolName]] = ((name, "decode") for name in decode)
    return dict([*to_prefill, *to_decode])


JOIN_WAIT_S = 10.0
"""How long a worker waits for its lanes before it joins without them: a peer may be stuck."""


class Joining:
    """Workers that have not joined, and since when each of them is usable. Time is an argument, in seconds."""

    def __init__(self) -> None:
        self._waiting: set[str] = set()
        self._usable_since_s: dict[WorkerKey, float] = {}
        self._now = 0.0

    def add(self, worker: Worker) -> None:
        """A worker has registered."""
        self._waiting.add(worker.worker_id)

    def remove(self, worker: Worker) -> None:
        """A worker is gone."""
        self._waiting.discard(worker.worker_id)
        self._usable_since_s.pop(worker.key, None)

    def ready(self, workers: Mapping[str, Worker], now: float) -> list[Worker]:
        """Those of all `workers` that join now, and wait no more. A time before the latest counts as that one."""
        self._now = max(self._now, now)
        if not self._waiting:
            return []
        joining = []
        for worker in workers.values():
            if worker.usable and not worker.joined:
                since_s = self._usable_since_s.setdefault(worker.key, self._now)
                if may_join(worker, workers.values(), self._now - since_s):
                    joining.append(worker)
        for worker in joining:
            self.remove(worker)
        return joining


def may_join(worker: Worker, others: Iterable[Worker], waited_s: float) -> bool:
    """Whether a usable worker may join: all its lanes are settled, or it has waited long enough.

    `others` are all workers; `waited_s` is how long this one has been usable.
    """
    same = (w for w in others if w.joined and w.usable and w.model.name == worker.model.name)
    settled = (_is_settled(worker, peer) for peer in same if peer.worker_id != worker.worker_id)
    return waited_s >= JOIN_WAIT_S or all(settled)


def _is_settled(worker: Worker, peer: Worker) -> bool:
    """Whether the lanes between the two, in each direction that KV may take, are up or were refused as too slow."""
    lanes = [(p, d) for p, d in ((worker, peer), (peer, worker)) if p.computes_prompts and d.decodes]
    return all(
        prefill.reaches(decode)
        or any(lane.refused and lane.agent_id == decode.agent_id for lane in prefill.lanes)
        for prefill, decode in lanes
    )
