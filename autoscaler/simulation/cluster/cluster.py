"""The simulated cluster: replicas from their order to their end, and the life of a request between them.

As in production: a request is routed to a pair, decode reserves KV, prefill computes while finished chunks are written,
the first token is sent as soon as prefill has it, and decode continues. Prefill waits for the reservation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from autoscaler.reconcile import Action, Activate, ChangeRole, Drain, Rest, Start
from autoscaler.simulation.cluster.admitted_requests import TIMEOUT_S, AdmittedRequests
from autoscaler.simulation.cluster.prefix_cache import PrefixCache
from autoscaler.simulation.cluster.replica import EventQueue, ReplicaCalls, SimulatedReplica, SimulatedRequest
from autoscaler.simulation.cluster.simulated_coordinator import MODEL, SimulatedCoordinator
from autoscaler.simulation.scenario import Scenario
from autoscaler.snapshot import ReplicaState
from coordinator.admission.queue import NOTHING_HELD, Held
from coordinator.routing.router import Router
from coordinator.workers.load import Flight
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.roles import PoolName, RoleName

NO_WORKER_WAIT_S: float = CoordinatorConfig.model_fields["no_worker_wait_s"].default
"""How long a request waits for a ready replica before it fails."""


class Cluster:
    """The replicas with their requests. Calls `on_first_token` and `on_end` for every request, `on_local` for a request
    whose prompt is no demand of the prefill pool, as in `coordinator.telemetry.request_stats`, and `on_waiting` when a
    request begins to wait for replicas.

    `on_demand`: whether replicas of an empty pool are started on demand; requests then wait for them for `TIMEOUT_S`.
    """

    def __init__(
        self,
        scenario: Scenario,
        events: EventQueue,
        on_first_token: Callable[[SimulatedRequest, float], None],
        on_end: Callable[[SimulatedRequest, float], None],
        router: Router | None = None,
        *,
        on_local: Callable[[SimulatedRequest, float], None] = lambda request, now_s: None,
        on_waiting: Callable[[float], None] = lambda now_s: None,
        on_demand: bool = False,
    ) -> None:
        self._scenario, self._events, self._on_demand = scenario, events, on_demand
        self._on_local, self._on_waiting = on_local, on_waiting
        self._on_first_token, self._on_end = on_first_token, on_end
        self.replicas: list[SimulatedReplica] = []
        """Replicas that have not ended, in the order in which they were ordered."""
        self.ended: list[SimulatedReplica] = []
        self._numbers: dict[RoleName, int] = {"prefill": 0, "decode": 0, "both": 0}
        self._calls = ReplicaCalls(self._reserved, self._computed, partial(self._ended, joined=True))
        self._unrouted: list[SimulatedRequest] = []
        self._coordinator = SimulatedCoordinator(scenario, router)
        self._flights: dict[SimulatedRequest, Flight] = {}
        """Without admission: each request's entry in the account of work."""
        self._admitted: AdmittedRequests | None = None
        if scenario.admission is not None and scenario.admission.mode == "queue":
            calls = self._send, self._refuse
            self._admitted = AdmittedRequests(
                scenario, self._coordinator, events, *calls, on_demand=on_demand
            )

    def pool(self, name: PoolName) -> list[SimulatedReplica]:
        """The replicas of a pool that have not ended. One of role `both` is in both pools."""
        return [replica for replica in self.replicas if name in replica.pools]

    def order(self, role: RoleName, count: int, now_s: float, cold_start_s: float | None = None) -> None:
        """Orders replicas. Each is ready one cold start later (0: at once), or ends then if its start fails."""
        for _ in range(count):
            self._numbers[role] += 1
            replica = self._new_replica(f"{role}-{self._numbers[role]}", role, now_s)
            start = self._scenario.starts.of(replica.name)
            fails = start.fails and cold_start_s is None
            begin = partial(self._fail_start if fails else self._become_ready, replica)
            if (took_s := start.took_s if cold_start_s is None else cold_start_s) > 0:
                self._events.at(now_s + took_s, begin)
            else:
                begin(now_s)

    def act(self, action: Action, now_s: float) -> None:
        """Applies an action of `autoscaler.reconcile`."""
        match action:
            case Start(pool, count):
                self.order(pool, count, now_s)
            case Activate(_, name):
                self._named(name).enter(ReplicaState.READY, now_s)
            case Rest(_, name):
                self._named(name).enter(ReplicaState.STANDBY, now_s)
            case Drain(_, names):
                for name in names:
                    replica = self._named(name)
                    replica.enter(ReplicaState.DRAINING, now_s)
                    self._end_if_empty(replica, now_s)
            case ChangeRole(pool, name):
                self._named(name).take_role(pool, now_s)
        self._rotation_changed(now_s)

    def arrive(self, request: SimulatedRequest, now_s: float) -> None:
        """Accepts a request that arrives now."""
        if request_s := self._scenario.engine.request_s:
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
        waits = self._on_demand and self._coordinator.snapshot.lacks_workers(MODEL.name)
        return len(self._unrouted) + self.held.requests if waits else 0

    def _begin(self, request: SimulatedRequest, now_s: float) -> None:
        if self._admitted is None:
            self._send(request, now_s)
        else:
            self._admitted.arrive(request, now_s)
        if self.waiting_for_workers:
            self._on_waiting(now_s)

    def _refuse(self, request: SimulatedRequest, now_s: float) -> None:
        request.failed = True
        self._on_end(request, now_s)

    def _send(self, request: SimulatedRequest, now_s: float) -> None:
        if not self._route(request, now_s):
            self._unrouted.append(request)
            wait_s = TIMEOUT_S if self.waiting_for_workers else NO_WORKER_WAIT_S
            self._events.at(now_s + wait_s, lambda at_s: self._give_up(request, at_s))

    def _route(self, request: SimulatedRequest, now_s: float) -> bool:
        routed = self._coordinator.choose(request, self._flight(request), now_s)
        if routed is None:
            return False
        prefill, decode, request.relieves_prefill = routed
        request.prefill, request.decode = prefill, decode
        for replica in (prefill, decode):
            if replica is not None:
                replica.assigned += 1
        if decode is not None:
            decode.reserve(request, now_s)
        elif prefill is not None:
            request.reserved_s = now_s
            prefill.compute(request, now_s, handed_off=True)
        return True

    def _flight(self, request: SimulatedRequest) -> Flight:
        """The request's entry in the account of work."""
        if self._admitted is not None:
            return self._admitted.entry(request)
        if (flight := self._flights.get(request)) is None:
            tokens, output = request.prompt_tokens, request.output_tokens
            flight = Flight(
                prompt_tokens=tokens, uncached_tokens=tokens, expected_output=output, max_output=output
            )
            self._flights[request] = flight
        return flight

    def _give_up(self, request: SimulatedRequest, now_s: float) -> None:
        if request in self._unrouted:
            self._unrouted.remove(request)
            if self._admitted is not None:
                self._admitted.ended(request, now_s)
            self._refuse(request, now_s)

    def _reserved(self, request: SimulatedRequest, now_s: float) -> None:
        self._coordinator.reserved(request, self._flight(request))
        if request.prefill is not None:
            request.prefill.compute(request, now_s, handed_off=True)
        elif request.decode is not None:
            if "prefill" not in request.decode.pools and not request.relieves_prefill:
                self._on_local(request, now_s)
            request.decode.compute(request, now_s, handed_off=False)

    def _computed(self, request: SimulatedRequest, now_s: float, transferred_s: float) -> None:
        request.first_token_s = now_s
        self._on_first_token(request, now_s)
        if self._admitted is not None:
            self._admitted.first_token(request, now_s)
        else:
            self._coordinator.loads.output(self._flight(request), 1)
        request.computed = request.kv_tokens
        prefill, request.prefill = request.prefill, None
        if prefill is not None:
            prefill.assigned -= 1
            self._end_if_empty(prefill, now_s)
        decode = request.decode
        if decode is None or request.output_tokens < 2:
            self._ended(request, now_s, joined=False)
            return
        handoff_s = self._scenario.engine.handoff_s if prefill is not None else 0.0
        self._events.at(transferred_s + handoff_s, lambda at_s: self._join(request, decode, at_s))

    def _join(self, request: SimulatedRequest, decode: SimulatedReplica, now_s: float) -> None:
        request.joined_s = now_s
        decode.join(request, now_s)

    def _ended(self, request: SimulatedRequest, now_s: float, *, joined: bool) -> None:
        request.finished_s = now_s
        self._coordinator.answered(request)
        if (decode := request.decode) is not None:
            decode.assigned -= 1
            if not joined:
                decode.leave(request, now_s)
            self._end_if_empty(decode, now_s)
        if self._admitted is not None:
            self._admitted.ended(request, now_s)
        else:
            self._coordinator.loads.ended(self._flights.pop(request))
        self._on_end(request, now_s)

    def _new_replica(self, name: str, role: RoleName, now_s: float) -> SimulatedReplica:
        scenario = self._scenario
        tokens = scenario.cache_tokens or scenario.engine.kv_capacity_tokens
        cache = PrefixCache(tokens) if scenario.prefix_cache else None
        replica = SimulatedReplica(
            name, role, now_s, scenario.engine, self._events, self._calls, cache, scenario.tpot_target_s
        )
        self.replicas.append(replica)
        return replica

    def _fail_start(self, replica: SimulatedReplica, now_s: float) -> None:
        if replica.state is ReplicaState.STARTING:
            replica.enter(ReplicaState.DRAINING, now_s)
            self._end_if_empty(replica, now_s)

    def _become_ready(self, replica: SimulatedReplica, now_s: float) -> None:
        if replica.state is ReplicaState.STARTING:
            # `reconcile` moves it to standby if the plan wants that.
            replica.enter(ReplicaState.READY, now_s)
            self._rotation_changed(now_s)

    def _end_if_empty(self, replica: SimulatedReplica, now_s: float) -> None:
        if replica.state is not ReplicaState.DRAINING or replica.assigned or replica.ended_s is not None:
            return
        replica.ended_s = now_s
        self.ended.append(replica)
        self.replicas.remove(replica)
        self._coordinator.ended(replica)

    def _rotation_changed(self, now_s: float) -> None:
        ready = [replica for replica in self.replicas if replica.state is ReplicaState.READY]
        self._coordinator.rotate(ready, now_s)
        waiting, self._unrouted = self._unrouted, []
        self._unrouted = [request for request in waiting if not self._route(request, now_s)]
        if self._admitted is not None:
            self._admitted.rotated(now_s)

    def _named(self, name: str) -> SimulatedReplica:
        return next(replica for replica in self.replicas if replica.name == name)
