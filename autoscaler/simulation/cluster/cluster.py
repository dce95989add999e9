"""The simulated cluster: two pools of replicas, and the life of a request between them.

As in production: a request is routed to a pair, decode reserves KV, prefill computes while finished chunks are
written, the first token is sent as soon as prefill has it, and decode continues. Prefill waits for the reservation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autoscaler.reconcile import Action, Activate, Drain, Lean, ReplicaView, Rest, Start
from autoscaler.simulation.cluster.admitted_requests import TIMEOUT_S, AdmittedRequests
from autoscaler.simulation.cluster.decode_replica import ClosedFormDecode
from autoscaler.simulation.cluster.lent_cores import LentCores
from autoscaler.simulation.cluster.neutral_replicas import NeutralReplica, neutral_replica
from autoscaler.simulation.cluster.prefill_replica import ChunkedPrefill, PrefixCache
from autoscaler.simulation.cluster.replica import (
    DecodeReplica,
    EventQueue,
    PrefillReplica,
    SimulatedReplica,
    SimulatedRequest,
)
from autoscaler.simulation.cluster.routed_workers import MODEL, RoutedWorkers
from autoscaler.simulation.cluster.stepped_replicas import SteppedDecode, SteppedPrefill
from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.start_times import StartTimes
from autoscaler.snapshot import PoolName, ReplicaState
from coordinator.admission.entry import NOTHING_HELD, Held
from coordinator.routing.router import Router
from engine.pacing.token_clock import ServiceTargets
from splitserve.config.coordinator import AdmissionConfig


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Constants of a run. Times in seconds."""

    engine: EngineModel
    cold_start_s: float
    prefix_cache: str = "worker"
    """`worker`: one for each prefill replica; `pool`: one that all share; `off`."""
    cache_tokens: int | None = None
    """Capacity of each cache. Default: the KV capacity of a replica."""
    no_worker_wait_s: float = 2.0
    """How long a request waits for a ready replica before it fails."""
    on_demand: bool = False
    """Whether replicas of a pool that has none are started on demand; requests then wait for them for `TIMEOUT_S`."""
    admission: AdmissionConfig | None = None
    """The coordinator's admission control. None: requests go to the replicas at once."""
    colocated: bool = False
    """As `local_prefill: always`: decode replicas compute all prompts but those of answers of one token."""
    steps: bool = False
    """Whether replicas are computed step by step, with the engine's own scheduler."""
    targets: ServiceTargets | None = None
    """Of every request, where replicas are computed step by step."""
    hybrid: bool = False
    """Whether the pair policy says who computes a prompt; step by step only."""
    lent_cores: bool = False
    """Whether replicas are on one host and lend each other cores for chunks of prompts; step by step only."""
    start_times: StartTimes | None = None
    """None: every start takes `cold_start_s`, and none fails."""
    speeds: Mapping[PoolName, Mapping[str, float]] = field(default_factory=dict)
    """Of the classes of replicas, by name; the first one of a pool is that of the replicas at the start."""
    neutral: bool = False
    """Whether replicas are neutral, lean at first to the pool that they are ordered for, and stay; `hybrid` only."""


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
        self._shared_cache = self._new_cache(own=False) if settings.prefix_cache == "pool" else None
        self._numbers: dict[PoolName, int] = {"prefill": 0, "decode": 0}
        self._unrouted: list[SimulatedRequest] = []
        self.prefill: list[PrefillReplica] = []
        self.decode: list[DecodeReplica] = []
        self.ended: list[SimulatedReplica] = []
        targets = settings.targets if settings.hybrid else None
        self._routed = RoutedWorkers(settings.engine, router, settings.colocated, targets)
        self._neutral: list[NeutralReplica] = []
        self._cores = LentCores(events, settings.engine.lent_time) if settings.lent_cores else None
        self._admitted: AdmittedRequests | None = None
        if settings.admission is not None and settings.admission.mode == "queue":
            parts = events, self._send, self._refuse, self._lends, settings.on_demand
            self._admitted = AdmittedRequests(settings.admission, self._routed, *parts)
        self._start_times = settings.start_times or StartTimes(settings.cold_start_s)
        self.lending = False
        self.on_waiting: Callable[[float], None] = lambda now_s: None  # when one begins to wait for replicas

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

    def act(self, action: Action, now_s: float) -> None:
        """Applies an action of `autoscaler.reconcile`."""
        match action:
            case Start(pool, count, kind):
                self.order(pool, count, now_s, kind=kind)
            case Activate(pool, name):
                self._named(pool, name).enter(ReplicaState.READY, now_s)
            case Rest(pool, name):
                self._named(pool, name).enter(ReplicaState.STANDBY, now_s)
            case Lean():
                pass  # replicas that the autoscaler scales are not neutral
            case Drain(pool, names):
                for name in names:
                    replica = self._named(pool, name)
                    replica.enter(ReplicaState.DRAINING, now_s)
                    self._end_if_empty(replica, now_s)
        self._rotation_changed(now_s)

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

    def _lends(self) -> bool:
        """Whether decode replicas add to prefill capacity."""
        return self.lending or self._settings.hybrid

    def _refuse(self, request: SimulatedRequest, now_s: float) -> None:
        request.failed = True
        self._on_end(request, now_s)

    def _send(self, request: SimulatedRequest, now_s: float) -> None:
        if not self._route(request, now_s):
            self._unrouted.append(request)
            wait_s = TIMEOUT_S if self.waiting_for_workers else self._settings.no_worker_wait_s
            self._events.at(now_s + wait_s, lambda at_s: self._give_up(request, at_s))

    def _route(self, request: SimulatedRequest, now_s: float) -> bool:
        pair = self._routed.choose(request, now_s, self.lending)
        if pair is None:
            return False
        request.prefill, request.decode = prefill, decode = pair
        if self._admitted is not None:
            self._admitted.routed(request, now_s)
        for replica in pair:
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
        request.first_token_s = now_s
        request.computed = request.prompt_tokens
        self._on_first_token(request, now_s)
        self._routed.first_token(request, now_s)
        if self._admitted is not None:
            self._admitted.first_token(request, now_s)
        prefill = request.prefill
        if prefill is not None:
            prefill.assigned -= 1
            self._end_if_empty(prefill, now_s)
        if request.decode is None or request.output_tokens < 2:
            self._decoded(request, now_s, joined=False)
            return
        handoff_s = self._settings.engine.handoff_s if prefill is not None else 0.0
        self._events.at(transferred_s + handoff_s, lambda at_s: self._join(request, at_s))

    def _join(self, request: SimulatedRequest, now_s: float) -> None:
        request.joined_s = now_s
        if isinstance(request.decode, DecodeReplica):
            request.decode.join(request, now_s)

    def _decoded(self, request: SimulatedRequest, now_s: float, joined: bool = True) -> None:
        request.finished_s = now_s
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
        if self._settings.neutral:
            return self._make_neutral(pool, name, now_s)
        if pool == "prefill":
            prefill = self._make_prefill(name, now_s, engine)
            self.prefill.append(prefill)
            return prefill
        decode = self._make_decode(name, now_s, engine)
        self.decode.append(decode)
        return decode

    def _make_neutral(self, pool: PoolName, name: str, now_s: float) -> SimulatedReplica:
        """A neutral replica, which counts in the pool that it leans to at first."""
        settings, own = self._settings, self._settings.prefix_cache == "worker"
        calls = self._computed, self._reserved, self._decoded
        parts = settings.engine, self._events, settings.targets, own, *calls, self._cores
        made = neutral_replica(name, now_s, *parts)
        self._neutral.append(made)
        if pool == "prefill":
            self.prefill.append(made.prefill)
            return made.prefill
        self.decode.append(made.decode)
        return made.decode

    def _make_prefill(self, name: str, now_s: float, engine: EngineModel) -> PrefillReplica:
        settings, events = self._settings, self._events
        own = settings.prefix_cache == "worker"
        if settings.steps:
            targets, computed, cores = settings.targets, self._computed, self._cores
            return SteppedPrefill(name, now_s, engine, events, targets, own, computed, cores=cores)
        cache = self._new_cache(own) if own else self._shared_cache
        return ChunkedPrefill(name, now_s, engine, events, cache, self._computed)

    def _make_decode(self, name: str, now_s: float, engine: EngineModel) -> DecodeReplica:
        settings, events = self._settings, self._events
        has_cache = settings.colocated and settings.prefix_cache == "worker"
        if settings.steps:
            parts = settings.targets, has_cache, self._reserved, self._decoded
            return SteppedDecode(name, now_s, engine, events, *parts, cores=self._cores)
        cache = self._new_cache(own=False) if has_cache else None
        return ClosedFormDecode(name, now_s, engine, events, self._reserved, self._decoded, cache)

    def _new_cache(self, own: bool) -> PrefixCache:
        tokens = self._settings.cache_tokens or self._settings.engine.kv_capacity_tokens
        # A shared cache cannot tell replicas apart, so its changes are not reported to the router.
        return PrefixCache(tokens, keeps_changes=own)

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
