"""The simulated cluster: two pools of replicas, and the life of a request between them.

As in production: a request is routed to a pair, decode reserves KV, prefill computes while finished chunks are
written, the first token is sent as soon as prefill has it, and decode continues. Prefill waits for the reservation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from autoscaler.reconcile import Action, Activate, Drain, Lean, ReplicaView, Rest, Start
from autoscaler.simulation.cluster.admitted_requests import TIMEOUT_S, AdmittedRequests
from autoscaler.simulation.cluster.decode_replica import ClosedFormDecode
from autoscaler.simulation.cluster.neutral_replicas import NeutralReplica
from autoscaler.simulation.cluster.prefill_replica import ChunkedPrefill
from autoscaler.simulation.cluster.replica import (
    DecodeReplica,
    EventQueue,
    PrefillReplica,
    SimulatedReplica,
    SimulatedRequest,
)
from autoscaler.simulation.cluster.routed_workers import MODEL, RoutedWorkers
from autoscaler.simulation.cluster_settings import ClusterSettings
from autoscaler.simulation.replica_maker import ReplicaCalls, ReplicaMaker
from autoscaler.simulation.start_times import StartTimes
from autoscaler.sizing.engine_model import EngineModel
from autoscaler.snapshot import PoolName, ReplicaState
from coordinator.admission.entry import NOTHING_HELD, Held
from coordinator.routing.router import Router


class Cluster:
    """All replicas, including ended ones. Calls `on_first_token` and `on_end` for every request."""

    def __init__(
        self,
        settings: ClusterSettings,
        events: EventQueue,
        on_first_token: Callable[[SimulatedRequest, float], None],
        on_end: Callable[[SimulatedRequest, float], None],
        router: Router | None = None,
    ) -> None:
        self._settings, self._events = settings, events
        self._on_first_token, self._on_end = on_first_token, on_end
        calls = ReplicaCalls(self._computed, self._reserved, self._decoded)
        self._maker = ReplicaMaker(settings, events, calls)
        self._numbers: dict[PoolName, int] = {"prefill": 0, "decode": 0}
        self._unrouted: list[SimulatedRequest] = []
        self.prefill: list[PrefillReplica] = []
        self.decode: list[DecodeReplica] = []
        self.ended: list[SimulatedReplica] = []
        self._under_way: dict[SimulatedRequest, None] = {}
        """Requests on replicas, in the order in which they came to them."""
        self.notices, self.resumed = 0, 0
        """Replicas whose machines were to be taken away, and requests that went on elsewhere."""
        targets = settings.targets if settings.hybrid else None
        self._routed = RoutedWorkers(settings.engine, router, settings.colocated, targets, settings.steps)
        self._neutral: list[NeutralReplica] = []
        self.lending = False
        self.sleeping: Collection[PoolName] = ()
        """Pools whose standbys sleep."""
        self.woken: set[PoolName] = set()
        self._admitted: AdmittedRequests | None = None
        if settings.admission is not None and settings.admission.mode == "queue":
            parts = self._routed, events, self._send, self._refuse, lambda: self.lending
            self._admitted = AdmittedRequests(settings.admission, settings, *parts)
        self._start_times = settings.start_times or StartTimes(settings.cold_start_s)
        self.on_waiting: Callable[[float], None] = lambda now_s: None  # when one begins to wait for replicas
        self.on_notice: Callable[[float], None] = lambda now_s: None  # when a machine is to be taken away

    def pool(self, name: PoolName) -> list[PrefillReplica] | list[DecodeReplica]:
        """The replicas of a pool that have not ended."""
        return self.prefill if name == "prefill" else self.decode

    def members(self, name: PoolName) -> tuple[ReplicaView, ...]:
        """A pool as `autoscaler.reconcile` sees it."""
        return tuple(
            ReplicaView(r.name, r.state, float(r.load), r.ordered_s, replica_class=r.replica_class)
            for r in self.pool(name)
        )

    def order(
        self, pool: PoolName, count: int, now_s: float, cold_start_s: float | None = None, kind: str = ""
    ) -> None:
        """Orders replicas; they are ready one cold start later (0: at once), or end then where the start fails. `kind`:
        their class; empty: the first one."""
        speeds = self._settings.speeds.get(pool) or {"": 1.0}
        kind = kind if kind in speeds else next(iter(speeds))
        for _ in range(count):
            self._numbers[pool] += 1
            engine = self._settings.engine.at_speed(pool, speeds[kind])
            replica = self._make(pool, f"{pool}-{self._numbers[pool]}", now_s, engine)
            replica.replica_class, replica.speed = kind, speeds[kind]
            start = self._start_times.of(replica.name)
            begins = self._ends if start.fails and cold_start_s is None else self._becomes_ready
            if (took_s := start.took_s if cold_start_s is None else cold_start_s) > 0:
                self._events.at(now_s + took_s, begins(replica))
            else:
                begins(replica)(now_s)
            after_s = self._settings.preemptions.notice_after_s(replica.name)
            if after_s is not None and kind in self._settings.spot.get(pool, ()):
                self._events.at(now_s + after_s, partial(self.take_away, replica))

    def act(self, action: Action, now_s: float) -> None:
        """Applies an action of `autoscaler.reconcile`."""
        match action:
            case Start(pool, count, kind):
                self.order(pool, count, now_s, kind=kind)
            case Activate(pool, name):
                self._joins(pool, self._named(pool, name), now_s)
            case Rest(pool, name):
                resting = self._named(pool, name)
                resting.enter(ReplicaState.STANDBY, now_s)
                resting.asleep = pool in self.sleeping
            case Lean():
                pass  # replicas that the autoscaler scales are not neutral
            case Drain(pool, names):
                for name in names:
                    replica = self._named(pool, name)
                    replica.enter(ReplicaState.DRAINING, now_s)
                    self._end_if_empty(replica, now_s)
        self._rotation_changed(now_s)

    def _joins(self, pool: PoolName, replica: SimulatedReplica, now_s: float) -> None:
        """Into rotation: one that sleeps once it has woken up."""

        def wake(at_s: float) -> None:
            replica.waking = False
            if replica.asleep and replica.state is ReplicaState.STANDBY:
                replica.asleep = False
                self.woken.add(pool)
                replica.enter(ReplicaState.READY, at_s)
                self._rotation_changed(at_s)

        if not replica.asleep:
            replica.enter(ReplicaState.READY, now_s)
        elif not replica.waking:
            replica.waking = True
            self._events.at(now_s + self._settings.wake_s, wake)

    def wake_s(self, pool: PoolName) -> float | None:
        """What waking took in a pool; None before the first."""
        return self._settings.wake_s if pool in self.woken else None

    def take_away(self, replica: SimulatedReplica, now_s: float) -> None:
        """Gives a replica its notice: it takes nothing new, and is gone once that is over."""
        if replica.ended_s is not None:
            return
        if replica.state is not ReplicaState.DRAINING:
            replica.enter(ReplicaState.PREEMPTED, now_s)
        self.notices += 1
        self._rotation_changed(now_s)
        self._events.at(now_s + self._settings.preemptions.notice_s, partial(self._gone, replica))
        self.on_notice(now_s)

    def arrive(self, request: SimulatedRequest, now_s: float) -> None:
        """Accepts a request that arrives now."""
        if request_s := self._settings.engine.request_s:
            self._events.at(now_s + request_s, lambda at_s: self._begin(request, at_s))
        else:
            self._begin(request, now_s)

    @property
    def held(self) -> Held:
        """What waits for admission."""
        return NOTHING_HELD if self._admitted is None else self._admitted.held

    @property
    def waiting_for_workers(self) -> int:
        """Requests that wait for the first replicas of a pool."""
        waits = self._settings.on_demand and self._routed.snapshot.lacks_workers(MODEL.name)
        return len(self._unrouted) + self.held.requests if waits else 0

    def _begin(self, request: SimulatedRequest, now_s: float) -> None:
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

    def _make(self, pool: PoolName, name: str, now_s: float, engine: EngineModel) -> SimulatedReplica:
        neutral = self._maker.neutral(name, now_s) if self._settings.neutral else None
        if neutral is not None:
            self._neutral.append(neutral)
        if pool == "prefill":
            prefill = self._maker.prefill(name, now_s, engine) if neutral is None else neutral.prefill
            self.prefill.append(prefill)
            return prefill
        decode = self._maker.decode(name, now_s, engine) if neutral is None else neutral.decode
        self.decode.append(decode)
        return decode

    def _ends(self, replica: SimulatedReplica) -> Callable[[float], None]:
        def end(now_s: float) -> None:
            if replica.state is ReplicaState.STARTING:
                replica.enter(ReplicaState.DRAINING, now_s)
                self._end_if_empty(replica, now_s)

        return end

    def _becomes_ready(self, replica: SimulatedReplica) -> Callable[[float], None]:
        def become_ready(now_s: float) -> None:
            if replica.state is not ReplicaState.STARTING:
                return
            # `reconcile` moves it to standby where the plan wants that.
            replica.enter(ReplicaState.READY, now_s)
            self._rotation_changed(now_s)

        return become_ready

    def _gone(self, replica: SimulatedReplica, now_s: float) -> None:
        """A machine is taken away. What is on it resumes elsewhere: prompt and answer so far are computed again."""
        if replica.ended_s is not None or not isinstance(replica, ChunkedPrefill | ClosedFormDecode):
            return
        here = [one for one in self._under_way if replica in (one.prefill, one.decode)]
        produced = replica.lose(now_s)
        replica.assigned = 0
        replica.enter(ReplicaState.DRAINING, now_s)
        self._end_if_empty(replica, now_s)
        for request in here:
            for other in (request.prefill, request.decode):
                if other is not replica and isinstance(other, ChunkedPrefill | ClosedFormDecode):
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
        leaning: dict[str, PoolName] = {}
        if self._settings.neutral:
            leaning |= dict.fromkeys((replica.name for replica in prefill), "prefill")
            leaning |= dict.fromkeys((replica.name for replica in decode), "decode")
            there = [made for made in self._neutral if made.prefill.name in leaning]
            prefill, decode = [made.prefill for made in there], [made.decode for made in there]
        self._routed.rotate(prefill, decode, now_s, leaning)
        waiting, self._unrouted = self._unrouted, []
        self._unrouted = [request for request in waiting if not self._route(request, now_s)]
        if self._admitted is not None:
            self._admitted.rotated(now_s)

    def _end_if_empty(self, replica: SimulatedReplica, now_s: float) -> None:
        if replica.state is not ReplicaState.DRAINING or replica.assigned or replica.ended_s is not None:
            return
        replica.ended_s = now_s
        self.ended.append(replica)
        self._routed.ended(replica)
        if isinstance(replica, PrefillReplica):
            self.prefill.remove(replica)
        elif isinstance(replica, DecodeReplica):
            self.decode.remove(replica)

    def _named(self, pool: PoolName, name: str) -> SimulatedReplica:
        return next(replica for replica in self.pool(pool) if replica.name == name)
