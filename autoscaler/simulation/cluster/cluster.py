"""The simulated cluster: two pools of replicas, and the life of a request between them.

As in production: a request is routed to a pair, decode reserves KV, prefill computes while finished chunks are
written, the first token is sent as soon as prefill has it, and decode continues. Prefill waits for the reservation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from autoscaler.simulation.cluster.admitted_requests import TIMEOUT_S, AdmittedRequests
from autoscaler.simulation.cluster.closed_form_neutral import ClosedFormNeutral
from autoscaler.simulation.cluster.decode_replica import ClosedFormDecode
from autoscaler.simulation.cluster.prefill_replica import ChunkedPrefill
from autoscaler.simulation.cluster.replica import (
    DecodeReplica,
    EventQueue,
    PrefillReplica,
    SimulatedReplica,
    SimulatedRequest,
)
from autoscaler.simulation.cluster.replica_pools import ReplicaPools
from autoscaler.simulation.cluster.routed_workers import RoutedWorkers
from autoscaler.simulation.cluster.simulated_leanings import SimulatedLeanings
from autoscaler.simulation.cluster.simulated_registry import MODEL
from autoscaler.simulation.cluster_settings import ClusterSettings
from autoscaler.simulation.replica_maker import ReplicaCalls, ReplicaMaker
from autoscaler.snapshot import PoolName, ReplicaState
from coordinator.admission.entry import NOTHING_HELD, Held
from coordinator.routing.router import Router

_LOSABLE = ChunkedPrefill | ClosedFormDecode | ClosedFormNeutral


class Cluster(ReplicaPools):
    """The replicas with their requests. Calls `on_first_token` and `on_end` for every request."""

    def __init__(
        self,
        settings: ClusterSettings,
        events: EventQueue,
        on_first_token: Callable[[SimulatedRequest, float], None],
        on_end: Callable[[SimulatedRequest, float], None],
        router: Router | None = None,
    ) -> None:
        super().__init__(settings, events)
        self._on_first_token, self._on_end = on_first_token, on_end
        calls = ReplicaCalls(self._computed, self._reserved, self._decoded)
        self._maker = ReplicaMaker(settings, events, calls)
        self._unrouted: list[SimulatedRequest] = []
        self._under_way: dict[SimulatedRequest, None] = {}
        """Requests on replicas, in the order in which they came to them."""
        self.resumed = 0
        """How often a request went on elsewhere."""
        targets = settings.targets if settings.hybrid else None
        self._routed = RoutedWorkers(settings.engine, router, settings.colocated, targets, settings.steps)
        self.lending = False
        self._admitted: AdmittedRequests | None = None
        if settings.admission is not None and settings.admission.mode == "queue":
            parts = self._routed, events, self._send, self._refuse, lambda: self.lending
            self._admitted = AdmittedRequests(settings.admission, settings, *parts)
        self.leanings: SimulatedLeanings | None = None
        if settings.neutral:
            wanted = settings.leaning_targets or settings.targets
            asks = (lambda: self.held), self._is_busy, self.ask_leaning
            self.leanings = SimulatedLeanings(events, self._routed.registry, wanted, *asks)
        self.looks_until_s = 0.0
        """Until when the planner of leanings looks, also while there is nothing to do."""
        self.on_waiting: Callable[[float], None] = lambda now_s: None  # when one begins to wait for replicas

    def arrive(self, request: SimulatedRequest, now_s: float) -> None:
        """Accepts a request that arrives now."""
        if request_s := self._settings.engine.request_s:
            self._events.at(now_s + request_s, lambda at_s: self._begin(request, at_s))
        else:
            self._begin(request, now_s)

    def lead(self, leanings: Mapping[str, PoolName], movable: Collection[str], now_s: float) -> None:
        """A plan says where neutral replicas lean, by name: their planner moves only those that are `movable`, which
        the plan asks nothing, unless it names none."""
        if self.leanings is not None:
            self.leanings.follow(leanings, movable)
        for name, pool in leanings.items():
            if name not in movable:
                self.ask_leaning(name, pool, now_s)

    def _is_busy(self, now_s: float) -> bool:
        waits = self._unrouted or self.held.requests
        return bool(self._under_way or waits) or now_s < self.looks_until_s

    def _look_at_leanings(self, now_s: float) -> None:
        if self.leanings is not None:
            self.leanings.wake(now_s)

    @property
    def held(self) -> Held:
        """What waits for admission."""
        return NOTHING_HELD if self._admitted is None else self._admitted.held

    @property
    def waiting_for_workers(self) -> int:
        """Requests that wait for the first replicas of a pool."""
        waits = self._settings.on_demand and self._routed.registry.snapshot.lacks_workers(MODEL.name)
        return len(self._unrouted) + self.held.requests if waits else 0

    def _begin(self, request: SimulatedRequest, now_s: float) -> None:
        self._look_at_leanings(now_s)
        if self._admitted is None:
            self._send(request, now_s)
        else:
            self._admitted.arrive(request, now_s)
        if self.waiting_for_workers:
            self.on_waiting(now_s)

    def _refuse(self, request: SimulatedRequest, now_s: float) -> None:
        request.failed = True
        self._on_end(request, now_s)

    def _send(self, request: SimulatedRequest, now_s: float) -> None:
        if not self._route(request, now_s):
            self._unrouted.append(request)
            wait_s = TIMEOUT_S if self.waiting_for_workers else self._settings.no_worker_wait_s
            self._events.at(now_s + wait_s, lambda at_s: self._give_up(request, at_s))

    def _route(self, request: SimulatedRequest, now_s: float) -> bool:
        routed = self._routed.choose(request, now_s, self.lending)
        if routed is None:
            return False
        request.prefill, request.decode = prefill, decode = routed.replicas
        self._under_way[request] = None
        if self._admitted is not None:
            self._admitted.routed(request, *routed.keys, now_s)
        for replica in routed.replicas:
            if replica is not None:
                replica.assigned += 1
        if decode is not None:
            decode.reserve(request, now_s)
        elif prefill is not None:
            request.reserved_s = now_s
            prefill.enqueue(request, now_s)
        return True

    def _give_up(self, request: SimulatedRequest, now_s: float) -> None:
        if request in self._unrouted:
            self._unrouted.remove(request)
            if self._admitted is not None:
                self._admitted.ended(request, now_s)
            self._refuse(request, now_s)

    def _reserved(self, request: SimulatedRequest, now_s: float) -> None:
        self._routed.reserved(request)
        prefill, decode = request.prefill, request.decode
        if isinstance(prefill, PrefillReplica):
            prefill.enqueue(request, now_s)
        elif isinstance(decode, DecodeReplica):
            decode.prefill_here(request, now_s, lambda at_s: self._computed(request, at_s, at_s))

    def _computed(self, request: SimulatedRequest, now_s: float, transferred_s: float) -> None:
        if request.first_token_s is None:
            request.first_token_s = now_s
            self._on_first_token(request, now_s)
            if self._admitted is not None:
                self._admitted.first_token(request, now_s)
        request.computed = request.kv_tokens
        self._routed.first_token(request, now_s)
        prefill, request.prefill = request.prefill, None
        if prefill is not None:
            prefill.assigned -= 1
            self._end_if_empty(prefill, now_s)
        if request.decode is None or request.output_tokens < 2:
            self._decoded(request, now_s, joined=False)
            return
        handoff_s = self._settings.engine.handoff_s if prefill is not None else 0.0
        decode = request.decode
        self._events.at(transferred_s + handoff_s, lambda at_s: self._join(request, decode, at_s))

    def _join(self, request: SimulatedRequest, decode: SimulatedReplica, now_s: float) -> None:
        if isinstance(decode, DecodeReplica) and request.decode is decode:
            request.joined_s = now_s
            decode.join(request, now_s)

    def _decoded(self, request: SimulatedRequest, now_s: float, joined: bool = True) -> None:
        request.finished_s = now_s
        request.keep_first_times()
        self._under_way.pop(request, None)
        self._routed.answered(request)
        decode = request.decode
        if isinstance(decode, DecodeReplica):
            decode.assigned -= 1
            if not joined:
                decode.leave(request, now_s)
            self._end_if_empty(decode, now_s)
        if self._admitted is not None:
            self._admitted.ended(request, now_s)
        self._on_end(request, now_s)

    def _make(self, pool: PoolName, name: str, now_s: float, kind: str) -> SimulatedReplica:
        if self._settings.neutral:
            neutral = self._maker.neutral(name, now_s, pool, kind)
            self._pool_of(neutral).append(neutral)
            return neutral
        if pool == "prefill":
            prefill = self._maker.prefill(name, now_s, kind)
            self.prefill.append(prefill)
            return prefill
        decode = self._maker.decode(name, now_s, kind)
        self.decode.append(decode)
        return decode

    def _forget(self, replica: SimulatedReplica) -> None:
        self._routed.registry.ended(replica)

    def _gone(self, replica: SimulatedReplica, now_s: float) -> None:
        """A machine is taken away. What is on it resumes elsewhere: prompt and answer so far are computed again."""
        if replica.ended_s is not None or not isinstance(replica, _LOSABLE):
            return
        here = [one for one in self._under_way if replica in (one.prefill, one.decode)]
        produced = replica.lose(now_s)
        replica.assigned = 0
        replica.enter(ReplicaState.DRAINING, now_s)
        self._end_if_empty(replica, now_s)
        for request in here:
            for other in (request.prefill, request.decode):
                if other is not replica and isinstance(other, _LOSABLE):
                    other.withdraw(request, now_s)
                    other.assigned -= 1
                    self._end_if_empty(other, now_s)
            self._routed.withdrawn(request)
            del self._under_way[request]
            request.begin_again(produced.get(request, 0))
            self.resumed += 1
            self._send(request, now_s)

    def _rotation_changed(self, now_s: float) -> None:
        ready = ReplicaState.READY
        prefill = [replica for replica in self.prefill if replica.state is ready]
        decode = [replica for replica in self.decode if replica.state is ready]
        if self._settings.neutral:
            both = [replica for replica in self._neutral if replica.state is ready]
            prefill, decode = list(both), list(both)
        self._routed.registry.rotate(prefill, decode, now_s)
        self._look_at_leanings(now_s)
        waiting, self._unrouted = self._unrouted, []
        self._unrouted = [request for request in waiting if not self._route(request, now_s)]
        if self._admitted is not None:
            self._admitted.rotated(now_s)
