"""The coordinator's own router before simulated replicas: what it knows comes by reports, as from real workers."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from autoscaler.simulation.cluster import Cluster, ClusterSettings
from autoscaler.simulation.decode_replica import DecodeReplica
from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.jobs import Job
from autoscaler.simulation.prefill_replica import PrefillReplica
from autoscaler.simulation.prefix_cache import PrefixCache
from autoscaler.simulation.replica import Agenda
from autoscaler.simulation.routing import Router as SimulatedRouter
from autoscaler.simulation.trace import BLOCK_TOKENS, Trace, TraceRequest
from coordinator.pools import Model, PoolName, PoolSnapshot, Worker
from coordinator.prefix_hits import NO_HITS
from coordinator.prefix_index import PrefixIndex
from coordinator.routing import Router, RouteRequest
from splitserve.v1 import registry_pb2

REPORT_S = 0.5
SOON_S = 0.1
"""As `splitserve.registry_client`: what a report waits for at most, and at least when the cache has changed."""
_MODEL = Model("trace", "trace", 2**24, 2**24, BLOCK_TOKENS)


class RoutedPools(SimulatedRouter):
    """Chooses pairs with a router of the coordinator's. Blocks are the trace's, of 512 tokens."""

    def __init__(self, engine: EngineModel, router: Router) -> None:
        super().__init__(engine)
        self._model = engine
        self._policy = router
        self._turns = 0
        self._index = PrefixIndex()
        self._workers: dict[str, Worker] = {}
        self._sequence: dict[str, int] = {}
        self._reported_s: dict[str, float] = {}

    def choose(
        self, job: Job, now_s: float, lending: bool
    ) -> tuple[PrefillReplica | None, DecodeReplica | None] | None:
        """See `autoscaler.simulation.routing.Router`."""
        hits = self._index.hits(job.block_ids, now_s) if job.block_ids else NO_HITS
        request = RouteRequest(
            _MODEL.name, job.prompt_tokens, job.output_tokens > 1, turn=self._turns, hits=hits
        )
        self._turns += 1
        pair = self._policy.choose_pair(PoolSnapshot(tuple(self._workers.values())), request, now_s)
        if pair is None:
            return None
        self._sent(pair.prefill, job.prompt_tokens - pair.parts.cached_tokens)
        self._index.expect([pair.prefill.key], job.block_ids, now_s)
        if pair.decode is not None:
            self._sent(pair.decode, job.prompt_tokens)
        prefill = next(r for r in self.prefill if r.name == pair.prefill.worker_id)
        name = pair.decode.worker_id if pair.decode is not None else ""
        return prefill, next((r for r in self.decode if r.name == name), None)

    def report(self, now_s: float) -> None:
        """Takes the reports that are due."""
        replicas: list[PrefillReplica | DecodeReplica] = [*self.prefill, *self.decode]
        for replica in replicas:
            changed = (
                isinstance(replica, PrefillReplica) and replica.cache is not None and replica.cache.changes
            )
            age_s = now_s - self._reported_s.get(replica.name, -REPORT_S)
            if changed or age_s >= REPORT_S - SOON_S / 2:
                self._reported_s[replica.name] = now_s
                self._report(replica)

    def _sent(self, worker: Worker, tokens: int) -> None:
        self._workers[worker.worker_id] = dataclasses.replace(
            worker, sent_requests=worker.sent_requests + 1, sent_tokens=worker.sent_tokens + tokens
        )

    def _report(self, replica: PrefillReplica | DecodeReplica) -> None:
        worker = self._workers.get(replica.name) or self._new_worker(replica)
        if isinstance(replica, PrefillReplica):
            self._tell_cache(replica, worker)
            load = registry_pb2.WorkerLoad(
                waiting_requests=replica.waiting,
                running_requests=replica.load - replica.waiting,
                waiting_tokens=replica.queued_tokens + replica.expected_tokens,
                prefill_tokens_per_second=replica.rates.prefill_tokens_per_s,
            )
        else:
            used = int(replica.context_tokens) // BLOCK_TOKENS
            total = self._model.kv_capacity_tokens // BLOCK_TOKENS
            load = registry_pb2.WorkerLoad(
                total_blocks=total,
                free_blocks=max(0, total - used),
                referenced_blocks=used,
                running_requests=replica.running,
                waiting_reservations=replica.waiting_reservations,
                decode_step_ms=replica.step_s * 1e3,
            )
        self._workers[replica.name] = dataclasses.replace(
            worker,
            load=load,
            reported=True,
            sent_requests=0,
            sent_tokens=0,
            prefix_slot=self._index.slot_of(worker.key),
            connected_agents=frozenset(decode.name for decode in self.decode),
        )

    def _tell_cache(self, replica: PrefillReplica, worker: Worker) -> None:
        sequence = self._sequence[worker.worker_id] = self._sequence.get(worker.worker_id, 0) + 1
        if replica.cache is None:
            return
        changes, replica.cache.changes = replica.cache.changes or {}, {}
        # Parents first: the simulated cache takes a prompt's blocks in from the end.
        stored = [block for block, is_stored in reversed(changes.items()) if is_stored]
        removed = [block for block, is_stored in changes.items() if not is_stored]
        events = registry_pb2.CacheEvents(
            sequence=sequence, cleared=sequence == 1, removed=_names(removed), stored=_names(stored)
        )
        self._index.apply(worker.key, events)

    def _new_worker(self, replica: PrefillReplica | DecodeReplica) -> Worker:
        pool: PoolName = "prefill" if isinstance(replica, PrefillReplica) else "decode"
        return Worker(
            worker_id=replica.name,
            epoch=1,
            pool=pool,
            address="simulated",
            model=_MODEL,
            agent_id=replica.name,
            transport="simulated",
            block_size_tokens=BLOCK_TOKENS,
            max_running_requests=self._model.max_running_requests,
            output_open=True,
            block_bytes=BLOCK_TOKENS * self._model.kv_bytes_per_token,
        )


def _names(blocks: Sequence[int]) -> bytes:
    return array("Q", blocks).tobytes()


@dataclass(frozen=True, slots=True)
class RoutedRun:
    """The requests of a run, all ended, and the prefill replicas' share of the time at work."""

    jobs: Sequence[Job]
    utilization: float

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(job.cached for job in self.jobs)


def play(trace: Trace, engine: EngineModel, router: Router, pairs: int, cache_tokens: int) -> RoutedRun:
    """Plays a trace on so many prefill and as many decode replicas, each prefill replica with a cache of its own."""
    agenda, ended = Agenda(), 0

    def on_end(_job: Job, _now_s: float) -> None:
        nonlocal ended
        ended += 1

    cluster = Cluster(ClusterSettings(engine, cold_start_s=0.0), agenda, lambda _job, _now_s: None, on_end)
    pools = RoutedPools(engine, router)
    cluster.router = pools
    for name in ("prefill", "decode"):
        cluster.order(name, pairs, 0.0, 0.0)
    for replica in cluster.prefill:
        replica.cache = PrefixCache(cache_tokens)
        replica.cache.changes = {}

    def tick(now_s: float) -> None:
        pools.report(now_s)
        agenda.at(now_s + SOON_S, tick)

    tick(0.0)
    jobs = [Job(request) for request in trace.requests]
    for job in jobs:
        agenda.at(job.arrival_s, partial(cluster.arrive, job))
    now_s = 0.0
    while ended < len(jobs):
        now_s, happening = agenda.pop()
        happening(now_s)
    busy_s = sum(replica.busy_s for replica in cluster.prefill)
    return RoutedRun(jobs, busy_s / (pairs * now_s))


def bound_tokens(requests: Sequence[TraceRequest]) -> int:
    """Prompt tokens that a single cache without end would have held, had it each prompt as soon as it arrived."""
    seen: set[int] = set()
    total = 0
    for request in requests:
        known = next(
            (at for at, block in enumerate(request.block_ids) if block not in seen), len(request.block_ids)
        )
        total += min(known * BLOCK_TOKENS, request.prompt_tokens - 1)
        seen.update(request.block_ids)
    return total
