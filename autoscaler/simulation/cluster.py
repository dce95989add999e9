"""The simulated cluster: two pools of replicas, and the life of a request between them.

As in production a request is routed to a pair, decode sets its KV aside, prefill computes, the KV is written while
that goes on, the first token goes out when prefill has it, decode takes over. Where decode has no room, prefill is
not started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoscaler.reconcile import Action, Activate, Drain, Member, Rest, Start
from autoscaler.simulation.decode_replica import DecodeReplica
from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.jobs import Job
from autoscaler.simulation.prefill_replica import PrefillReplica
from autoscaler.simulation.prefix_cache import PrefixCache
from autoscaler.simulation.replica import Agenda, SimulatedReplica
from autoscaler.simulation.routing import Router
from autoscaler.snapshot import PoolName, ReplicaState


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What does not change during a run. Times in seconds."""

    engine: EngineModel
    cold_start_s: float
    prefix_cache: str = "worker"
    """`worker`: one for each prefill replica; `pool`: one that all share; `off`."""
    no_worker_wait_s: float = 2.0
    """How long a request waits for a pool without a ready replica, before it fails."""


class Cluster:
    """All replicas, those that ended included. `on_first_token` and `on_end` are told of every request."""

    def __init__(
        self,
        settings: ClusterSettings,
        agenda: Agenda,
        on_first_token: Callable[[Job, float], None],
        on_end: Callable[[Job, float], None],
    ) -> None:
        self._settings = settings
        self._agenda = agenda
        self._on_first_token = on_first_token
        self._on_end = on_end
        self._shared_cache = self._new_cache() if settings.prefix_cache == "pool" else None
        self._numbers: dict[PoolName, int] = {"prefill": 0, "decode": 0}
        self._unrouted: list[Job] = []
        self.prefill: list[PrefillReplica] = []
        self.decode: list[DecodeReplica] = []
        self.ended: list[SimulatedReplica] = []
        self.router = Router(settings.engine)
        self.lending = False
        self.measured_cold_start_s: dict[PoolName, float] = {}

    def pool(self, name: PoolName) -> list[PrefillReplica] | list[DecodeReplica]:
        """The replicas of a pool that have not ended."""
        return self.prefill if name == "prefill" else self.decode

    def members(self, name: PoolName) -> tuple[Member, ...]:
        """A pool as `autoscaler.reconcile` sees it."""
        return tuple(Member(r.name, r.state, float(r.load), r.ordered_s) for r in self.pool(name))

    def order(self, pool: PoolName, count: int, now_s: float, cold_start_s: float | None = None) -> None:
        """Starts replicas; they are ready one cold start later (0: at once)."""
        cold_s = self._settings.cold_start_s if cold_start_s is None else cold_start_s
        for _ in range(count):
            self._numbers[pool] += 1
            replica = self._make(pool, f"{pool}-{self._numbers[pool]}", now_s)
            if cold_s > 0:
                self._agenda.at(now_s + cold_s, self._becomes_ready(pool, replica, measured=True))
            else:
                self._becomes_ready(pool, replica, measured=False)(now_s)

    def act(self, action: Action, now_s: float) -> None:
        """Does what was decided."""
        match action:
            case Start(pool, count):
                self.order(pool, count, now_s)
            case Activate(pool, name):
                self._named(pool, name).enter(ReplicaState.READY, now_s)
            case Rest(pool, name):
                self._named(pool, name).enter(ReplicaState.STANDBY, now_s)
            case Drain(pool, names):
                for name in names:
                    replica = self._named(pool, name)
                    replica.enter(ReplicaState.DRAINING, now_s)
                    self._end_if_empty(replica, now_s)
        self._rotation_changed(now_s)

    def arrive(self, job: Job, now_s: float) -> None:
        """A request comes in."""
        if request_s := self._settings.engine.request_s:
            self._agenda.at(now_s + request_s, lambda at_s: self._begin(job, at_s))
        else:
            self._begin(job, now_s)

    def _begin(self, job: Job, now_s: float) -> None:
        if not self._route(job, now_s):
            self._unrouted.append(job)
            self._agenda.at(now_s + self._settings.no_worker_wait_s, lambda at_s: self._give_up(job, at_s))

    def _route(self, job: Job, now_s: float) -> bool:
        pair = self.router.choose(job, now_s, self.lending)
        if pair is None:
            return False
        job.prefill, job.decode = pair
        for replica in pair:
            if replica is not None:
                replica.assigned += 1
        if job.prefill is not None:
            job.prefill.expected_tokens += job.prompt_tokens
        if job.decode is None:
            job.reserved_s = now_s
            self._reserved(job, now_s)
        else:
            job.decode.reserve(job, now_s)
        return True

    def _give_up(self, job: Job, now_s: float) -> None:
        if job in self._unrouted:
            self._unrouted.remove(job)
            job.failed = True
            self._on_end(job, now_s)

    def _reserved(self, job: Job, now_s: float) -> None:
        if job.prefill is not None:
            job.prefill.expected_tokens -= job.prompt_tokens
            job.prefill.enqueue(job, now_s)
        elif job.decode is not None:
            computed_s = job.decode.prefill_here(job, now_s)
            self._agenda.at(computed_s, lambda at_s: self._computed(job, at_s, at_s))

    def _computed(self, job: Job, now_s: float, transferred_s: float) -> None:
        job.first_token_s = now_s
        job.computed = job.prompt_tokens
        self._on_first_token(job, now_s)
        prefill = job.prefill
        if prefill is not None:
            prefill.assigned -= 1
            self._end_if_empty(prefill, now_s)
        if job.decode is None or job.output_tokens < 2:
            self._decoded(job, now_s, joined=False)
            return
        handoff_s = self._settings.engine.handoff_s if prefill is not None else 0.0
        self._agenda.at(transferred_s + handoff_s, lambda at_s: self._join(job, at_s))

    def _join(self, job: Job, now_s: float) -> None:
        job.joined_s = now_s
        if job.decode is not None:
            job.decode.join(job, now_s)

    def _decoded(self, job: Job, now_s: float, joined: bool = True) -> None:
        job.finished_s = now_s
        decode = job.decode
        if decode is not None:
            decode.assigned -= 1
            if not joined:
                decode.leave(job, now_s)
            self._end_if_empty(decode, now_s)
        self._on_end(job, now_s)

    def _make(self, pool: PoolName, name: str, now_s: float) -> SimulatedReplica:
        engine, agenda = self._settings.engine, self._agenda
        if pool == "prefill":
            cache = self._new_cache() if self._settings.prefix_cache == "worker" else self._shared_cache
            prefill = PrefillReplica(name, now_s, engine, agenda, cache, self._computed)
            self.prefill.append(prefill)
            return prefill
        decode = DecodeReplica(name, now_s, engine, agenda, self._reserved, self._decoded)
        self.decode.append(decode)
        return decode

    def _new_cache(self) -> PrefixCache:
        return PrefixCache(self._settings.engine.kv_capacity_tokens)

    def _becomes_ready(
        self, pool: PoolName, replica: SimulatedReplica, measured: bool
    ) -> Callable[[float], None]:
        def happen(now_s: float) -> None:
            if replica.state is not ReplicaState.STARTING:
                return
            # It joins as a standby where the plan has one to spare; `reconcile` sees to that.
            replica.enter(ReplicaState.READY, now_s)
            if measured:
                self.measured_cold_start_s[pool] = now_s - replica.ordered_s
            self._rotation_changed(now_s)

        return happen

    def _rotation_changed(self, now_s: float) -> None:
        ready = ReplicaState.READY
        self.router.prefill = [replica for replica in self.prefill if replica.state is ready]
        self.router.decode = [replica for replica in self.decode if replica.state is ready]
        waiting, self._unrouted = self._unrouted, []
        self._unrouted = [job for job in waiting if not self._route(job, now_s)]

    def _end_if_empty(self, replica: SimulatedReplica, now_s: float) -> None:
        if replica.state is not ReplicaState.DRAINING or replica.assigned or replica.ended_s is not None:
            return
        replica.ended_s = now_s
        self.ended.append(replica)
        if isinstance(replica, PrefillReplica):
            self.prefill.remove(replica)
        elif isinstance(replica, DecodeReplica):
            self.decode.remove(replica)

    def _named(self, pool: PoolName, name: str) -> SimulatedReplica:
        return next(replica for replica in self.pool(pool) if replica.name == name)
